"""Policy losses: exact gradients, masks, and each paper's behaviour on both sides of its bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.algorithms.aggregation import aggregate
from strop.algorithms.covariance import clip_cov, kl_cov
from strop.algorithms.kl import kl_estimate
from strop.algorithms.policy_losses import (
    cispo,
    dppo,
    entropy_bonus,
    gmpo,
    gspo,
    positive_nll,
    ppo_clip,
    reinforce,
    sapo,
    topr,
    value_loss,
)

T = 24
IDS = torch.arange(4).repeat_interleave(6)
SELECTED = torch.arange(T) % 5 == 0

Loss = Callable[..., Tensor]

LOSSES: dict[str, Loss] = {
    "ppo_clip": lambda n, o, a, m: ppo_clip(n, o, a, mask=m)[0],
    "ppo_clip dual": lambda n, o, a, m: ppo_clip(n, o, a, dual_clip=1.2, mask=m)[0],
    "reinforce": lambda n, o, a, m: reinforce(n, a, old_logprobs=o, mask=m)[0],
    "gspo": lambda n, o, a, m: gspo(n, o, a, m, IDS, clip_low=0.05, clip_high=0.05)[0],
    "gmpo": lambda n, o, a, m: gmpo(n, o, a, m, IDS, clip_low=0.1, clip_high=0.1)[0],
    "sapo": lambda n, o, a, m: sapo(n, o, a, mask=m)[0],
    "dppo tv": lambda n, o, a, m: dppo(n, o, a, threshold=0.05, mask=m)[0],
    "dppo kl": lambda n, o, a, m: dppo(n, o, a, divergence="kl", threshold=0.01, mask=m)[0],
    "clip_cov": lambda n, o, a, m: clip_cov(n, o, a, SELECTED, mask=m)[0],
    "kl_cov": lambda n, o, a, m: kl_cov(n, o, a, SELECTED, mask=m)[0],
    "value": lambda n, o, a, m: value_loss(n, o, a, mask=m)[0],
    "value clipped": lambda n, o, a, m: value_loss(n, o, a, clip=0.2, mask=m)[0],
    "entropy": lambda n, o, a, m: entropy_bonus(n.square(), coef=0.1, mask=m),
    "positive nll": lambda n, o, a, m: positive_nll(n, a > 0, coef=0.1, mask=m),
    "k1": lambda n, o, a, m: kl_estimate(n, o, "k1", mask=m),
    "k2": lambda n, o, a, m: kl_estimate(n, o, "k2", mask=m),
    "k3": lambda n, o, a, m: kl_estimate(n, o, "k3", mask=m),
    "abs": lambda n, o, a, m: kl_estimate(n, o, "abs", mask=m),
}
# Their value is not the integral of their gradient, by design: a constant weight, or a gradient of one token.
STOPPED: dict[str, Loss] = {
    "cispo": lambda n, o, a, m: cispo(n, o, a, mask=m)[0],
    "gspo token": lambda n, o, a, m: gspo(n, o, a, m, IDS, clip_low=0.05, clip_high=0.05, token_level=True)[0],
    "topr": lambda n, o, a, m: topr(n, o, a, m, IDS)[0],
    "k3 weighted": lambda n, o, a, m: kl_estimate(n, o, "k3", importance_weighted=True, mask=m),
}
BY_SEQUENCE = {"gspo", "gspo token", "gmpo", "topr"}
EVERY = LOSSES | STOPPED


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    old = -torch.rand(T, generator=draw, dtype=torch.float64) * 2 - 0.2
    new = (old + torch.randn(T, generator=draw, dtype=torch.float64) * 0.5).clamp(max=-0.01).requires_grad_()
    advantages = torch.randn(T, generator=draw, dtype=torch.float64)
    return new, old, advantages, torch.rand(T, generator=draw) < 0.7


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", [0, 1])
def test_gradcheck(name: str, seed: int) -> None:
    new, old, advantages, mask = inputs(seed)
    assert torch.autograd.gradcheck(lambda n: LOSSES[name](n, old, advantages, mask), (new,))
    loss = LOSSES[name](new, old, advantages, mask)
    assert loss.dtype == torch.float64
    assert bool((torch.autograd.grad(loss.sum(), new)[0] != 0).any())


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e30, -1e4])
def test_masked_tokens_never_leak(name: str, bad: float) -> None:
    results = []
    for fill in (bad, -1.0):
        new, old, advantages, mask = inputs()
        new = torch.where(mask, new.detach(), fill).float().requires_grad_()
        old, advantages = (torch.where(mask, x, fill).float() for x in (old, advantages))
        loss = EVERY[name](new, old, advantages, mask) if name != "entropy" else entropy_bonus(new, coef=1.0, mask=mask)
        total = aggregate(loss, mask, IDS, mode="token_mean", denominator=1)
        results.append((loss.detach(), torch.autograd.grad(total, new)[0]))
    assert results[0][0].dtype == torch.float32
    assert bool((results[0][0][~mask] == 0).all())
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", sorted(EVERY.keys() - BY_SEQUENCE - {"entropy"}))
def test_without_a_mask_nan_shows_but_has_no_gradient(name: str) -> None:
    new, old, advantages, mask = inputs()
    broken = torch.where(mask, new.detach(), torch.nan).requires_grad_()
    loss = EVERY[name](broken, old, advantages, None)
    hidden = ~mask
    if name == "clip_cov":
        hidden = hidden & ~SELECTED
    assert bool(loss[hidden].isnan().all())
    total = aggregate(loss, mask, IDS, mode="sequence_mean", denominator=4)
    gradient = torch.autograd.grad(total, broken)[0]
    assert bool(total.isfinite())
    assert bool(gradient.isfinite().all())
    assert bool((gradient[~mask] == 0).all())
    # Where the mask is True, NaN is an error that must be seen.
    assert bool(aggregate(loss, torch.ones_like(mask), IDS, denominator=1).isnan())


@pytest.mark.parametrize("name", EVERY)
def test_all_masked_is_zero(name: str) -> None:
    new, old, advantages, mask = inputs()
    nothing = torch.zeros_like(mask)
    total = aggregate(EVERY[name](new, old * torch.nan, advantages, nothing), nothing, IDS, denominator=0)
    assert float(total.detach()) == 0
    assert bool((torch.autograd.grad(total, new)[0] == 0).all())


@pytest.mark.parametrize("name", sorted(EVERY.keys() - BY_SEQUENCE))
def test_padded_equals_flat(name: str) -> None:
    new, old, advantages, mask = inputs()
    if "cov" in name:
        pytest.skip("the selection here has the flat shape")
    flat = EVERY[name](new, old, advantages, mask)
    padded = EVERY[name](*(x.reshape(4, 6) for x in (new, old, advantages, mask)))
    assert torch.equal(padded.flatten(), flat)


ON_POLICY = {name: EVERY[name] for name in ("ppo_clip", "ppo_clip dual", "cispo", "sapo", "dppo tv", "dppo kl", "topr")}


@pytest.mark.parametrize("name", ON_POLICY)
def test_on_policy_gradient_is_reinforce(name: str) -> None:
    new, _, advantages, mask = inputs()
    new = new.detach().float().requires_grad_()
    expected = torch.autograd.grad(reinforce(new, advantages.float(), mask=mask)[0].sum(), new)[0]
    loss = ON_POLICY[name](new, new.detach(), advantages.float(), mask)
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), new)[0], expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["gspo", "gspo token", "gmpo"])
def test_on_policy_sequence_losses_have_the_gradient_of_the_mean(name: str) -> None:
    new, _, _, mask = inputs()
    advantages = torch.tensor([1.0, -0.5, 2.0, 0.3], dtype=torch.float64)[IDS]
    loss = EVERY[name](new, new.detach(), advantages, mask)
    got = torch.autograd.grad(aggregate(loss, mask, IDS, mode="sequence_mean", denominator=4), new)[0]
    plain = aggregate(reinforce(new, advantages, mask=mask)[0], mask, IDS, mode="sequence_mean", denominator=4)
    torch.testing.assert_close(got, torch.autograd.grad(plain, new)[0], atol=1e-12, rtol=1e-12)


def ratio_case(ratios: list[float], advantages: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    new = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    return new, torch.zeros(len(ratios), dtype=torch.float64), torch.tensor(advantages, dtype=torch.float64)


def test_ppo_clip_regions() -> None:
    new, old, advantages = ratio_case([1.5, 1.5, 0.5, 0.5, 1.1, 9.0], [1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    loss, metrics = ppo_clip(new, old, advantages, clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    torch.testing.assert_close(loss.detach(), torch.tensor([-1.3, 1.5, -0.5, 0.8, -1.1, 3.0]).double())
    gradient = torch.autograd.grad(loss.sum(), new)[0]
    assert (gradient != 0).tolist() == [False, True, True, False, True, False]
    assert metrics["policy/clip_fraction"].tolist() == [1, 0, 0, 1, 0, 0]
    assert metrics["policy/dual_clip_fraction"].tolist() == [0, 0, 0, 0, 0, 1]
    torch.testing.assert_close(metrics["policy/ratio"], new.detach().exp())
    assert not any(value.requires_grad for value in metrics.values())


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    new, old, advantages = ratio_case([3.0, 0.1, 1.0], [2.0, 2.0, 2.0])
    loss, metrics = cispo(new, old, advantages, clip_low=0.5, clip_high=0.2)
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), new)[0], torch.tensor([-2.4, -1.0, -2.0]).double())
    assert metrics["policy/clip_fraction"].tolist() == [1, 1, 0]


def test_topr_weighs_what_is_bad_by_the_ratio_of_its_sequence_at_most_once() -> None:
    """By hand: ratios of whole sequences 1/8, 4, 1/8 and 4, of which only the first is bad and out of favour."""
    new = torch.tensor([[0.25, 0.5], [2.0, 2.0], [0.25, 0.5], [2.0, 2.0]]).double().flatten().log().requires_grad_()
    advantages = torch.tensor([-1.0, -1.0, 3.0, 3.0]).double().repeat_interleave(2)
    ids, mask = torch.arange(4).repeat_interleave(2), torch.ones(8, dtype=torch.bool)
    loss, metrics = topr(new, torch.zeros(8).double(), advantages, mask, ids)
    expected = torch.tensor([0.125, 0.125, 1.0, 1.0, -3.0, -3.0, -3.0, -3.0]).double()
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), new)[0], expected)
    assert metrics["policy/tapered_fraction"].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    torch.testing.assert_close(metrics["policy/sequence_ratio"], torch.tensor([0.125, 4, 0.125, 4]).double()[ids])


def test_gspo_token_equals_gspo_in_value_and_summed_gradient() -> None:
    new, old, _, mask = inputs()
    advantages = torch.tensor([1.0, -0.5, 2.0, 0.3], dtype=torch.float64)[IDS]
    gradients = []
    for name in ("gspo", "gspo token"):
        loss = EVERY[name](new, old, advantages, mask)
        gradients.append(torch.autograd.grad(aggregate(loss, mask, IDS, mode="sequence_mean", denominator=1), new)[0])
    torch.testing.assert_close(
        EVERY["gspo"](new, old, advantages, mask), EVERY["gspo token"](new, old, advantages, mask)
    )
    torch.testing.assert_close(*gradients)


def test_gspo_token_gives_each_token_its_own_gradient() -> None:
    new, old, advantages, mask = inputs()
    reached = []
    for token_level in (True, False):
        loss, _ = gspo(new, old, advantages, mask, IDS, clip_low=9.0, clip_high=9.0, token_level=token_level)
        reached.append(torch.autograd.grad(loss[mask][0], new)[0] != 0)
    assert reached[0].nonzero().tolist() == mask.nonzero()[:1].tolist()
    assert torch.equal(reached[1], mask & (IDS[mask][0] == IDS))
    assert int(reached[1].sum()) > 1


def test_gmpo_of_one_token_clips_log_ratios() -> None:
    new, old, advantages = ratio_case([3.0, 3.0, 0.1, 0.1], [1.0, -1.0, 1.0, -1.0])
    ids, mask = torch.arange(4), torch.ones(4, dtype=torch.bool)
    loss, metrics = gmpo(new, old, advantages, mask, ids, clip_low=0.4, clip_high=0.5)
    expected = torch.stack([-torch.tensor(0.5).exp(), torch.tensor(3.0), torch.tensor(-0.1), torch.tensor(-0.4).exp()])
    torch.testing.assert_close(loss.detach(), expected.double(), atol=1e-6, rtol=1e-6)
    assert metrics["policy/clip_fraction"].tolist() == [1, 0, 0, 1]


def test_gmpo_is_a_geometric_mean() -> None:
    new, old, _, mask = inputs()
    loss, _ = gmpo(new, old, torch.ones(T), mask, IDS, clip_low=9.0, clip_high=9.0)
    for sequence in range(4):
        chosen = mask & (sequence == IDS)
        product = (new - old)[chosen].exp().prod() ** (1 / int(chosen.sum()))
        torch.testing.assert_close(-loss[chosen], product.expand(int(chosen.sum())))


def test_dppo_drops_only_tokens_on_the_way_out() -> None:
    old = torch.tensor([0.5, 0.5, 0.5, 0.5, 1e-4, 0.5], dtype=torch.float64).log()
    new = torch.tensor([0.9, 0.9, 0.1, 0.1, 1e-2, 0.55], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
    for divergence, threshold in (("tv", 0.2), ("kl", 0.05)):
        loss, metrics = dppo(new, old, advantages, divergence=divergence, threshold=threshold)  # type: ignore[arg-type]
        # A rare token may grow a hundredfold: it moves little probability. PPO would clip it.
        assert metrics["policy/clip_fraction"].tolist() == [1, 0, 0, 1, 0, 0]
        assert (torch.autograd.grad(loss.sum(), new)[0] == 0).tolist() == [True, False, False, True, False, False]
    p, q = 0.5, 0.9
    expected = p * torch.tensor(p / q).log() + (1 - p) * torch.tensor((1 - p) / (1 - q)).log()
    torch.testing.assert_close(metrics["policy/divergence"][0], expected.double(), atol=1e-6, rtol=1e-6)


def test_dppo_at_certainty_is_finite() -> None:
    new = torch.tensor([0.0, -1e-9, 1e-5], requires_grad=True)
    loss, metrics = dppo(new, torch.tensor([-1e-9, 0.0, 0.0]), torch.ones(3), divergence="kl", threshold=0.05)
    assert bool(metrics["policy/divergence"].isfinite().all())
    assert bool(torch.autograd.grad(loss.sum(), new)[0].isfinite().all())


def test_sapo_gate_is_one_on_policy_and_softer_for_negative_advantages() -> None:
    new, old, advantages = ratio_case([1.0, 1.0, 2.0, 2.0], [1.0, -1.0, 1.0, -1.0])
    _, metrics = sapo(new, old, advantages)
    gate = metrics["policy/gate"]
    assert gate[:2].tolist() == [1, 1]
    assert gate[3] < gate[2] < 1


def test_value_clip_takes_the_worse() -> None:
    values = torch.tensor([2.0, 2.0, 0.1], requires_grad=True)
    old, returns = torch.zeros(3), torch.tensor([1.0, 3.0, 0.1])
    loss, metrics = value_loss(values, old, returns, clip=0.5)
    torch.testing.assert_close(loss.detach(), torch.tensor([0.5, 3.125, 0.0]))
    assert torch.autograd.grad(loss.sum(), values)[0].tolist() == [1.0, 0.0, 0.0]
    assert metrics["value/clip_fraction"].tolist() == [0, 1, 0]


def test_overflowing_ratios_stay_finite() -> None:
    new = torch.tensor([-1.0, -1.0], requires_grad=True)
    old, advantages = torch.tensor([-500.0, -500.0]), torch.tensor([1.0, -1.0])
    for function in (ppo_clip, cispo, sapo, dppo):
        loss, metrics = function(new, old, advantages)  # type: ignore[operator]
        assert bool(torch.autograd.grad(loss.sum(), new)[0].isfinite().all())
        assert all(bool(value.isfinite().all()) for value in metrics.values())


REFUSED: list[tuple[Loss, dict[str, Any]]] = [
    (ppo_clip, {"clip_low": -0.1}),
    (ppo_clip, {"dual_clip": 1.0}),
    (cispo, {"clip_high": -1.0}),
    (sapo, {"tau_positive": 0.0}),
    (dppo, {"threshold": 0.0}),
    (dppo, {"divergence": "js"}),
    (value_loss, {"clip": 0.0}),
]


@pytest.mark.parametrize(("function", "settings"), REFUSED)
def test_refusals(function: Loss, settings: dict[str, Any]) -> None:
    one = torch.zeros(1)
    with pytest.raises(ValueError, match=r"must be|unknown"):
        function(one, one, one, **settings)
