"""The tests of promises train the tiny runs of `tests/loops/tiny_runs.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "loops"))


@pytest.fixture(scope="module")
def nursery() -> Iterator[Callable[[Path], Any]]:
    """Starts `strop train recipe.yaml` in a folder, as a process that has everything imported already."""
    from killed_processes import a_nursery

    with a_nursery() as start:
        yield start
