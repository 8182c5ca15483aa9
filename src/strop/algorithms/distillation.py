"""On-policy distillation: the student samples, the teacher scores the student's tokens.

Source: MiniLLM (arXiv 2306.08543), GKD (arXiv 2306.13649), https://thinkingmachines.ai/blog/on-policy-distillation.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from strop.algorithms.masking import fence, hide, widen


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


def _rest(probabilities: Tensor) -> Tensor:
    """[...] the probability that K tokens leave to all others, at least the rounding of 1."""
    return (1 - probabilities.sum(-1)).clamp(min=torch.finfo(probabilities.dtype).eps)
