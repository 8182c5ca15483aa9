"""Names of columns: the nearest one to a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str]) -> str:
    """`Did you mean ...?` with the closest of `names`, or an empty string when none is close."""
    lowered = {other.lower(): other for other in names}
    matches = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.5)
    return f"Did you mean {lowered[matches[0]]!r}?" if matches else ""


def listed(names: Iterable[str], *, most: int = 20) -> str:
    """Names as a message shows them: comma-separated, the first `most`."""
    every = list(names)
    text = ", ".join(every[:most]) or "none"
    return f"{text}, and {len(every) - most} more" if len(every) > most else text
