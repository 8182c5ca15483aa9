"""Linear layers that read the same input, computed as one matrix product in the decoding steps of a GPU.

For a few hundred rows the products of a small model (q, k and v; gate and up) are too small, each alone, to give all
of a GPU work. One product with a copy of their weights below each other does so. Kernels need the weights in one
piece, and the parameters themselves stay where the trainer has them, so this costs the memory of these weights again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from strop.models.forward import backbone
from strop.models.replaced import replaced

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers of one module that read the same input, in the families that name them so."""
LARGEST = 1 << 24
"""Bytes of a joined weight. The parts of larger ones fill a GPU by themselves, so that nothing would be gained, and
the copies would cost memory that a large model needs for its cache."""


class JoinedLinears:
    """Joined copies of a model's sibling layers.

    CUDA graphs hold the addresses of the copies: `copy` brings new weights to the same places.

    Layers are left alone that have adapters or are of another class than `nn.Linear`, whose weights are shared with
    others, divided among ranks, or not all there, and whose forward passes somebody else has replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        self._groups = [_Joined(layers) for layers in _siblings(model)]
        self._forwards = [
            (layer, _forward(group, number)) for group in self._groups for number, layer in enumerate(group.layers)
        ]

    def copy(self) -> None:
        """Take the weights as they are now."""
        for group in self._groups:
            group.copy()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the layers be computed together."""
        try:
            with replaced(self._forwards):
                yield
        finally:
            for group in self._groups:
                group.forget()

    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for group in self._groups for x in group.parameters())


class _Joined(nn.Module):
    """One product for all of a few layers: whoever asks first computes it, and each takes its part.

    A module only so that torch.compile takes its sizes for constants. Nobody may write into the input between the calls
    of siblings; the models that name their layers so do not.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        # Not as modules of this one.
        self.layers = tuple(layers)
        self.sizes = [layer.out_features for layer in layers]
        first, rows = layers[0], sum(self.sizes)
        self.weight = nn.Parameter(first.weight.new_empty((rows, first.in_features)), requires_grad=False)
        self.bias: nn.Parameter | None = None
        if first.bias is not None:
            self.bias = nn.Parameter(first.bias.new_empty(rows), requires_grad=False)
        # The newest input, and what nobody has taken of its product; None when everybody has.
        self.input: Tensor | None = None
        self.parts: list[Tensor | None] = []

    @torch.no_grad()
    def copy(self) -> None:
        for weight, layer in zip(torch.split(self.weight, self.sizes), self.layers, strict=True):
            weight.copy_(layer.weight)
        if self.bias is not None:
            for bias, layer in zip(torch.split(self.bias, self.sizes), self.layers, strict=True):
                bias.copy_(layer.bias)

    def forward(self, input: Tensor, number: int) -> Tensor:
        """What layer `number` computes, [..., its outputs]: a view of the joined product."""
        part = self.parts[number] if self.input is input else None
        if part is None:
            self.input = input
            product = nn.functional.linear(input, self.weight, self.bias)
            self.parts = list(torch.split(product, self.sizes, dim=-1))
            part = self.parts[number]
            assert part is not None
        self.parts[number] = None
        if all(other is None for other in self.parts):
            self.forget()
        return part

    def forget(self) -> None:
        self.input, self.parts = None, []


def _forward(group: _Joined, number: int) -> Callable[[Tensor], Tensor]:
    # A function of Python for each layer: torch.compile compares its code, where it would tell other callables apart
    # and compile each block for itself.
    def forward(input: Tensor) -> Tensor:
        return group.forward(input, number)

    return forward


def _siblings(model: nn.Module) -> Iterator[tuple[nn.Linear, ...]]:
    uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    device = next(model.parameters()).device
    for module in backbone(model).modules():
        for names in SIBLINGS:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            if all(_plain(layer, device, uses) for layer in layers) and _fit(layers):
                yield tuple(layers)


def _plain(layer: Any, device: torch.device, uses: Counter[nn.Parameter]) -> bool:
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return False
    own = [parameter for parameter in (layer.weight, layer.bias) if parameter is not None]
    # A weight that is divided among ranks, or quantised, is of a class of its own.
    return device.type != "meta" and all(
        type(parameter) is nn.Parameter and parameter.device == device and uses[parameter] == 1 for parameter in own
    )


def _fit(layers: Sequence[nn.Linear]) -> bool:
    alike = {(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in layers}
    return len(alike) == 1 and sum(layer.weight.nbytes for layer in layers) <= LARGEST
