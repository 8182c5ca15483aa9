"""What modules compute for a while in the place of their own forward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

Forwards = Sequence[tuple[nn.Module, Callable[..., Any]]]


@contextmanager
def replaced(forwards: Forwards) -> Iterator[None]:
    """Let modules compute these functions; afterwards each has what it had before, which may be another replacement."""
    before = [vars(module).get("forward") for module, _ in forwards]
    for module, forward in forwards:
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for (module, _), own in zip(forwards, before, strict=True):
            if own is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = own
