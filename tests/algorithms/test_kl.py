"""KL estimators: values and gradients in exact expectation over a softmax of six actions, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from strop.algorithms.kl import adaptive_kl_coef, kl_estimate, kl_in_reward
from strop.algorithms.policy_losses import reinforce

TIGHT = {"atol": 1e-10, "rtol": 0.0}


def policies() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(6, generator=draw, dtype=torch.float64).requires_grad_()
    reference = torch.randn(6, generator=draw, dtype=torch.float64).log_softmax(0)
    return logits, reference


def expected_gradient(per_action: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Gradient of a loss of sampled actions, in expectation over the policy: sum of p(a) (d loss of a)."""
    logits, reference = policies()
    logprobs = logits.log_softmax(0)
    loss = (logprobs.detach().exp() * per_action(logprobs, reference)).sum()
    return torch.autograd.grad(loss, logits, allow_unused=True)[0]


def exact(direction: str) -> Tensor:
    logits, reference = policies()
    logprobs = logits.log_softmax(0)
    if direction == "reverse":
        divergence = (logprobs.exp() * (logprobs - reference)).sum()
    else:
        divergence = (reference.exp() * (reference - logprobs)).sum()
    return torch.autograd.grad(divergence, logits)[0]


def test_gradients_in_the_loss() -> None:
    def gradient(kind: str, **settings: bool) -> Tensor:
        return expected_gradient(lambda new, ref: kl_estimate(new, ref, kind, **settings))  # type: ignore[arg-type]

    assert float((exact("reverse") - exact("forward")).abs().max()) > 0.01
    torch.testing.assert_close(gradient("k1"), torch.zeros(6, dtype=torch.float64), **TIGHT)
    torch.testing.assert_close(gradient("k2"), exact("reverse"), **TIGHT)
    torch.testing.assert_close(gradient("k3"), exact("forward"), **TIGHT)
    torch.testing.assert_close(gradient("k3", importance_weighted=True), exact("reverse"), **TIGHT)
    torch.testing.assert_close(gradient("k1", importance_weighted=True), exact("reverse"), **TIGHT)


def test_k1_in_the_reward_is_exact() -> None:
    def penalty(new: Tensor, ref: Tensor) -> Tensor:
        mask, ids = torch.ones(6, dtype=torch.bool), torch.arange(6)
        rewards = torch.zeros(6, dtype=torch.float64)
        return reinforce(new, kl_in_reward(rewards, kl_estimate(new, ref, "k1"), mask, ids, kl_coef=1.0))[0]

    torch.testing.assert_close(expected_gradient(penalty), exact("reverse"), **TIGHT)


def test_importance_weights_of_an_older_policy_are_exact() -> None:
    logits, reference = policies()
    logprobs = logits.log_softmax(0)
    old = torch.tensor([0.1, 0.3, 0.2, 0.1, 0.2, 0.1], dtype=torch.float64).log()
    for kind in ("k1", "k3"):
        estimate = kl_estimate(logprobs, reference, kind, importance_weighted=True, old_logprobs=old)  # type: ignore[arg-type]
        loss = (old.exp() * estimate).sum()
        torch.testing.assert_close(loss, (logprobs.exp() * (logprobs - reference)).sum(), **TIGHT)
        got = torch.autograd.grad(loss, logits, retain_graph=True)[0]
        torch.testing.assert_close(got, exact("reverse"), **TIGHT)


def test_values_are_unbiased() -> None:
    logits, reference = policies()
    logprobs = logits.detach().log_softmax(0)
    truth = (logprobs.exp() * (logprobs - reference)).sum()
    for kind in ("k1", "k3"):
        for weighted in (False, True):
            estimate = kl_estimate(logprobs, reference, kind, importance_weighted=weighted)  # type: ignore[arg-type]
            torch.testing.assert_close((logprobs.exp() * estimate).sum(), truth, **TIGHT)
    assert bool((kl_estimate(logprobs, reference, "k3") >= 0).all())


def test_a_clamp_ends_the_gradient() -> None:
    new = torch.tensor([-2.0, -2.62, -5.0], dtype=torch.float64, requires_grad=True)
    free, clamped = (kl_estimate(new, torch.zeros(3), "k3", clamp=clamp) for clamp in (None, 10.0))
    assert bool((torch.autograd.grad(free.sum(), new)[0] != 0).all())
    gradient = torch.autograd.grad(clamped.sum(), new)[0]
    assert gradient[0] != 0
    assert bool((gradient[1:] == 0).all())
    torch.testing.assert_close(clamped[1:], torch.full((2,), 10.0, dtype=torch.float64))
    bounded = kl_estimate(torch.tensor([-50.0]), torch.zeros(1), "k1", input_clamp=20.0)
    assert float(bounded) == -20.0


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("weighted", [False, True])
def test_masked_tokens(kind: str, weighted: bool) -> None:
    new = torch.tensor([-1.0, torch.nan, -torch.inf, -1.0, 0.0], requires_grad=True)
    ref = torch.tensor([-2.0, -1.0, -1.0, torch.nan, -1e30])
    mask = torch.tensor([True, False, False, False, False])
    got = kl_estimate(new, ref, kind, importance_weighted=weighted, mask=mask)  # type: ignore[arg-type]
    assert bool((got[1:] == 0).all())
    assert got[0] != 0
    gradient = torch.autograd.grad(got.sum(), new)[0]
    assert bool((gradient[1:] == 0).all())
    # Without a mask: NaN shows, but has no gradient.
    got = kl_estimate(new[:4], ref[:4], kind, importance_weighted=weighted)  # type: ignore[arg-type]
    assert got.isnan().tolist() == [False, True, True, True]
    assert bool(torch.autograd.grad(got.nansum(), new)[0].isfinite().all())


def test_refusals() -> None:
    one = torch.zeros(1)
    for settings in ({"kind": "k4"}, {"clamp": 0.0}, {"input_clamp": -1.0}, {"old_logprobs": one}):
        with pytest.raises(ValueError, match=r"unknown KL|must be positive|no effect"):
            kl_estimate(one, one, **settings)  # type: ignore[arg-type]


def test_adaptive_coefficient_steers_to_the_target() -> None:
    settings = {"target": 6.0, "horizon": 100.0, "steps": 10.0}
    assert adaptive_kl_coef(0.2, 6.0, **settings) == 0.2
    assert adaptive_kl_coef(0.2, 600.0, **settings) == pytest.approx(0.2 * 1.02)
    assert adaptive_kl_coef(0.2, 0.0, **settings) == pytest.approx(0.2 * 0.98)
    assert adaptive_kl_coef(0.2, 6.6, **settings) == pytest.approx(0.2 * 1.01)
    coef, kl = 0.01, 20.0
    for _ in range(2000):
        # A policy whose divergence falls as the penalty rises.
        kl = 1.0 / coef
        coef = adaptive_kl_coef(coef, kl, **settings)
    assert kl == pytest.approx(6.0, rel=0.05)
