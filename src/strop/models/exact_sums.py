"""Operators on a CPU whose sums are exact, so that no order of adding up can change a result.

BLAS adds in an order that depends on how many rows there are, on where a row lies among them, and on the threads. Here
numbers become whole numbers first, relative to the largest of their row and so few digits long that sums of products
are below 2^53: float64 has all of them exactly, in any order (error-free splitting, Ozaki et al. 2012, with a single
slice). What is left is elementwise and uses the operations that IEEE 754 rounds in one way only: +, -, *, /, sqrt.
exp and log of torch are none of them: they round in another way at the end of an array than in its middle.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_DIGITS = 53
DEPTH = 1024
"""Numbers of a row whose products with weights are added up exactly; further ones are, and are added in turn."""
KEYS = 512
"""Keys whose weighted values are added up exactly; such blocks, from the start of a stream, are added in turn."""
_SHARE_DIGITS = 34
"""Digits of what a softmax adds up, of which the largest is 1: up to 2^19 of them."""
_LOG2_E = 1.4426950408889634
# ln 2 in two parts, of which the first has so few digits that its products with whole numbers up to 2^8 are exact.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, in the number format of x. x: [..., K]. weight: [N, K]. bias: [N]."""
    flat, depth = x.reshape(-1, x.shape[-1]), x.shape[-1]
    digits = _digits(min(depth, DEPTH))
    found: Tensor | None = None
    for start in range(0, depth, DEPTH):
        rows, of_rows = whole_numbers(flat[:, start : start + DEPTH], digits)
        columns, of_columns = whole_numbers(weight[:, start : start + DEPTH], digits)
        part = (rows @ columns.t()).mul_(of_rows).mul_(of_columns.t())
        found = part if found is None else found.add_(part)
    assert found is not None
    if bias is not None:
        found += bias.double()
    return _rounded(found, x.dtype).view(*x.shape[:-1], -1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps), the quotient rounded to the number format of x. x: [..., H]. weight: [H]."""
    rows, scale = whole_numbers(x, _digits(x.shape[-1]))
    mean = (rows * rows).sum(-1, keepdim=True).mul_(scale).mul_(scale).div_(x.shape[-1])
    inverse = _rounded(1 / torch.sqrt(mean + eps), torch.float32)
    return weight * (x.float() * inverse).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x))."""
    wide = x.float()
    small = exp(-wide.abs())
    return (wide * torch.where(wide >= 0, 1 / (1 + small), small / (1 + small))).to(x.dtype)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Masked attention; a masked key, whatever it is, leaves no trace, so that padding changes nothing.

    Args:
        query: [b, heads, q, d]. key, value: [b, heads, k, d]. mask: bool, broadcast to [b, heads, q, k], True where a
            query sees a key; each sees one at least.
    """
    q, of_q = whole_numbers(query, _digits(query.shape[-1]))
    k, of_k = whole_numbers(key, _digits(query.shape[-1]))
    scores = (q @ k.transpose(-1, -2)).mul_(of_q).mul_(of_k.transpose(-1, -2)).mul_(scaling)
    scores.masked_fill_(~mask, -math.inf)
    shares = exp((scores - scores.amax(-1, keepdim=True)).float()).masked_fill_(~mask, 0).double()
    total = _sum_of_shares(shares)
    digits = _digits(KEYS)
    v, of_v = whole_numbers(value, digits)
    # A value's scale is put into its weight, so that whole numbers of different scales are never added up.
    weights, of_weights = whole_numbers(shares.mul_(of_v.transpose(-1, -2)), digits)
    found = torch.zeros(1, dtype=torch.float64)
    for start in range(0, key.shape[-2], KEYS):
        found = found + weights[..., start : start + KEYS] @ v[..., start : start + KEYS, :]
    return _rounded(found.mul_(of_weights).div_(total), value.dtype)


def log_sum_exp(logits: Tensor) -> Tensor:
    """[n] float32 of [n, V] float32."""
    largest = logits.amax(-1, keepdim=True)
    total = _sum_of_shares(exp(logits - largest).double())
    return _rounded((largest.double() + log(total)).squeeze(-1), torch.float32)


def whole_numbers(x: Tensor, digits: int) -> tuple[Tensor, Tensor]:
    """(whole numbers of at most so many binary digits, float64 like x; powers of 2, [..., 1], that they are to be
    multiplied with). What is less than half of a row's largest number times 2^-digits is lost."""
    largest = x.abs().amax(-1, keepdim=True).double()
    # A row of zeros, whose exponent is that of nothing, must not overflow.
    exponent = ((largest.view(torch.int64) >> 52) - 1022).clamp_(min=-900)
    return (x.double() * _power_of_two(digits - exponent)).round_(), _power_of_two(exponent - digits)


def exp(x: Tensor) -> Tensor:
    """exp(x) of x <= 0, float32, with a relative error of some 1e-7; below -87 that of -87."""
    x = x.clamp(min=-87.0)
    n = (x * _LOG2_E).round_()
    r = x - n * _LN2_HIGH
    r -= n * _LN2_LOW
    found = torch.full_like(r, 1 / 5040)
    for factor in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        found.mul_(r).add_(factor)
    return found.mul_(((n.int() + 127) << 23).view(torch.float32))


def log(x: Tensor) -> Tensor:
    """The natural logarithm of float64 numbers >= 1, with an absolute error of some 1e-15."""
    bits = x.view(torch.int64)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & ((1 << 52) - 1)) | (1023 << 52)).view(torch.float64)
    # log m = 2 artanh(s) with s at most 1/3.
    s = (mantissa - 1) / (mantissa + 1)
    square = s * s
    series = torch.full_like(s, 1 / 33)
    for odd in range(31, 0, -2):
        series = series * square + 1 / odd
    return exponent.double() * math.log(2) + series * s * 2


def _sum_of_shares(shares: Tensor) -> Tensor:
    """[..., 1]: the sum over the last dimension of numbers between 0 and 1, float64."""
    return (shares * float(1 << _SHARE_DIGITS)).round_().sum(-1, keepdim=True).mul_(1.0 / (1 << _SHARE_DIGITS))


def _digits(count: int) -> int:
    """Binary digits of whole numbers, `count` products of which add up exactly."""
    return (_DIGITS - max(0, count - 1).bit_length()) // 2


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 1023) << 52).view(torch.float64)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """From float64; by way of float32, as numbers of other formats are rounded."""
    return x.float().to(dtype)


__all__ = ["attention", "linear", "log_sum_exp", "rms_norm", "silu"]
