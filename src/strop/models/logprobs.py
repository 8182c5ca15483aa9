"""Log-probabilities from hidden states, in chunks that are recomputed in the backward pass.

For N tokens, hidden size H and vocabulary V the memory is O(chunk x V + N x H) instead of O(N x V): the logits of one
chunk exist at a time, forward and backward (promise P8, docs/performance.md has the formula).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from strop.models import exact_sums, few_rows
from strop.models.consistent import linear_forward

Entropy = Literal["none", "value", "graph"]


class Vocabulary(Protocol):
    """The rows of an output head that one rank of several holds, from row `start` on; what they make of their logits is
    combined in place."""

    @property
    def start(self) -> int: ...
    def maximum(self, values: Tensor) -> Tensor: ...
    def total(self, values: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class _Head:
    """How logits become distributions, and how many rows of them exist at a time."""

    temperature: float
    softcap: float | None
    chunk: int
    entropy: Entropy
    hits: Tensor | None = None
    even: bool = False
    vocabulary: Vocabulary | None = None
    consistent: bool = False

    def of(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(log-sum-exp, logits of the targets, largest logits) [n] over the whole vocabulary, of logits [n, V]."""
        if self.vocabulary is None:
            picked = logits.gather(1, targets[:, None]).squeeze(1)
            largest = logits.amax(-1) if self.hits is not None else picked
            lse = exact_sums.log_sum_exp(logits) if self.consistent else torch.logsumexp(logits, -1)
            return lse, picked, largest
        largest = self.vocabulary.maximum(logits.amax(-1))
        local, inside = self.local(targets, logits.shape[1])
        picked = torch.where(inside, logits.gather(1, local[:, None]).squeeze(1), 0)
        parts = torch.stack([torch.exp(logits - largest[:, None]).sum(-1), picked])
        exponentials, picked = self.vocabulary.total(parts)
        return largest + torch.log(exponentials), picked, largest

    def local(self, targets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """(row of the head, whether it is one of this rank's) of each target."""
        assert self.vocabulary is not None
        local = targets - self.vocabulary.start
        inside = (local >= 0) & (local < rows)
        return local.masked_fill(~inside, 0), inside

    def add_at_targets(self, grad: Tensor, targets: Tensor, values: Tensor) -> None:
        """Add values [n, 1] to the targets' columns of a gradient of logits [n, V], where they are this rank's."""
        if self.vocabulary is not None:
            targets, inside = self.local(targets, grad.shape[1])
            values = torch.where(inside[:, None], values, 0)
        grad.scatter_add_(1, targets[:, None], values)

    def divisor(self, logits: Tensor) -> Tensor | float:
        """What logits are divided by: in the consistent mode the engine's number, which it has in float32."""
        return logits.new_tensor(self.temperature) if self.consistent else self.temperature

    def spans(self, count: int) -> Iterator[slice]:
        for start in range(0, count, self.chunk):
            yield slice(start, min(start + self.chunk, count))


class _LinearLogprobs(torch.autograd.Function):
    """logprobs[i] = log_softmax(hidden[i] @ weight.T / temperature)[targets[i]], and the entropy of each distribution.

    The gradient of a chunk's logits is written over its probabilities, so one chunk of logits is all that ever exists.
    With a frozen head the unit gradient of each row is taken in the forward pass, while its probabilities are there:
    the backward pass then only scales it. So is, where all rows are said to count alike, the gradient of the head.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: _Head,
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        logprobs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        entropy = torch.zeros(count, dtype=torch.float32, device=hidden.device)
        normalizer = torch.empty(count, dtype=torch.float32, device=hidden.device)
        possible = head.entropy != "graph" and head.softcap is None
        taken = Taken.of(hidden, weight, bias, ctx.needs_input_grad[:3], even=head.even) if possible else None
        for span in head.spans(count):
            logits = _logits(hidden[span], weight, bias, head.softcap, head.consistent)
            logits.div_(head.divisor(logits))
            lse, picked, largest = head.of(logits, targets[span])
            normalizer[span] = lse
            logprobs[span] = picked - lse
            if head.hits is not None:
                head.hits[span] = (picked >= largest).to(head.hits.dtype)
            if head.entropy != "none" or taken is not None:
                # Shifted first: products of unshifted logits would lose digits of a small entropy.
                log_p = logits.sub_(lse[:, None])
                probabilities = log_p.exp_() if head.entropy == "none" else torch.exp(log_p)
                if head.entropy != "none":
                    spread = -log_p.mul_(probabilities).sum(-1)
                    entropy[span] = spread if head.vocabulary is None else head.vocabulary.total(spread)
                del log_p, logits
                if taken is not None:
                    grad = probabilities.neg_()
                    head.add_at_targets(grad, targets[span], torch.ones_like(lse[:, None]))
                    taken.add(span, grad.div_(head.temperature))
                    del grad
                del probabilities
            # A chunk that is still held when the next one is made would double the peak.
            logits = None  # type: ignore[assignment]
        if taken is None or taken.may_be_of_no_use:
            ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.head, ctx.taken = head, taken
        if head.entropy != "graph":
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.taken is not None and (known := ctx.taken.times(grad_logprobs)) is not None:
            return (*known, None, None)
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        head: _Head = ctx.head
        found = HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        for span in head.spans(hidden.shape[0]):
            logits = _logits(hidden[span], weight, bias, head.softcap)
            bend = 1 - (logits / head.softcap) ** 2 if head.softcap is not None else None
            g = grad_logprobs[span, None]
            log_p = logits.div_(head.temperature).sub_(normalizer[span, None])
            if head.entropy == "graph":
                # d entropy / d logit_j = -p_j (log p_j + entropy)
                grad = torch.exp(log_p).mul_(-g - grad_entropy[span, None] * (log_p + entropy[span, None]))
            else:
                grad = log_p.exp_().mul_(-g)
            head.add_at_targets(grad, targets[span], g)
            grad.div_(head.temperature)
            if bend is not None:
                grad.mul_(bend)
            found.add(span, grad)
            del logits, log_p, bend, grad
        return (*found.given(), None, None)


class HeadGradients:
    """Gradients of hidden states [N, H], of an output head [V, H] and its bias [V], added up chunk by chunk.

    Args:
        wanted: which of the three are.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool]) -> None:
        self._hidden, self._weight, self._bias = hidden, weight, bias
        want_hidden, want_weight, want_bias = wanted
        self._of_hidden = torch.zeros_like(hidden) if want_hidden else None
        # At least float32 even under bfloat16 compute: many chunks add up here.
        wide = torch.promote_types(weight.dtype, torch.float32)
        self._of_weight = torch.zeros_like(weight, dtype=wide) if want_weight else None
        self._of_bias = torch.zeros_like(bias, dtype=wide) if want_bias and bias is not None else None

    def add(self, span: slice, grad: Tensor) -> None:
        """Take in the gradient of the logits of some rows, [n, V]."""
        grad = grad.to(self._hidden.dtype)
        if self._of_hidden is not None:
            torch.mm(grad, self._weight, out=self._of_hidden[span])
        if self._of_weight is not None:
            if self._of_weight.dtype == grad.dtype:
                self._of_weight.addmm_(grad.t(), self._hidden[span])
            elif grad.is_cuda:
                # The sum in float32 inside the product, which saves a pass over all of it.
                torch.addmm(self._of_weight, grad.t(), self._hidden[span], out_dtype=torch.float32, out=self._of_weight)
            else:
                self._of_weight += grad.t() @ self._hidden[span]
        if self._of_bias is not None:
            self._of_bias += grad.sum(0, dtype=self._of_bias.dtype)

    def times(self, factor: Tensor) -> HeadGradients:
        """The same, multiplied in place by a number."""
        for found in (self._of_hidden, self._of_weight, self._of_bias):
            if found is not None:
                found.mul_(factor)
        return self

    def given(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The three, each in the number format of what it belongs to; None where it is not wanted."""
        return (
            self._of_hidden,
            None if self._of_weight is None else self._of_weight.to(self._weight.dtype),
            None if self._of_bias is None or self._bias is None else self._of_bias.to(self._bias.dtype),
        )


class Taken:
    """Gradients that were taken in the forward pass, while the probabilities were there: each row's own, where the
    head is frozen, or sums over all rows, which are of use if all of them turn out to count alike."""

    def __init__(self, unit: Tensor | None, summed: HeadGradients | None, weight: Tensor) -> None:
        self._unit, self._summed, self._weight = unit, summed, weight

    @classmethod
    def of(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool], *, even: bool
    ) -> Taken | None:
        """None where nothing can be taken. wanted: which of the gradients of the three are. even: the rows are expected
        to count alike."""
        if wanted[0] and not any(wanted[1:]):
            return cls(torch.empty_like(hidden), None, weight)
        return cls(None, HeadGradients(hidden, weight, bias, wanted), weight) if wanted[0] and even else None

    @property
    def may_be_of_no_use(self) -> bool:
        """Whether the gradients may have to be computed in another way after all."""
        return self._unit is None

    def add(self, span: slice, grad: Tensor) -> None:
        """Take in the gradient of the logits of some rows, [n, V], each row counting 1."""
        if self._unit is not None:
            torch.mm(grad.to(self._unit.dtype), self._weight, out=self._unit[span])
        elif self._summed is not None:
            self._summed.add(span, grad)

    def times(self, factors: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
        """The three gradients for rows that count [N]; None where they cannot be told from what was taken."""
        if self._unit is not None:
            return self._unit * factors[:, None].to(self._unit.dtype), None, None
        # They are scaled in place, so they are of use once.
        summed, self._summed = self._summed, None
        if summed is None:
            return None
        alike, factor = (factors == factors[:1]).all(), factors[:1].sum()
        if factors.is_cuda:
            # To look would make the host wait in every pass, and the GPU after it. A gradient that is not finite is
            # refused by the optimizer.
            return summed.times(torch.where(alike, factor, torch.nan)).given()
        return summed.times(factor).given() if bool(alike) else None


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, consistent: bool = False
) -> Tensor:
    multiply = linear_forward if consistent else few_rows.linear
    return capped(multiply(hidden, weight, bias).float(), softcap)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """The logits within their bound, where a model has one (Gemma 2)."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int = 512,
    entropy: Entropy = "none",
    hits: Tensor | None = None,
    even: bool = False,
    vocabulary: Vocabulary | None = None,
    consistent: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and the entropy of each distribution.

    Args:
        hidden: [N, H] hidden states, of which row i predicts target i.
        weight: [V, H] output head. bias: [V].
        targets: [N] int64.
        temperature: logits are divided by it; above 0.
        softcap: bound of the logits, softcap * tanh(logits / softcap), before the temperature (Gemma 2).
        chunk: rows whose logits exist at a time.
        entropy: also give the entropy of each distribution, in nats, without or with a graph; zeros otherwise.
        hits: [N], filled with 1 where the target is the most likely token and 0 elsewhere.
        even: all rows count alike in the loss, as in a mean: logits are then not computed twice. Where they do not, the
            gradient is right all the same on a CPU, and NaN on a GPU.
        vocabulary: `weight` and `bias` are this rank's part of them. The gradient of `hidden` is then a part of a sum.
        consistent: the log-probability of a row does not depend on the others (`consistent_mode.py`); not with a
            soft-cap, nor with a part of the head.

    Returns:
        (logprobs [N] float32, differentiable; entropy [N] float32, differentiable if it is asked for as "graph").
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    if consistent and (softcap is not None or vocabulary is not None):
        raise ValueError("log-probabilities are not consistent with soft-capped logits, nor from a part of the head")
    # Equal chunks: a last chunk of a few rows would pay for a whole pass over the head.
    pieces = max(1, -(-hidden.shape[0] // chunk))
    size = max(1, -(-hidden.shape[0] // pieces))
    if hidden.is_cuda and softcap is None and vocabulary is None and _has_triton():
        from strop.models.logprobs_fused import FusedLogprobs

        return FusedLogprobs.apply(hidden, weight, bias, targets, temperature, size, entropy, hits, even, consistent)
    return _LinearLogprobs.apply(
        hidden, weight, bias, targets, _Head(temperature, softcap, size, entropy, hits, even, vocabulary, consistent)
    )


@cache
def _has_triton() -> bool:
    from torch.utils._triton import has_triton

    return bool(has_triton())


def output_head(model: nn.Module) -> tuple[Tensor, Tensor | None, float | None]:
    """(weight [V, H], bias [V] or None, logit soft-cap or None) of a causal model's output head, adapters included."""
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    base: Any = getattr(head, "base_layer", head)
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    weight: Tensor = base.weight
    if base is not head and not head.disable_adapters and not head.merged:
        # One sum of V x H, so that an adapter on the head is trained and sampled like any other.
        for adapter in head.active_adapters:
            if adapter in head.lora_A:
                weight = weight + head.get_delta_weight(adapter).to(weight.dtype)
    return weight, getattr(base, "bias", None), getattr(text, "final_logit_softcapping", None)
