"""Distillation: how far a student is from a teacher, at sampled tokens or over whole distributions.

A distribution over a vocabulary is told in events: K tokens, and all others together as one more, the tail. A
divergence between two such tellings is a true one (never negative, 0 only where they agree) and never more than that of
the whole distributions, which is what it becomes as K grows to the vocabulary.

Source: MiniLLM (arXiv 2306.08543), GKD (arXiv 2306.13649), https://thinkingmachines.ai/blog/on-policy-distillation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from strop.algorithms.masking import EXP_LIMIT, fence, hide, widen

Divergence = Literal["forward_kl", "reverse_kl", "jensen_shannon"]


def reverse_kl_advantages(
    logprobs: Tensor, teacher_logprobs: Tensor, *, mask: Tensor | None = None, clamp: float | None = None
) -> Tensor:
    """Advantage of each sampled token: teacher's log-probability less the student's.

    Its policy gradient is that of KL(student || teacher) at each token, later tokens left out (a discount of 0).

    Args:
        logprobs: [T] or [B, T], the student's, before this step's updates.
        teacher_logprobs: same shape.
        mask: bool, same shape.
        clamp: opt-in bound to [-clamp, clamp].

    Returns:
        float32 (float64 for float64 input), same shape, without a graph.
    """
    if clamp is not None and not clamp > 0:
        raise ValueError("a clamp must be positive")
    inside, (student, teacher) = fence(mask, logprobs.detach(), teacher_logprobs.detach())
    difference = teacher - student
    return hide(difference if clamp is None else difference.clamp(-clamp, clamp), inside, mask)


def topk_kl(
    logprobs: Tensor,
    teacher_logprobs: Tensor,
    *,
    direction: Literal["reverse", "forward"] = "reverse",
    tail: bool = True,
    mask: Tensor | None = None,
) -> Tensor:
    """Divergence between student and teacher over the teacher's K likeliest tokens, as a loss of each position.

    `reverse` sums p (log p - log q) with p student and q teacher; `forward` q (log q - log p). With `tail`, all other
    tokens together are one more event, so that the result is a divergence: never negative, and 0 only where the K
    agree. Without it, only the K terms are summed, and with `reverse` a student can lower the loss by leaving the K.

    Args:
        logprobs: [..., K], the student's log-probabilities of the teacher's tokens, with a graph.
        teacher_logprobs: [..., K].
        mask: bool [...].

    Returns:
        float32 (float64 for float64 input) [...], 0 and without gradient where the mask is False.
    """
    if direction not in ("reverse", "forward"):
        raise ValueError(f"unknown direction {direction!r}")
    inside = torch.isfinite(widen(logprobs) + widen(teacher_logprobs)).all(-1) if mask is None else mask.bool()
    student = torch.where(inside[..., None], widen(logprobs), -30.0)
    teacher = torch.where(inside[..., None], widen(teacher_logprobs.detach()), -30.0)
    reverse = direction == "reverse"
    # Exponentials are most of the work: each is taken once.
    p = student.exp() if reverse or tail else student
    q = teacher.exp() if not reverse or tail else teacher
    sign = 1.0 if reverse else -1.0
    result = sign * ((p if reverse else q) * (student - teacher)).sum(-1)
    if tail:
        # All other tokens together: what the K leave of the probability.
        rest, teacher_rest = _rest(p), _rest(q)
        result = result + sign * (rest if reverse else teacher_rest) * (rest.log() - teacher_rest.log())
    return hide(result, inside, mask)


def event_divergence(
    logprobs: Tensor,
    teacher_logprobs: Tensor,
    kind: Divergence = "forward_kl",
    *,
    beta: float = 0.5,
    mask: Tensor | None = None,
) -> Tensor:
    """Divergence between two distributions over the same events, as a loss of each position. With p student, q teacher:

    - `forward_kl`: KL(q || p) = sum of q (log q - log p).
    - `reverse_kl`: KL(p || q).
    - `jensen_shannon`: beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta) p. Divided by beta it
      becomes the forward divergence as beta goes to 0, divided by 1 - beta the reverse one as beta goes to 1.

    Args:
        logprobs: [..., E], the student's, with a graph; E events that are all there is: K tokens and the tail.
        teacher_logprobs: [..., E]; never differentiated. Below -60 they count as -60, so that a student that gives
            probability to what is impossible for the teacher has a finite loss.
        mask: bool [...].

    Returns:
        float32 (float64 for float64 input) [...], 0 and without gradient where the mask is False.

    Raises:
        ValueError: an unknown kind, or a beta outside of (0, 1).

    Source: GKD (arXiv 2306.13649) eq. 1 to 3 and section 2.
    """
    if kind not in ("forward_kl", "reverse_kl", "jensen_shannon"):
        raise ValueError(f"unknown divergence {kind!r}")
    if not 0 < beta < 1:
        raise ValueError(f"jsd_beta must lie between 0 and 1, it is {beta}")
    inside = torch.isfinite(widen(teacher_logprobs)).any(-1) if mask is None else mask.bool()
    student = torch.where(inside[..., None], widen(logprobs), 0.0)
    teacher = torch.where(inside[..., None], widen(teacher_logprobs.detach()), 0.0).clamp(min=-EXP_LIMIT)
    # An event that is impossible for both is one of no token: the tail, where the K are the whole vocabulary.
    student = torch.where(student == -torch.inf, -EXP_LIMIT, student)
    if kind == "forward_kl":
        result = (teacher.exp() * (teacher - student)).sum(-1)
    elif kind == "reverse_kl":
        result = (student.exp() * (student - teacher)).sum(-1)
    else:
        middle = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
        result = beta * (teacher.exp() * (teacher - middle)).sum(-1)
        result = result + (1 - beta) * (student.exp() * (student - middle)).sum(-1)
    return hide(result, inside, mask)


def mixture(logprobs: Tensor, weights: Sequence[float]) -> Tensor:
    """Log-probabilities under several teachers at once: log of the sum of w_t q_t, weights divided by their sum.

    The arithmetic mean of probabilities, not of logits: what one teacher finds likely stays likely. The gradient of its
    forward divergence is the mean of the gradients of the teachers' own, by the same weights.

    Args:
        logprobs: [M, ...] of the same tokens under M teachers. weights: M numbers above 0.

    Returns:
        float32 (float64 for float64 input) [...].

    Source: the linear opinion pool, M. Stone, The Opinion Pool, Annals of Mathematical Statistics 32 (1961).
    """
    if len(weights) != logprobs.shape[0] or not all(weight > 0 for weight in weights):
        raise ValueError(f"{logprobs.shape[0]} teachers need as many weights above 0, got {list(weights)}")
    wide = widen(logprobs)
    shares = torch.tensor([weight / sum(weights) for weight in weights], dtype=wide.dtype, device=wide.device)
    return torch.logsumexp(wide + shares.log().view(-1, *[1] * (wide.ndim - 1)), 0)


def _rest(probabilities: Tensor) -> Tensor:
    """[...] the probability that K tokens leave to all others, at least the rounding of 1."""
    return (1 - probabilities.sum(-1)).clamp(min=torch.finfo(probabilities.dtype).eps)
