"""Every function of the maths on 64 x 4,096 tokens, losses with their backward pass; the aim is 50 ms on two cores.

Wall-clock time, the median of the repeats, after one call that is not counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import measure
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

AIM_MS = 50.0


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Time all functions; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=7)
    parser.add_argument("--episodes", type=int, default=64, help="sequences in the batch")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of each")
    options: argparse.Namespace = parser.parse_args(argv)
    if options.smoke:
        options.episodes, options.tokens, options.repeats = 16, 16, 1
    measure.use_threads(options.threads)
    found = {
        name: measure.median([milliseconds(function) for _ in range(options.repeats)])
        for name, function in cases(options.episodes, options.tokens).items()
    }
    slowest = max(found, key=lambda name: found[name])
    numbers = {
        "tokens": options.episodes * options.tokens,
        "milliseconds": {name: round(value, 2) for name, value in found.items()},
        "slowest": slowest,
        "aim_ms": AIM_MS,
        "above_the_aim": sorted(name for name, value in found.items() if value > AIM_MS),
    }
    measure.write("algorithms_speed", numbers, options)
    return numbers


def milliseconds(function: Callable[[], object]) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def cases(episodes: int, tokens: int) -> dict[str, Callable[[], object]]:
    """Name -> a call, made once already; a loss is called with its backward pass."""
    draw = torch.Generator().manual_seed(0)
    shape = (episodes * tokens,)
    ids = torch.arange(episodes).repeat_interleave(tokens)
    mask = torch.rand(shape, generator=draw) < 0.9
    old = -torch.rand(shape, generator=draw)
    new = (old + 0.1 * torch.randn(shape, generator=draw)).requires_grad_()
    adv, values = torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)
    rewards, groups = torch.rand(episodes, generator=draw), torch.arange(episodes) // 8
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
            lambda: aggregation.aggregate(new, mask, ids, mode="sequence_mean", denominator=episodes)
        ),
        "denominators": lambda: aggregation.denominators(mask, ids, max_new_tokens=tokens),
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
    for function in every.values():
        function()
    return every


if __name__ == "__main__":
    main()
