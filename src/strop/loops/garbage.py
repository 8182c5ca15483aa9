"""How often Python looks for objects that only hold each other."""

from __future__ import annotations

import gc
from collections.abc import Callable

OBJECTS = 20_000
"""New objects, less those that are gone, after which a run looks. Python's own 700 means eight times in a step of a few
hundred completions, of whose objects none are in cycles: they are gone when the next step has taken their place. A step
of 256 completions makes some 5,000, and to look at these takes 1 ms."""


def look_rarely() -> Callable[[], None]:
    """Leave out what is in memory by now, 0.2 s every few steps, and look less often; returns what undoes both."""
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    if 0 < before[0] < OBJECTS:
        gc.set_threshold(OBJECTS, *before[1:])

    def undo() -> None:
        gc.set_threshold(*before)
        gc.unfreeze()

    return undo
