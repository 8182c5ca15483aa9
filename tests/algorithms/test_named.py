"""The named algorithms as a trainer sees them: hooks, choices, refusals."""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Any

import pytest
import torch
from batches import fill_student, fill_targets, policy_logprobs, random_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms.batch import TokenBatch
from strop.algorithms.named import ALGORITHMS, PPO, build_algorithm, resolved
from strop.algorithms.policy_gradient import PolicyGradient, choice_of, shown

LENGTHS = [4, 9, 1, 6, 2, 12, 7, 3]


def build(name: str, **choices: Any) -> PolicyGradient:
    return build_algorithm(name, group_size=4, max_new_tokens=12, **choices)


def prepare(algorithm: PolicyGradient, batch: TokenBatch) -> TokenBatch:
    """What a loop does with a batch before it is cut."""
    algorithm.correct(batch)
    batch.advantages = algorithm.advantages(batch)
    return fill_targets(batch) if algorithm.needs_targets else batch


def total_loss(
    algorithm: PolicyGradient,
    batch: TokenBatch,
    logprobs: torch.Tensor,
    counts: Any,
    entropy: torch.Tensor | None = None,
) -> torch.Tensor:
    if algorithm.needs_targets:
        # As a trainer does for each micro-batch.
        fill_student(batch, logprobs)
    terms = algorithm.loss(batch, logprobs, entropy).terms
    return sum(
        (algorithm.reduce(term, batch, counts.get(name, counts[""])) for name, term in terms.items()),
        start=torch.zeros(()),
    )


def gradient(
    algorithm: PolicyGradient, batch: TokenBatch, parts: list[list[int]], *, scale: float = 0.3
) -> torch.Tensor:
    """Gradient with respect to the log-probabilities of the whole batch, summed over parts of its sequences."""
    logprobs = policy_logprobs(batch, scale=scale)
    counts = algorithm.denominators(batch)
    total = torch.zeros((), dtype=logprobs.dtype)
    for part in parts:
        chosen = torch.tensor(sorted(part))
        micro = batch.select(chosen)
        cut = logprobs[torch.isin(batch.seq_ids, chosen)]
        total = total + total_loss(
            algorithm, micro, cut, counts, entropy=cut.square() if algorithm.needs_entropy else None
        )
    return torch.autograd.grad(total, logprobs)[0]


CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ALGORITHMS),
    ("gkd", {"divergence": "forward_kl", "kl_coef": 0.1, "entropy_coef": 0.01}),
    ("gkd", {"divergence": "reverse_kl", "correction": "truncate", "correction_high": 1.02}),
    *(("grpo", {"aggregation": mode}) for mode in ("token_mean", "sequence_mean_token_sum", "constant")),
    ("grpo", {"kl_coef": 0.1, "kl_kind": "k2", "entropy_coef": 0.01, "dual_clip": 3.0}),
    ("grpo", {"correction": "truncate", "correction_high": 1.02}),
    ("dapo", {"correction": "mask", "correction_low": 0.9, "correction_high": 1.1}),
    ("gspo", {"correction": "band", "correction_level": "sequence", "correction_low": 0.9, "correction_high": 1.1}),
    ("rloo", {"kl_coef": 0.1, "kl_in": "reward", "kl_kind": "k1"}),
    ("ppo", {"kl_coef": 0.1, "kl_in": "reward", "kl_kind": "k1"}),
    ("reinforce_pp", {"kl_coef": 0.1, "kl_in": "reward", "kl_kind": "k1"}),
]


@pytest.mark.parametrize(("name", "choices"), CASES)
@settings(max_examples=6, deadline=None)
@given(order=st.permutations(range(len(LENGTHS))), cuts=st.sets(st.integers(1, len(LENGTHS) - 1)))
def test_any_split_into_micro_batches_gives_the_same_gradient(
    name: str, choices: dict[str, Any], order: list[int], cuts: set[int]
) -> None:
    batch = random_batch(LENGTHS, group_ids=[5, 5, 0, 0, 0, 5, 2, 2])
    algorithm = build(name, **choices)
    prepare(algorithm, batch)
    edges = [0, *sorted(cuts), len(LENGTHS)]
    parts = [list(order[a:b]) for a, b in itertools.pairwise(edges)]
    whole = gradient(algorithm, batch, [list(range(len(LENGTHS)))])
    assert whole.abs().max() > 0
    torch.testing.assert_close(gradient(algorithm, batch, parts), whole, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "dapo", "maxrl", "reinforce_pp", "reinforce_pp_baseline", "ppo", "opd"]
)
def test_on_policy_first_update_is_reinforce(name: str) -> None:
    batch = random_batch(LENGTHS, dtype=torch.float32)
    logprobs = policy_logprobs(batch)
    clipped, plain = build(name), build(name, loss="reinforce")
    batch.advantages = clipped.advantages(batch)
    counts = clipped.denominators(batch)
    gradients = []
    for old in (None, logprobs.detach().clone()):
        batch.old_logprobs = old
        terms = clipped.loss(batch, logprobs, None)
        mask = batch.loss_mask
        assert bool((terms.metrics["policy/ratio"][mask] == 1).all())
        assert bool((terms.metrics["policy/clip_fraction"] == 0).all())
        assert bool((terms.metrics["policy/kl_old"] == 0).all())
        gradients.append(torch.autograd.grad(total_loss(clipped, batch, logprobs, counts), logprobs)[0])
    expected = torch.autograd.grad(total_loss(plain, batch, logprobs, counts), logprobs)[0]
    assert bool((expected != 0).any())
    for got in gradients:
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("name", "choices"), CASES)
def test_all_masked_is_zero_with_zero_gradient(name: str, choices: dict[str, Any]) -> None:
    batch = random_batch(LENGTHS)
    batch.loss_mask = torch.zeros_like(batch.loss_mask)
    for garbage in ("sampler_logprobs", "old_logprobs", "ref_logprobs", "values", "teacher_logprobs"):
        setattr(batch, garbage, torch.full_like(batch.sampler_logprobs, torch.nan))
    algorithm = build(name, **choices)
    prepare(algorithm, batch)
    assert bool((batch.advantages == 0).all())
    logprobs = torch.zeros(len(batch.seq_ids), requires_grad=True)
    loss = total_loss(algorithm, batch, logprobs, algorithm.denominators(batch), entropy=logprobs.square())
    assert float(loss.detach()) == 0
    assert bool((torch.autograd.grad(loss, logprobs)[0] == 0).all())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e30, -500.0])
@pytest.mark.parametrize(("name", "choices"), CASES)
def test_masked_tokens_never_matter(name: str, choices: dict[str, Any], bad: float) -> None:
    def run(fill: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        batch = random_batch(LENGTHS)
        outside = ~batch.loss_mask
        for column in ("sampler_logprobs", "old_logprobs", "ref_logprobs", "values", "teacher_logprobs"):
            getattr(batch, column)[outside] = fill
        algorithm = build(name, **choices)
        prepare(algorithm, batch)
        batch.advantages = torch.where(outside, fill, batch.advantages)
        logprobs = torch.where(outside, fill, policy_logprobs(batch).detach()).requires_grad_()
        loss = total_loss(
            algorithm,
            batch,
            logprobs,
            algorithm.denominators(batch),
            entropy=torch.where(outside, 0.0, logprobs).square(),
        )
        return loss, torch.autograd.grad(loss, logprobs)[0], batch.advantages[batch.loss_mask]

    for got, expected in zip(run(bad), run(-1.0), strict=True):
        assert torch.equal(got, expected)


def test_kl_in_the_reward_comes_before_the_baseline() -> None:
    batch = random_batch([3, 3, 3, 3], group_ids=[0, 0, 1, 1])
    algorithm = build("rloo", kl_coef=0.5, kl_in="reward", kl_kind="k1")
    assert algorithm.needs_reference
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    kl = torch.where(batch.loss_mask, batch.old_logprobs - batch.ref_logprobs, 0.0).reshape(4, 3).sum(1)
    shaped = batch.rewards - 0.5 * kl
    expected = torch.stack([shaped[0] - shaped[1], shaped[1] - shaped[0], shaped[2] - shaped[3], shaped[3] - shaped[2]])
    got = algorithm.advantages(batch)
    mask = batch.loss_mask
    torch.testing.assert_close(got[mask].double(), expected[batch.seq_ids][mask].double(), atol=1e-6, rtol=1e-6)
    assert "kl" not in algorithm.loss(replace_advantages(batch, got), policy_logprobs(batch), None).terms


def replace_advantages(batch: TokenBatch, advantages: torch.Tensor) -> TokenBatch:
    batch.advantages = advantages
    return batch


CHANGES: dict[str, Any] = {
    "max_new_tokens": 5,
    "baseline": "leave_one_out",
    "scale": "population_std",
    "scale_eps": 0.1,
    "loss": "reinforce",
    "clip_low": 0.5,
    "clip_high": 0.5,
    "dual_clip": 1.01,
    "aggregation": "sequence_mean_token_sum",
    "kl_coef": 0.3,
    "kl_kind": "k2",
    "kl_in": "reward",
    "kl_clamp": 0.01,
    "kl_input_clamp": 0.01,
    "kl_importance_weighted": True,
    "entropy_coef": 0.3,
    "correction": "none",
    "correction_level": "sequence",
    "correction_low": 0.99,
    "correction_high": 1.01,
    "correction_veto": 0.9,
    "correction_off_policy": 0.01,
    "positive_nll": 0.3,
    "overlong_filter": True,
    "overlong_buffer": 4,
    "overlong_penalty": 0.5,
    "without_spread": "drop",
    "max_refills": 5,
    "whiten_unbiased": False,
    "gamma": 0.5,
    "lam": 0.5,
    "observations": "state",
    "value_clip": 0.01,
    "divergence": "reverse_kl",
    "jsd_beta": 0.2,
    "top_k": 2,
}
OF_THE_LOOP = ("overlong_filter", "without_spread", "max_refills", "top_k")
STARTS: list[dict[str, Any]] = [
    {},
    {"loss": "reinforce"},
    {"kl_coef": 0.1},
    {"kl_coef": 0.1, "kl_in": "reward"},
    {"correction": "truncate", "correction_high": 1.1},
    {"overlong_penalty": 0.7},
]


def fingerprint(name: str, choices: dict[str, Any]) -> torch.Tensor:
    """Gradient of every loss of an algorithm, its critic's included, on a batch that puts all choices to work."""
    groups = [copy * 2 + member for copy in range(6) for member in (0, 0, 0, 1, 1, 1, 1, 1)]
    batch = random_batch(LENGTHS * 6, group_ids=groups)
    batch.values = torch.randn(len(batch.seq_ids), generator=torch.Generator().manual_seed(5))
    algorithm = build_algorithm(name, group_size=4, **{"max_new_tokens": 6, **choices})
    prepare(algorithm, batch)
    got = gradient(algorithm, batch, [list(range(len(groups)))], scale=0.8)
    if isinstance(algorithm, PPO):
        values = (batch.values + 0.1).requires_grad_()
        loss = algorithm.value_loss(batch, values)[0]
        got = torch.cat([got, torch.autograd.grad(loss.sum(), values)[0]])
    return got


@pytest.mark.parametrize("start", STARTS, ids=str)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_choice_changes_the_gradient_or_is_refused(name: str, start: dict[str, Any]) -> None:
    try:
        before = fingerprint(name, start)
    except ValueError as error:
        assert "no effect" in str(error) or "cannot keep" in str(error)  # noqa: PT017
        return
    choices = {choice_of(f.name): f.default for f in fields(ALGORITHMS[name]) if f.init}
    assert choices.keys() <= CHANGES.keys()
    effects = {}
    for choice, default in choices.items():
        value = CHANGES[choice]
        if choice in start or value == default:
            continue
        try:
            after = fingerprint(name, {**start, choice: value})
        except ValueError as error:
            assert shown(choice) in str(error) or choice.removeprefix("correction_") in str(error)  # noqa: PT017
            effects[choice] = "refused"
        else:
            effects[choice] = "none" if torch.allclose(before, after, rtol=1e-6, atol=1e-9) else "changes"
    for choice in OF_THE_LOOP:
        # What the loop does with these is tested with the loop.
        assert effects.pop(choice, "refused") in ("none", "refused")
    if name in ("reinforce", "gspo"):
        # Rewards are never negative here; and where the sequence mask bites, GSPO's clip has ended the gradient.
        effects.pop("correction_off_policy")
    longest = build(name, **start)
    if longest.aggregation != "constant" and not longest.overlong_penalty:
        # The run's own setting, not a choice of the algorithm: harmless where no sum is divided by it.
        assert effects.pop("max_new_tokens") == "none"
    assert "none" not in effects.values(), effects
    assert list(effects.values()).count("changes") >= 3


def test_refusals_speak() -> None:
    with pytest.raises(ValueError, match="group_size must be at least 2"):
        build_algorithm("grpo", group_size=1, max_new_tokens=4)
    with pytest.raises(ValueError, match="unknown algorithm 'gpro'"):
        build_algorithm("gpro", group_size=4, max_new_tokens=4)
    with pytest.raises(ValueError, match="clip_low has no effect with loss 'reinforce'"):
        build("rloo", clip_low=0.2)
    with pytest.raises(ValueError, match="kl_kind has no effect while kl_coef is 0"):
        build("grpo", kl_kind="k2")
    with pytest.raises(ValueError, match="dual_clip must be above 1"):
        build("grpo", dual_clip=0.5)
    with pytest.raises(ValueError, match="wibble is not a choice"):
        build("grpo", wibble=1)
    with pytest.raises(ValueError, match="scale 'mean' needs rewards of at least 0"):
        build("grpo", scale="mean", kl_coef=0.1, kl_in="reward")


def test_what_the_configuration_always_states_is_not_a_choice() -> None:
    stated = {"kl_coef": 0.0, "kl_kind": None, "kl_in": None, "entropy_coef": 0.0, "clip_low": None, "loss": None}
    for name in ALGORITHMS:
        assert build(name, **stated) == build(name)
    assert build_algorithm("reinforce", group_size=1, max_new_tokens=4, **stated).needs_group is False


def test_resolved_choices() -> None:
    assert resolved(build("grpo")) == {
        "name": "grpo",
        "baseline": "mean",
        "scale": "std",
        "scale_eps": 1e-6,
        "loss": "ppo_clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
        "aggregation": "sequence_mean",
        "kl_coef": 0.0,
        "entropy_coef": 0.0,
        "positive_nll": 0.0,
        "correction.kind": None,
        "correction.veto": None,
        "correction.off_policy": None,
        "overlong.filter": False,
        "overlong.penalty": 0.0,
        "without_spread": "keep",
    }
    assert resolved(build("rloo"))["baseline"] == "leave_one_out"
    assert "clip_low" not in resolved(build("rloo"))
    assert resolved(build("dr_grpo"))["max_new_tokens"] == 12
    assert resolved(build("reinforce", kl_coef=0.1))["kl_kind"] == "k3"


@pytest.mark.parametrize("kind", ["mask", "band"])
def test_rejected_tokens_are_not_trained_and_count_only_in_a_band(kind: str) -> None:
    batch = random_batch(LENGTHS)
    assert batch.old_logprobs is not None
    before = batch.loss_mask
    ratio = (batch.old_logprobs - batch.sampler_logprobs).exp()
    inside = before & (ratio >= 0.95) & (ratio <= 1.05)
    assert 0 < int(inside.sum()) < int(before.sum())
    algorithm = build(
        "grpo", aggregation="token_mean", correction=kind, correction_low=0.95, correction_high=1.05, entropy_coef=0.1
    )
    assert algorithm.needs_old_logprobs
    metrics = algorithm.correct(batch)
    outside = 1 - int(inside.sum()) / int(before.sum())
    assert float(metrics["mismatch/clipped_share"]) == pytest.approx(outside)
    batch.advantages = algorithm.advantages(batch)
    assert torch.equal(batch.loss_mask, inside if kind == "mask" else before)
    assert algorithm.denominators(batch) == {"": float((inside if kind == "mask" else before).sum())}
    logprobs = policy_logprobs(batch)
    terms = algorithm.loss(batch, logprobs, logprobs.square()).terms
    assert bool((terms["policy"][~inside] == 0).all())
    # A band weighs the policy's term alone; a mask takes the token out of every term.
    assert bool((terms["entropy"][before & ~inside] == 0).all()) == (kind == "mask")


def test_without_a_correction_the_mismatch_is_only_measured() -> None:
    batch, untouched = random_batch(LENGTHS), random_batch(LENGTHS)
    algorithm = build("grpo")
    assert not algorithm.needs_old_logprobs
    assert float(algorithm.correct(batch)["mismatch/abs_max"]) > 0
    assert batch.extra == {}
    assert torch.equal(batch.loss_mask, untouched.loss_mask)


def test_denominators_count_the_mini_batch() -> None:
    batch = random_batch([10, 10, 10])
    batch.loss_mask = torch.ones(30, dtype=torch.bool)
    batch.loss_mask[:5] = False
    expected = {"token_mean": 25, "sequence_mean": 3, "sequence_mean_token_sum": 3, "constant": 36}
    for mode, count in expected.items():
        assert build("grpo", aggregation=mode).denominators(batch) == {"": count}
    batch.loss_mask[:10] = False
    expected = {"token_mean": 20, "sequence_mean": 2, "sequence_mean_token_sum": 2, "constant": 36}
    for mode, count in expected.items():
        assert build("grpo", aggregation=mode).denominators(batch) == {"": count}
