"""On-policy distillation: gradients against the exact divergence over a small vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from strop.algorithms.distillation import reverse_kl_advantages, topk_kl
from strop.algorithms.policy_losses import reinforce

DRAW = torch.Generator().manual_seed(0)
LOGITS = torch.randn(6, generator=DRAW, dtype=torch.float64)
TEACHER = torch.randn(6, generator=DRAW, dtype=torch.float64).log_softmax(0)
TIGHT = {"atol": 1e-10, "rtol": 0.0}


def exact_gradient() -> torch.Tensor:
    logits = LOGITS.clone().requires_grad_()
    student = logits.log_softmax(0)
    return torch.autograd.grad((student.exp() * (student - TEACHER)).sum(), logits)[0]


def test_sampled_tokens_give_the_reverse_kl_gradient_in_expectation() -> None:
    logits = LOGITS.clone().requires_grad_()
    student = logits.log_softmax(0)
    advantages = reverse_kl_advantages(student, TEACHER)
    assert not advantages.requires_grad
    loss = (student.detach().exp() * reinforce(student, advantages)[0]).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], exact_gradient(), **TIGHT)


def test_all_tokens_give_the_whole_divergence() -> None:
    logits = LOGITS.clone().requires_grad_()
    student = logits.log_softmax(0)
    got = topk_kl(student[None], TEACHER[None], tail=False)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), logits)[0], exact_gradient(), **TIGHT)
    forward = topk_kl(student[None], TEACHER[None], direction="forward", tail=False)
    torch.testing.assert_close(forward[0], (TEACHER.exp() * (TEACHER - student)).sum(), **TIGHT)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_tail_makes_it_a_divergence(direction: Any) -> None:
    top = TEACHER.topk(2).indices
    for scale in (0.0, 0.3, 1.0, 3.0):
        student = (TEACHER + scale * LOGITS).log_softmax(0)
        got = topk_kl(student[top][None], TEACHER[top][None], direction=direction)
        assert float(got) >= 0
        assert (float(got) < 1e-12) == (scale == 0.0)
    student = LOGITS.log_softmax(0)[top].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: topk_kl(x[None], TEACHER[top][None], direction=direction), (student,))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_masked_positions(bad: float) -> None:
    mask = torch.tensor([True, False])
    student = torch.stack([LOGITS.log_softmax(0)[:3], torch.full((3,), bad).double()]).requires_grad_()
    teacher = torch.stack([TEACHER[:3], torch.full((3,), bad).double()])
    for direction in ("reverse", "forward"):
        got = topk_kl(student, teacher, direction=direction, mask=mask)  # type: ignore[arg-type]
        assert got[1] == 0
        gradient = torch.autograd.grad(got.sum(), student)[0]
        assert bool(gradient.isfinite().all())
        assert bool((gradient[1] == 0).all())
        assert bool(topk_kl(student, teacher, direction=direction)[1].isnan())  # type: ignore[arg-type]
    got = reverse_kl_advantages(student[:, 0], teacher[:, 0], mask=mask)
    assert got[1] == 0


def test_a_certain_student_stays_finite() -> None:
    student = torch.tensor([[0.0, -200.0]], requires_grad=True)
    for direction in ("reverse", "forward"):
        got = topk_kl(student, torch.tensor([[-0.7, -0.7]]), direction=direction)  # type: ignore[arg-type]
        assert bool(got.isfinite().all())
        assert bool(torch.autograd.grad(got.sum(), student)[0].isfinite().all())


def test_clamp_is_opt_in() -> None:
    far = reverse_kl_advantages(torch.tensor([-1.0]), torch.tensor([-50.0]))
    assert float(far) == -49.0
    assert float(reverse_kl_advantages(torch.tensor([-1.0]), torch.tensor([-50.0]), clamp=5.0)) == -5.0
