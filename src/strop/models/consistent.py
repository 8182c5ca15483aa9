"""The operators of the consistent mode, with gradients: one result for a row, whatever else is computed with it.

The forward pass is that of `exact_sums.py` on a CPU and of `consistent_kernels.py` on a GPU; the backward pass is that
of the ordinary operators, which add up in the order that is fastest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from strop.models import exact_sums


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear_forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            grad @ weight if of_x else None,
            rows.t() @ x.reshape(-1, x.shape[-1]) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


class _Instead(torch.autograd.Function):
    """What one function computes, with the gradient of another."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], plain: Callable[..., Tensor], *given: Tensor) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(*given)
        return compute(*given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            given = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, wanted, strict=True)]
            found = ctx.plain(*given)
        gradients = iter(torch.autograd.grad(found, [x for x in given if x.requires_grad], grad))
        return (None, None, *(next(gradients) if need else None for need in wanted))


def with_gradient_of(plain: Callable[..., Tensor], compute: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """compute(*given), with the gradient of plain(*given)."""
    return _Instead.apply(compute, plain, *given)


def linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, [..., N], without a gradient. x: [..., K]. weight: [N, K]. bias: [N]."""
    if x.is_cuda:
        from strop.models import consistent_kernels

        return consistent_kernels.linear(x, weight, bias)
    return exact_sums.linear(x, weight, bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same with a gradient."""
    return _Linear.apply(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps), as Llama has it. x: [..., H]. weight: [H]."""

    def compute(x: Tensor, weight: Tensor) -> Tensor:
        if x.is_cuda:
            from strop.models import consistent_kernels

            return consistent_kernels.rms_norm(x, weight, eps)
        return exact_sums.rms_norm(x, weight, eps)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    return with_gradient_of(plain, compute, x, weight)


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)) on a CPU; a GPU computes all elements of an array alike."""
    return with_gradient_of(F.silu, exact_sums.silu, x)


def chosen_logprobs(logits: Tensor, tokens: Tensor, temperatures: Tensor) -> Tensor:
    """[n] float32: what the trainer gives for tokens [n] of logits [n, V], which are in the number format of the model.

    Args:
        temperatures: [n] float32; with 0, which takes the most likely token, it is that at temperature 1.
    """
    temperatures = torch.where(temperatures > 0, temperatures, torch.ones_like(temperatures))
    if logits.is_cuda:
        from strop.models.logprobs_fused import read

        lse, picked, _, _ = read(logits, tokens, temperatures.reciprocal())
        return picked - lse
    scaled = logits.float() / temperatures[:, None]
    return scaled.gather(1, tokens[:, None])[:, 0] - exact_sums.log_sum_exp(scaled)


__all__ = ["chosen_logprobs", "linear", "linear_forward", "rms_norm", "silu", "with_gradient_of"]
