"""Log-probabilities from hidden states, in chunks that are recomputed in the backward pass.

For N tokens, hidden size H and vocabulary V the memory is O(chunk x V + N x H) instead of O(N x V): the logits of one
chunk exist at a time, forward and backward (promise P8, docs/performance.md has the formula).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Entropy = Literal["none", "value", "graph"]


@dataclass(frozen=True)
class _Head:
    """How logits become distributions, and how many rows of them exist at a time."""

    temperature: float
    softcap: float | None
    chunk: int
    entropy: Entropy
    hits: Tensor | None = None
    even: bool = False

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
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        early = want_hidden and head.entropy != "graph" and head.softcap is None
        frozen = early and not (want_weight or want_bias)
        summed = _Summed(weight, bias if want_bias else None) if early and head.even and want_weight else None
        unit = torch.empty_like(hidden) if frozen or summed is not None else None
        for span in head.spans(count):
            logits = _logits(hidden[span], weight, bias, head.softcap).div_(head.temperature)
            lse = torch.logsumexp(logits, -1)
            normalizer[span] = lse
            picked = logits.gather(1, targets[span, None]).squeeze(1)
            logprobs[span] = picked - lse
            if head.hits is not None:
                head.hits[span] = (picked >= logits.amax(-1)).to(head.hits.dtype)
            if head.entropy != "none" or unit is not None:
                # Shifted first: products of unshifted logits would lose digits of a small entropy.
                log_p = logits.sub_(lse[:, None])
                probabilities = torch.exp(log_p)
                if head.entropy != "none":
                    entropy[span] = -log_p.mul_(probabilities).sum(-1)
                del log_p, logits
                if unit is not None:
                    grad = probabilities.neg_()
                    grad.scatter_add_(1, targets[span, None], torch.ones_like(lse[:, None]))
                    grad = grad.div_(head.temperature).to(hidden.dtype)
                    torch.mm(grad, weight, out=unit[span])
                    if summed is not None:
                        summed.add(grad, hidden[span])
                    del grad
                del probabilities
            # A chunk that is still held when the next one is made would double the peak.
            logits = None  # type: ignore[assignment]
        if frozen:
            ctx.save_for_backward(unit)
        else:
            ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy, unit)
        ctx.head, ctx.frozen, ctx.summed = head, frozen, summed
        if head.entropy != "graph":
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.frozen:
            (unit,) = ctx.saved_tensors
            return (unit * grad_logprobs[:, None].to(unit.dtype), None, None, None, None)
        hidden, weight, bias, targets, normalizer, entropy, unit = ctx.saved_tensors
        if ctx.summed is not None and bool((grad_logprobs == grad_logprobs[:1]).all()):
            scaled, ctx.summed = ctx.summed.times(grad_logprobs[:1].sum()), None
            return (unit * grad_logprobs[:, None].to(unit.dtype), *scaled, None, None)
        head: _Head = ctx.head
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if want_hidden else None
        sums = _Summed(weight, bias if want_bias else None) if want_weight or want_bias else None
        for span in head.spans(hidden.shape[0]):
            x = hidden[span]
            logits = _logits(x, weight, bias, head.softcap)
            bend = 1 - (logits / head.softcap) ** 2 if head.softcap is not None else None
            g = grad_logprobs[span, None]
            log_p = logits.div_(head.temperature).sub_(normalizer[span, None])
            if head.entropy == "graph":
                # d entropy / d logit_j = -p_j (log p_j + entropy)
                grad = torch.exp(log_p).mul_(-g - grad_entropy[span, None] * (log_p + entropy[span, None]))
            else:
                grad = log_p.exp_().mul_(-g)
            grad.scatter_add_(1, targets[span, None], g)
            grad.div_(head.temperature)
            if bend is not None:
                grad.mul_(bend)
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[span])
            if sums is not None:
                sums.add(grad, x)
            del logits, log_p, bend, grad
        grad_weight, grad_bias = (None, None) if sums is None else sums.times(None)
        return grad_hidden, grad_weight if want_weight else None, grad_bias, None, None


class _Summed:
    """Gradients of the head's weight and bias, added up over chunks; float32 even under bfloat16 compute."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = torch.zeros_like(weight, dtype=torch.float32)
        self.bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        self.dtypes = weight.dtype, None if bias is None else bias.dtype

    def add(self, grad: Tensor, hidden: Tensor) -> None:
        """grad: [n, V] of the logits. hidden: [n, H]."""
        if self.weight.dtype == grad.dtype:
            self.weight.addmm_(grad.t(), hidden)
        else:
            self.weight += grad.t() @ hidden
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=torch.float32)

    def times(self, factor: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(of the weight, of the bias), multiplied in place."""
        found = [x if factor is None or x is None else x.mul_(factor) for x in (self.weight, self.bias)]
        of_weight, of_bias = (None if x is None else x.to(d) for x, d in zip(found, self.dtypes, strict=True))
        assert of_weight is not None
        return of_weight, of_bias


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    logits = nn.functional.linear(hidden, weight, bias).float()
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits


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
        even: all rows are expected to count alike in the loss, as in a mean: logits are then not computed twice. Where
            they do not, the gradient is right all the same.

    Returns:
        (logprobs [N] float32, differentiable; entropy [N] float32, differentiable if it is asked for as "graph").
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    # Equal chunks: a last chunk of a few rows would pay for a whole pass over the head.
    pieces = max(1, -(-hidden.shape[0] // chunk))
    size = max(1, -(-hidden.shape[0] // pieces))
    return _LinearLogprobs.apply(hidden, weight, bias, targets, _Head(temperature, softcap, size, entropy, hits, even))


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
