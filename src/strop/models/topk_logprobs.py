"""Log-probabilities of a few chosen tokens at each position and of all others together, in chunks.

What a teacher says of a position is told in K + 1 events: its K likeliest tokens, and all others, the tail. Neither the
teacher's nor the student's logits of more than one chunk of positions exist at a time: for N positions, hidden size H
and vocabulary V the memory is O(chunk x V + N x (H + K)), forward and backward (promise P8).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from strop.models.logprobs import Entropy, HeadGradients, capped


@dataclass(frozen=True)
class _Plan:
    """How logits become distributions. temperature: of the targets and the entropy. topk_temperature: of the events."""

    temperature: float
    topk_temperature: float
    softcap: float | None
    chunk: int
    entropy: Entropy
    hits: Tensor | None
    agreement: Tensor | None


class _LinearTopk(torch.autograd.Function):
    """What `linear_topk_logprobs` computes; the logits of a chunk are computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ids: Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor, Tensor]:
        count, k = ids.shape
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy, norm, topk_norm, tail_norm = (hidden.new_zeros(count, dtype=wide) for _ in range(5))
        topk = hidden.new_full((count, k + 1), -torch.inf, dtype=wide)
        has_tail = k < weight.shape[0]
        for span in _spans(count, plan.chunk):
            logits = _logits(hidden[span], weight, bias, plan.softcap)
            picked = logits.gather(1, targets[span, None]).squeeze(1)
            _note_the_likeliest(logits, picked, ids[span], span, plan)
            scaled = logits / plan.temperature if plan.temperature != 1 else logits
            norm[span] = torch.logsumexp(scaled, -1)
            logprobs[span] = picked / plan.temperature - norm[span]
            if plan.entropy != "none":
                log_p = scaled - norm[span, None]
                entropy[span] = -(torch.exp(log_p).mul_(log_p)).sum(-1)
                del log_p
            del scaled
            logits.div_(plan.topk_temperature)
            same = plan.temperature == plan.topk_temperature
            topk_norm[span] = norm[span] if same else torch.logsumexp(logits, -1)
            topk[span, :k] = logits.gather(1, ids[span]) - topk_norm[span, None]
            if has_tail:
                tail_norm[span] = torch.logsumexp(logits.scatter_(1, ids[span], -torch.inf), -1)
                topk[span, k] = tail_norm[span] - topk_norm[span]
            del logits
        ctx.save_for_backward(hidden, weight, bias, targets, ids, norm, topk_norm, tail_norm, entropy)
        ctx.plan, ctx.has_tail = plan, has_tail
        ctx.set_materialize_grads(False)
        if plan.entropy != "graph":
            ctx.mark_non_differentiable(entropy)
        return logprobs, topk, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, ids, norm, topk_norm, tail_norm, entropy = ctx.saved_tensors
        of_logprobs, of_topk, of_entropy = grads
        plan: _Plan = ctx.plan
        found = HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        for span in _spans(hidden.shape[0], plan.chunk):
            logits = _logits(hidden[span], weight, bias, plan.softcap)
            bend = 1 - (logits / plan.softcap) ** 2 if plan.softcap is not None else None
            total: Tensor | None = None
            if of_logprobs is not None or of_entropy is not None:
                g = norm.new_zeros(len(logits)) if of_logprobs is None else of_logprobs[span]
                h = None if of_entropy is None else of_entropy[span]
                log_p = (logits / plan.temperature).sub_(norm[span, None])
                total = _gradient_of_targets(log_p, targets[span], g, h, entropy[span]).div_(plan.temperature)
                del log_p
            if of_topk is not None:
                norms = topk_norm[span], tail_norm[span] if ctx.has_tail else None
                grad = _gradient_of_topk(logits.div_(plan.topk_temperature), ids[span], norms, of_topk[span])
                grad.div_(plan.topk_temperature)
                total = grad if total is None else total.add_(grad)
                del grad
            del logits
            if total is None:
                continue
            found.add(span, total if bend is None else total.mul_(bend))
            del total, bend
        return (*found.given(), None, None, None)


def _note_the_likeliest(logits: Tensor, picked: Tensor, ids: Tensor, span: slice, plan: _Plan) -> None:
    """Write down where the target, and the first of the events, is the likeliest token."""
    if plan.hits is None and plan.agreement is None:
        return
    best = logits.amax(-1)
    if plan.hits is not None:
        plan.hits[span] = (picked >= best).to(plan.hits.dtype)
    if plan.agreement is not None:
        plan.agreement[span] = (logits.gather(1, ids[:, :1]).squeeze(1) >= best).to(plan.agreement.dtype)


def _gradient_of_targets(log_p: Tensor, targets: Tensor, g: Tensor, h: Tensor | None, entropy: Tensor) -> Tensor:
    """[n, V] of the scaled logits, for the gradients g of the targets' log-probabilities and h of the entropies."""
    if h is None:
        grad = torch.exp(log_p).mul_(-g[:, None])
    else:
        # d entropy / d logit_j = -p_j (log p_j + entropy)
        grad = torch.exp(log_p).mul_(-g[:, None] - h[:, None] * (log_p + entropy[:, None]))
    return grad.scatter_add_(1, targets[:, None], g[:, None])


def _gradient_of_topk(scaled: Tensor, ids: Tensor, norms: tuple[Tensor, Tensor | None], g: Tensor) -> Tensor:
    """[n, V] of the scaled logits, which are used up, for the gradients g [n, K + 1] of the events.

    With p the softmax, d log p_i / d z_j = [i = j] - p_j, and of the tail [j in the tail] p_j / p_tail - p_j.
    """
    norm, tail_norm = norms
    k = ids.shape[1]
    if tail_norm is None:
        g = g[:, :k]
    grad = (scaled - norm[:, None]).exp_().mul_(-g.sum(-1, keepdim=True))
    grad.scatter_add_(1, ids, g[:, :k])
    if tail_norm is not None:
        within = scaled.scatter_(1, ids, -torch.inf).sub_(tail_norm[:, None]).exp_()
        grad.add_(within.mul_(g[:, k:]))
    return grad


def linear_topk_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    topk_temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int = 512,
    entropy: Entropy = "none",
    hits: Tensor | None = None,
    agreement: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each target, of K other tokens and their tail, and the entropy of each distribution.

    Args:
        hidden: [N, H] hidden states, of which row i predicts target i.
        weight: [V, H] output head. bias: [V].
        targets: [N] int64.
        ids: [N, K] int64, distinct in each row.
        temperature: of the targets and the entropy. topk_temperature: of the K + 1 events. Both above 0.
        softcap: bound of the logits, before the temperature.
        chunk: rows whose logits exist at a time.
        entropy: also give the entropy of each distribution, in nats, without or with a graph; zeros otherwise.
        hits, agreement: [N], filled with 1 where the target, or the first of `ids`, is the most likely token, else 0.

    Returns:
        (logprobs [N], topk [N, K + 1], entropy [N]), float32 (float64 for float64 input). The last of topk is the
        log-probability of all tokens that are not in `ids`; where these are the whole vocabulary it is -inf.
    """
    if temperature <= 0 or topk_temperature <= 0:
        raise ValueError(f"temperatures must be above 0, got {temperature} and {topk_temperature}")
    plan = _Plan(temperature, topk_temperature, softcap, chunk, entropy, hits, agreement)
    found: tuple[Tensor, Tensor, Tensor] = _LinearTopk.apply(hidden, weight, bias, targets, ids, plan)
    return found


@dataclass(frozen=True)
class TeacherRows:
    """What one teacher has to say of N positions. hidden [N, H]; weight [V, H], bias [V] and softcap: its output head.
    share: its weight in the mixture, of a sum of 1."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    share: float


def mixture_topk(
    teachers: Sequence[TeacherRows], k: int, *, targets: Tensor, vocabulary: int, temperature: float, chunk: int = 512
) -> tuple[Tensor, Tensor, Tensor]:
    """The K likeliest tokens of a mixture of teachers, exactly: whole distributions are mixed, a chunk at a time.

    Args:
        k: how many, at most the vocabulary.
        targets: [N] int64, tokens whose log-probabilities are wanted too.
        vocabulary: tokens that the tokenizer knows; what an output head has beyond them is padding and left out.
        temperature: of each teacher's distribution, before they are mixed.

    Returns:
        (ids [N, K] int64, likeliest first; topk [N, K + 1] float32, the last of all other tokens; logprobs [N] float32
        of the targets). No gradient.
    """
    count, k = len(targets), min(k, vocabulary)
    ids = targets.new_zeros((count, k))
    topk = teachers[0].hidden.new_full((count, k + 1), -torch.inf, dtype=torch.float32)
    logprobs = topk.new_zeros(count)
    with torch.no_grad():
        for span in _spans(count, chunk):
            mixed = _mixed(teachers, span, vocabulary, temperature)
            logprobs[span] = mixed.gather(1, targets[span, None]).squeeze(1)
            values, index = mixed.topk(k, -1)
            ids[span], topk[span, :k] = index, values
            if k < vocabulary:
                topk[span, k] = torch.logsumexp(mixed.scatter_(1, index, -torch.inf), -1)
            del mixed
    return ids, topk, logprobs


def _mixed(teachers: Sequence[TeacherRows], span: slice, vocabulary: int, temperature: float) -> Tensor:
    """[n, vocabulary] log of the weighted mean of the teachers' probabilities."""
    mixed: Tensor | None = None
    for teacher in teachers:
        bias = None if teacher.bias is None else teacher.bias[:vocabulary]
        logits = _logits(teacher.hidden[span], teacher.weight[:vocabulary], bias, teacher.softcap).div_(temperature)
        logits.sub_(torch.logsumexp(logits, -1, keepdim=True)).add_(math.log(teacher.share))
        mixed = logits if mixed is None else torch.logaddexp(mixed, logits)
        del logits
    assert mixed is not None, "there is no teacher"
    return mixed


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    """[n, V] float32, float64 for float64 input."""
    logits = nn.functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return capped(logits, softcap)


def _spans(count: int, chunk: int) -> Iterator[slice]:
    """Equal parts of at most `chunk` rows: a last one of a few rows would pay for a whole pass over the head."""
    pieces = max(1, -(-count // chunk))
    size = max(1, -(-count // pieces))
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
