"""Time every function on 64 x 4,096 tokens: `python tests/algorithms/measure_speed.py`. A script, not a test."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from strop.algorithms import (
    advantages,
    aggregation,
    corrections,
    covariance,
    distillation,
    estimators,
    kl,
    sampling_rules,
)
from strop.algorithms import policy_losses as losses

EPISODES, TOKENS, REPEATS = 64, 4096, 7


def milliseconds(function: Callable[[], object]) -> float:
    function()
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        function()
        times.append((time.process_time() - start) * 1e3)
    return statistics.median(times)


def cases() -> dict[str, Callable[[], object]]:
    draw = torch.Generator().manual_seed(0)
    shape = (EPISODES * TOKENS,)
    ids = torch.arange(EPISODES).repeat_interleave(TOKENS)
    mask = torch.rand(shape, generator=draw) < 0.9
    old = -torch.rand(shape, generator=draw)
    new = (old + 0.1 * torch.randn(shape, generator=draw)).requires_grad_()
    adv, values = torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)
    rewards, groups = torch.rand(EPISODES, generator=draw), torch.arange(EPISODES) // 8
    selected = torch.rand(shape, generator=draw) < 0.01
    given = estimators.token_rewards(rewards, mask, ids)
    top = torch.randn(*shape, 8, generator=draw).log_softmax(-1)

    def both_ways(loss: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(loss().sum(), new)

    every: dict[str, Callable[[], object]] = {
        f"gae {way}": lambda way=way: advantages.gae(
            given, values, mask, gamma=1, lam=0.95, observations=way, seq_ids=ids
        )  # type: ignore[misc]
        for way in ("skip", "state", "state_drop_rewards", "zero")
    }
    every |= {
        "gae_decoupled": lambda: estimators.gae_decoupled(given, values, mask, gamma=1, lam=0.95, seq_ids=ids),
        "length_adaptive_lam": lambda: estimators.length_adaptive_lam(mask, ids),
        "discounted_returns": lambda: advantages.discounted_returns(given, mask, gamma=0.99, seq_ids=ids),
        "whiten": lambda: advantages.whiten(adv, mask),
        "group_relative": lambda: advantages.group_relative(rewards, groups, scale="std"),
        "token_rewards": lambda: estimators.token_rewards(rewards, mask, ids),
        "aggregate sequence_mean": both_ways(
            lambda: aggregation.aggregate(new, mask, ids, mode="sequence_mean", denominator=64)
        ),
        "denominators": lambda: aggregation.denominators(mask, ids, max_new_tokens=TOKENS),
        "reinforce": both_ways(lambda: losses.reinforce(new, adv, old_logprobs=old, mask=mask)[0]),
        "ppo_clip": both_ways(lambda: losses.ppo_clip(new, old, adv, dual_clip=3.0, mask=mask)[0]),
        "gspo": both_ways(lambda: losses.gspo(new, old, adv, mask, ids)[0]),
        "gmpo": both_ways(lambda: losses.gmpo(new, old, adv, mask, ids)[0]),
        "cispo": both_ways(lambda: losses.cispo(new, old, adv, mask=mask)[0]),
        "sapo": both_ways(lambda: losses.sapo(new, old, adv, mask=mask)[0]),
        "dppo tv": both_ways(lambda: losses.dppo(new, old, adv, mask=mask)[0]),
        "dppo kl": both_ways(lambda: losses.dppo(new, old, adv, divergence="kl", mask=mask)[0]),
        "value_loss": both_ways(lambda: losses.value_loss(new, old, adv, clip=0.2, mask=mask)[0]),
        "token_covariance": lambda: covariance.token_covariance(old, adv, mask),
        "select_kl_cov": lambda: covariance.select_kl_cov(adv, mask),
        "select_clip_cov": lambda: covariance.select_clip_cov(adv, mask, generator=draw),
        "clip_cov": both_ways(lambda: covariance.clip_cov(new, old, adv, selected, mask=mask)[0]),
        "kl_cov": both_ways(lambda: covariance.kl_cov(new, old, adv, selected, mask=mask)[0]),
        "kl_estimate k3 weighted": both_ways(lambda: kl.kl_estimate(new, old, importance_weighted=True, mask=mask)),
        "kl_in_reward": lambda: kl.kl_in_reward(rewards, adv, mask, ids, kl_coef=0.1),
        "importance_weights token": lambda: corrections.importance_weights(old, adv, mask, ids),
        "importance_weights sequence": lambda: corrections.importance_weights(old, adv, mask, ids, level="sequence"),
        "veto": lambda: corrections.veto(old, adv, mask, ids),
        "off_policy_sequence_mask": lambda: corrections.off_policy_sequence_mask(
            old, old, adv, mask, ids, threshold=0.1
        ),
        "reverse_kl_advantages": lambda: distillation.reverse_kl_advantages(old, adv, mask=mask),
        "topk_kl, 8 of the teacher's": lambda: distillation.topk_kl(top, top, mask=mask),
        "overlong_filter": lambda: sampling_rules.overlong_filter(mask, rewards > 0.5, ids),
    }
    return every


if __name__ == "__main__":
    # Processor time of one thread: it does not depend on what else the machine is doing.
    torch.set_num_threads(1)
    print(f"median of {REPEATS}, processor time of one thread, {EPISODES} x {TOKENS} tokens; losses with backward")
    for name, function in cases().items():
        print(f"{milliseconds(function):8.1f} ms  {name}")
