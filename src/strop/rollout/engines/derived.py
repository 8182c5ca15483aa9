"""What the engine `local` derives from the weights of a version: packed and joined layers, and a packed output head."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from strop.errors import RunFailure
from strop.models.consistent import linear_forward
from strop.models.logprobs import capped, output_head
from strop.rollout.engines import packed_linear
from strop.rollout.engines.joined_linear import JoinedLinears

T = TypeVar("T")


class Derived:
    """Made when it is first used, dropped when the weights change, and never used for another version.

    Args:
        packs: hold a second copy of the weights for small matrix products. rows: how many these usually have.
        consistent: logits by the operators of the consistent mode, which are not packed.
        joins: hold sibling layers once more, joined, for captured steps. Not in the consistent mode.
    """

    def __init__(self, model: nn.Module, *, packs: bool, rows: int, consistent: bool, joins: bool = False) -> None:
        self._model, self._packs, self._rows, self._consistent = model, packs, min(rows, 64), consistent
        self.layers: tuple[int, packed_linear.PackedLinears] | None = None
        self.head: tuple[int, Callable[[Tensor], Tensor]] | None = None
        self._joins = joins and not consistent
        # What is used with a version, and what is kept for the next one: graphs hold its addresses.
        self.joined_layers: tuple[int, JoinedLinears] | None = None
        self._kept: JoinedLinears | None = None

    def drop(self) -> None:
        """Nothing of it is used again; joined layers are filled anew, in place."""
        self.layers = self.head = self.joined_layers = None

    def give_back(self) -> None:
        """`drop`, and free all memory. Graphs that were captured with joined layers may not be replayed again."""
        self.drop()
        self._kept = None

    def used(self, version: int) -> AbstractContextManager[Any]:
        """While this is entered the model's layers are those of a version, packed where they are to be."""
        if not self._packs:
            return nullcontext()
        if self.layers is None:
            self.layers = (version, packed_linear.PackedLinears(self._model, rows=self._rows))
        return _of(self.layers, version).active()

    def joined(self, version: int) -> JoinedLinears | None:
        """Joined layers with the weights of a version, for captured steps; None where layers are not joined.

        Ask before each replay too: a graph reads whatever the copies hold then.
        """
        if not self._joins:
            return None
        if self.joined_layers is None:
            try:
                if self._kept is None:
                    self._kept = JoinedLinears(self._model)
                self._kept.copy()
            except torch.OutOfMemoryError as error:
                # Only when they are made, which is before any graph.
                self._joins, self._kept = False, None
                warnings.warn(
                    f"layers are computed one by one, which is slower: there is no memory to join them, {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return None
            self.joined_layers = (version, self._kept)
        return _of(self.joined_layers, version, "copied")

    def joined_bytes(self) -> int:
        """Memory of the joined layers."""
        return 0 if self._kept is None else self._kept.bytes()

    def logits(self, hidden: Tensor, version: int, *, widened: bool = True) -> Tensor:
        """[B, V] float32; in the model's own number format in the consistent mode, and where they need not be
        `widened` for whoever reads them."""
        weight, bias, softcap = output_head(self._model)
        if self._consistent:
            return linear_forward(hidden, weight, bias)
        if self._packs and weight.numel() >= packed_linear.SMALLEST:
            if self.head is None:
                self.head = (version, packed_linear.packed_product(weight.detach(), bias, self._rows))
            logits = _of(self.head, version)(hidden)
        else:
            logits = nn.functional.linear(hidden, weight, bias)
            if widened or softcap is not None:
                logits = logits.float()
        return capped(logits, softcap)


def _of(made: tuple[int, T], version: int, how: str = "packed") -> T:
    then, value = made
    if then != version:
        raise RunFailure(f"the engine serves version {version} with weights {how} from version {then}")
    return value
