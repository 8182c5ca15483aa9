"""Distillation: values and gradients against the exact divergence over a small vocabulary."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from batches import random_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms.distillation import event_divergence, mixture, reverse_kl_advantages, topk_kl
from strop.algorithms.named import build_algorithm
from strop.algorithms.policy_losses import reinforce
from strop.algorithms.targets import Distillation

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


# --- over events: K tokens and all others --------------------------------------------------------------------------

KINDS = ("forward_kl", "reverse_kl", "jensen_shannon")


def by_hand(p: list[float], q: list[float], kind: str, beta: float = 0.5) -> float:
    """The divergence of two distributions, student p and teacher q, number by number."""

    def kl(a: list[float], b: list[float]) -> float:
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    if kind == "forward_kl":
        return kl(q, p)
    if kind == "reverse_kl":
        return kl(p, q)
    middle = [beta * y + (1 - beta) * x for x, y in zip(p, q, strict=True)]
    return beta * kl(q, middle) + (1 - beta) * kl(p, middle)


def logs(numbers: list[float]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64).log()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_a_divergence_is_the_formula(kind: Any, beta: float) -> None:
    p, q = [0.5, 0.3, 0.2], [0.2, 0.7, 0.1]
    got = event_divergence(logs(p)[None], logs(q)[None], kind, beta=beta)
    assert float(got) == pytest.approx(by_hand(p, q, kind, beta), abs=1e-12)
    assert float(event_divergence(logs(q)[None], logs(q)[None], kind, beta=beta)) == pytest.approx(0, abs=1e-12)


def test_jensen_shannon_of_a_half_is_symmetric_and_at_most_log_two() -> None:
    p, q = logs([1 - 1e-12, 1e-12]), logs([1e-12, 1 - 1e-12])
    there, back = (float(event_divergence(a[None], b[None], "jensen_shannon")) for a, b in ((p, q), (q, p)))
    assert there == pytest.approx(back, abs=1e-12)
    assert there == pytest.approx(math.log(2), abs=1e-9)


def test_jensen_shannon_becomes_the_two_others() -> None:
    p, q, small = logs([0.5, 0.3, 0.2])[None], logs([0.2, 0.7, 0.1])[None], 1e-7
    forward = event_divergence(p, q, "jensen_shannon", beta=small) / small
    torch.testing.assert_close(forward, event_divergence(p, q, "forward_kl"), atol=1e-6, rtol=0.0)
    reverse = event_divergence(p, q, "jensen_shannon", beta=1 - small) / small
    torch.testing.assert_close(reverse, event_divergence(p, q, "reverse_kl"), atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_over_events_in_float64(kind: Any) -> None:
    student = torch.stack([LOGITS, LOGITS.flip(0)]).requires_grad_()
    teacher = torch.stack([TEACHER, TEACHER])

    def through_a_softmax(logits: torch.Tensor) -> torch.Tensor:
        return event_divergence(logits.log_softmax(-1), teacher, kind, beta=0.3)

    assert torch.autograd.gradcheck(through_a_softmax, (student,))
    if kind == "reverse_kl":
        logits = LOGITS.clone().requires_grad_()
        got = torch.autograd.grad(event_divergence(logits.log_softmax(0)[None], TEACHER[None], kind).sum(), logits)[0]
        torch.testing.assert_close(got, exact_gradient(), **TIGHT)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-8, 8), min_size=6, max_size=6), st.integers(1, 5), st.sampled_from(KINDS))
def test_telling_fewer_tokens_apart_never_makes_it_more(numbers: list[float], k: int, kind: Any) -> None:
    student, teacher = torch.tensor(numbers, dtype=torch.float64).log_softmax(0), TEACHER
    whole = float(event_divergence(student[None], teacher[None], kind))
    order = teacher.argsort(descending=True)

    def told(logprobs: torch.Tensor) -> torch.Tensor:
        return torch.cat([logprobs[order[:k]], logprobs[order[k:]].logsumexp(0)[None]])[None]

    assert -1e-12 <= float(event_divergence(told(student), told(teacher), kind)) <= whole + 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_masked_events_do_not_matter(kind: Any, bad: float) -> None:
    mask = torch.tensor([True, False])
    student = torch.stack([LOGITS.log_softmax(0), torch.full((6,), bad).double()]).requires_grad_()
    teacher = torch.stack([TEACHER, torch.full((6,), bad).double()])
    got = event_divergence(student, teacher, kind, mask=mask)
    assert got[1] == 0
    gradient = torch.autograd.grad(got.sum(), student)[0]
    assert bool(gradient.isfinite().all())
    assert bool((gradient[1] == 0).all())


@pytest.mark.parametrize("kind", KINDS)
def test_impossible_events_stay_finite(kind: Any) -> None:
    """What the teacher excludes, and a tail of no token at all."""
    student = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]).log()
    student[1, 1] = -200.0
    student.requires_grad_()
    teacher = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]).log()
    got = event_divergence(student, teacher, kind)
    assert bool(got.isfinite().all())
    gradient = torch.autograd.grad(got.sum(), student)[0]
    assert bool(gradient.isfinite().all())
    assert bool((gradient[:, 2] == 0).all())
    if kind == "forward_kl":
        # A student that is sure of the wrong thing is told so with the whole gradient.
        assert float(gradient[1, 1]) == pytest.approx(-0.5)
        assert float(got[0].detach()) == pytest.approx(math.log(2))


def test_divergences_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown divergence"):
        event_divergence(TEACHER, TEACHER, "kl")  # type: ignore[arg-type]
    for beta in (0.0, 1.0):
        with pytest.raises(ValueError, match="jsd_beta"):
            event_divergence(TEACHER, TEACHER, "jensen_shannon", beta=beta)
        with pytest.raises(ValueError, match="jsd_beta"):
            build_algorithm("gkd", group_size=1, max_new_tokens=4, jsd_beta=beta)
    with pytest.raises(ValueError, match="top_k must be at least 1"):
        build_algorithm("gkd", group_size=1, max_new_tokens=4, top_k=0)
    with pytest.raises(ValueError, match="jsd_beta has no effect with divergence 'reverse_kl'"):
        build_algorithm("gkd", group_size=1, max_new_tokens=4, divergence="reverse_kl", jsd_beta=0.3)


# --- several teachers ----------------------------------------------------------------------------------------------


def test_a_mixture_is_the_mean_of_probabilities() -> None:
    found = mixture(torch.stack([logs([0.5, 0.5]), logs([0.1, 0.9])]), [1.0, 3.0])
    torch.testing.assert_close(found, logs([0.2, 0.8]), **TIGHT)
    with pytest.raises(ValueError, match="as many weights"):
        mixture(torch.zeros(2, 3), [1.0])
    with pytest.raises(ValueError, match="above 0"):
        mixture(torch.zeros(2, 3), [1.0, 0.0])


def test_the_forward_gradient_of_a_mixture_is_the_mean_of_the_teachers_own() -> None:
    teachers, weights = torch.stack([TEACHER, TEACHER.flip(0)]), [0.3, 0.7]

    def gradient(teacher: torch.Tensor) -> torch.Tensor:
        logits = LOGITS.clone().requires_grad_()
        return torch.autograd.grad(event_divergence(logits.log_softmax(0)[None], teacher[None]).sum(), logits)[0]

    mean = sum(weight * gradient(teacher) for weight, teacher in zip(weights, teachers, strict=True))
    torch.testing.assert_close(gradient(mixture(teachers, weights)), mean, **TIGHT)


# --- the objective -------------------------------------------------------------------------------------------------


def test_the_objective_is_a_mean_over_trained_tokens() -> None:
    """(1 - w) temperature^2 x divergence + w x negative log-likelihood, by hand, and its gradient in float64."""
    batch = random_batch([4, 6, 3])
    inside = batch.loss_mask
    draw = torch.Generator().manual_seed(2)
    student, teacher = (torch.randn(13, 5, generator=draw, dtype=torch.float64) for _ in range(2))
    batch.extra["target_logprobs"] = teacher.log_softmax(-1)
    objective = Distillation(divergence="jensen_shannon", jsd_beta=0.3, temperature=2.0, cross_entropy_weight=0.25)
    assert objective.targets_temperature == 2.0

    def loss(events: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
        batch.extra["student_logprobs"] = events.log_softmax(-1)
        found = objective.loss(batch, logprobs, None)
        counts = objective.denominators(batch)
        return sum(objective.reduce(term, batch, counts[""]) for term in found.terms.values())  # type: ignore[return-value]

    logprobs = torch.where(inside, -torch.rand(13, generator=draw, dtype=torch.float64), 0.0)
    p, q = student.softmax(-1).tolist(), teacher.softmax(-1).tolist()
    expected = sum(
        0.75 * 4.0 * by_hand(p[at], q[at], "jensen_shannon", 0.3) - 0.25 * float(logprobs[at])
        for at in range(13)
        if inside[at]
    ) / int(inside.sum())
    assert float(loss(student, logprobs)) == pytest.approx(expected, rel=1e-9)
    leaves = student.requires_grad_(), logprobs.requires_grad_()
    assert torch.autograd.gradcheck(loss, leaves)


def test_what_the_objective_shows() -> None:
    batch = random_batch([4, 6])
    told = torch.tensor([0.6, 0.3, 0.1]).log().expand(10, -1)
    batch.extra |= {"target_logprobs": told, "student_logprobs": told.clone(), "hits": batch.loss_mask.float()}
    batch.extra["agreement"] = batch.loss_mask.float()
    found = Distillation().loss(batch, torch.full((10,), -2.0), None)
    assert list(found.terms) == ["divergence"]
    inside = batch.loss_mask
    shown = {name: float(value[inside].mean()) for name, value in found.metrics.items()}
    assert shown == pytest.approx(
        {
            "distillation/divergence": 0.0,
            "distillation/coverage": 0.9,
            "distillation/agreement": 1.0,
            "nll": 2.0,
            "token_accuracy": 1.0,
        },
        abs=1e-6,
    )
