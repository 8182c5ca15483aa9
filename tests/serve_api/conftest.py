"""A service in this process for each test that wants one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_at_hand import ROOT, AtHand


@pytest.fixture
def at_hand(tmp_path: Path) -> Iterator[Callable[..., AtHand]]:
    """`at_hand(**settings)`: a service of one's own."""
    made: list[AtHand] = []

    def make(**settings: Any) -> AtHand:
        made.append(AtHand(tmp_path / f"runs{len(made) or ''}", **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def there(at_hand: Callable[..., AtHand]) -> AtHand:
    """A service."""
    return at_hand()


@pytest.fixture(scope="session")
def quickstart() -> str:
    """The text of the quickstart's recipe."""
    return (ROOT / "recipes" / "quickstart.yaml").read_text(encoding="utf-8")
