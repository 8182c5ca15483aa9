"""Log-probabilities from hidden states on a GPU: the same numbers as `logprobs.py`, with logits read once.

Logits of a chunk stay in the number format that the output head gives them in, and are the only thing of that size:
one kernel reads them (log-sum-exp, the target's logit, entropy), another overwrites them with their gradient. In
float32 arithmetic, like the plain way, which needs some fifteen passes over float32 copies.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from strop.models.consistent import linear_forward
from strop.models.logprobs import Entropy, HeadGradients, Taken

_BLOCK = 4096


@triton.jit(do_not_specialize=["t_stride"])
def _read(
    logits, targets, inverse_temperatures, lse_out, picked_out, entropy_out, largest_out,
    columns, stride, t_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: running maximum m, s = sum exp(x - m) and t = sum exp(x - m) (x - m), rescaled when m grows."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    inverse_temperature = tl.load(inverse_temperatures + row * t_stride)
    m = -1e30
    s = 0.0
    t = 0.0
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        x = tl.load(logits + at, mask=inside, other=-float("inf")).to(tl.float32) * inverse_temperature
        grown = tl.maximum(m, tl.max(x, 0))
        shrink = tl.exp(m - grown)
        p = tl.exp(x - grown)
        t = shrink * (t + s * (m - grown)) + tl.sum(tl.where(inside, p * (x - grown), 0.0), 0)
        s = shrink * s + tl.sum(p, 0)
        m = grown
    log_s = tl.log(s)
    target = tl.load(targets + row)
    picked = tl.load(logits + target).to(tl.float32) * inverse_temperature
    tl.store(lse_out + row, m + log_s)
    tl.store(picked_out + row, picked)
    tl.store(entropy_out + row, log_s - t / s)
    tl.store(largest_out + row, m)


@triton.jit
def _gradient(
    logits, targets, lse_in, entropy_in, of_logprob, of_entropy,
    columns, stride, inverse_temperature, BLOCK: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Overwrite one block of a row with g (1 at the target - p), and with -h p (log p + entropy) added to it."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
    log_p = x - tl.load(lse_in + row)
    p = tl.exp(log_p)
    g = tl.load(of_logprob + row)
    grad = tl.where(at == tl.load(targets + row), g, 0.0) - g * p
    if ENTROPY:
        grad -= tl.load(of_entropy + row) * p * (log_p + tl.load(entropy_in + row))
    tl.store(logits + at, (grad * inverse_temperature).to(logits.dtype.element_ty), mask=inside)


def read(logits: Tensor, targets: Tensor, inverse_temperatures: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log-sum-exp, logits of the targets, entropy, largest logits) [n] float32, of logits [n, V] times inverse
    temperatures, float32, [n] or one for all, [1]."""
    found = torch.empty((4, logits.shape[0]), dtype=torch.float32, device=logits.device)
    _read[(logits.shape[0],)](
        logits, targets, inverse_temperatures, *found.unbind(), logits.shape[1], logits.stride(0),
        min(1, len(inverse_temperatures) - 1), BLOCK=_BLOCK,
    )  # fmt: skip
    lse, picked, entropy, largest = found.unbind()
    return lse, picked, entropy, largest


def write_gradient(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    of_logprob: Tensor,
    temperature: float,
    entropy: Tensor | None = None,
    of_entropy: Tensor | None = None,
) -> None:
    """Overwrite logits [n, V] with the gradient of sum(of_logprob * logprob + of_entropy * entropy) by them."""
    rows, columns = logits.shape
    _gradient[(rows, triton.cdiv(columns, _BLOCK))](
        logits,
        targets,
        lse,
        lse if entropy is None else entropy,
        of_logprob,
        of_logprob if of_entropy is None else of_entropy,
        columns,
        logits.stride(0),
        1 / temperature,
        BLOCK=_BLOCK,
        ENTROPY=of_entropy is not None,
    )


class FusedLogprobs(torch.autograd.Function):
    """See `_LinearLogprobs`, whose arguments these are but for soft-caps and divided heads."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        entropy: Entropy,
        hits: Tensor | None,
        even: bool,
        consistent: bool = False,
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        logprobs, spread, normalizer = torch.empty((3, count), dtype=torch.float32, device=hidden.device).unbind()
        possible = entropy != "graph"
        taken = Taken.of(hidden, weight, bias, ctx.needs_input_grad[:3], even=even) if possible else None
        multiply = linear_forward if consistent else nn.functional.linear
        inverse = torch.full((1,), temperature, dtype=torch.float64, device=hidden.device).reciprocal().float()
        if consistent:
            # As the engine has it, whose temperatures are float32.
            inverse = torch.full_like(inverse, temperature).reciprocal()
        ones = torch.ones(min(count, chunk), dtype=torch.float32, device=hidden.device)
        for span in _spans(count, chunk):
            logits = multiply(hidden[span], weight, bias)
            lse, picked, of_each, largest = read(logits, targets[span], inverse)
            normalizer[span], spread[span] = lse, of_each
            torch.sub(picked, lse, out=logprobs[span])
            if hits is not None:
                hits[span] = (picked >= largest).to(hits.dtype)
            if taken is not None:
                write_gradient(logits, targets[span], lse, ones[: len(lse)], temperature)
                taken.add(span, logits)
            # A chunk that is still held when the next one is made would double the peak.
            del logits
        if taken is None or taken.may_be_of_no_use:
            ctx.save_for_backward(hidden, weight, bias, targets, normalizer, spread)
        ctx.temperature, ctx.chunk, ctx.entropy, ctx.taken = temperature, chunk, entropy, taken
        if entropy != "graph":
            ctx.mark_non_differentiable(spread)
        return logprobs, spread

    @staticmethod
    def backward(ctx: Any, of_logprobs: Tensor, of_entropy: Tensor) -> tuple[Tensor | None, ...]:
        rest = (None,) * 7
        if ctx.taken is not None and (known := ctx.taken.times(of_logprobs)) is not None:
            return (*known, *rest)
        hidden, weight, bias, targets, normalizer, spread = ctx.saved_tensors
        of_logprobs = of_logprobs.contiguous()
        graph = ctx.entropy == "graph"
        of_entropy = of_entropy.contiguous() if graph else of_entropy
        found = HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        for span in _spans(hidden.shape[0], ctx.chunk):
            logits = nn.functional.linear(hidden[span], weight, bias)
            rows = (targets[span], normalizer[span], of_logprobs[span], ctx.temperature)
            write_gradient(logits, *rows, *((spread[span], of_entropy[span]) if graph else ()))
            found.add(span, logits)
            del logits
        return (*found.given(), *rest)


def _spans(count: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]


__all__ = ["FusedLogprobs", "read", "write_gradient"]
