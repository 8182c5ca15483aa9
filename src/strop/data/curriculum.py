"""The curriculum: which prompts are passed by when their turn comes, by how often they have been passed so far.

In every epoch each row is either tried or counted as passed by. Which it is follows from the seed, the epoch, the row
and what was recorded of it before; nothing else is drawn, so the order of the others does not change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import load_file, save_file

from strop.config.curriculum import CurriculumSettings
from strop.data.order import hashed, stream_key

Standing = Literal["unknown", "open", "solved", "failed", "certain"]
_STREAM = 21
"""Keeps the draws of this file apart from others of the same seed."""


class Curriculum:
    """Pass rates of the rows of a source, and what follows from them.

    Args:
        settings: `data.curriculum`.
        rows: of the source.
        seed: of the draws.
        group_size: completions of a try, for `min_attempts: auto`.
    """

    def __init__(self, settings: CurriculumSettings, rows: int, *, seed: int, group_size: int) -> None:
        self.settings = settings
        self.rows = rows
        self._seed = seed
        self._enough = group_size if settings.min_attempts == "auto" else settings.min_attempts
        # The newest try first: [rows, memory] int32.
        self._passed = np.zeros((rows, settings.memory), dtype=np.int32)
        self._tried = np.zeros((rows, settings.memory), dtype=np.int32)
        self._counts: dict[str, int] = {}

    def record(self, row: int, passed: int, tried: int) -> None:
        """Take in a try: so many of so many scored completions have passed. One without any tells nothing."""
        if not tried:
            return
        for counts, newest in ((self._passed, passed), (self._tried, tried)):
            counts[row, 1:] = counts[row, :-1].copy()
            counts[row, 0] = newest

    def standing(self, row: int) -> tuple[Standing, float]:
        """What is thought of a row, and the probability with which it is tried when its turn comes."""
        tried = int(self._tried[row].sum())
        if tried < self._enough:
            return "unknown", 1.0
        settings, rate = self.settings, int(self._passed[row].sum()) / tried
        if settings.solved_at is not None and rate >= settings.solved_at:
            return "solved", settings.floor
        if settings.failed_at is not None and rate <= settings.failed_at:
            return "failed", settings.floor
        if settings.prefer == "uncertain":
            return "certain", max(settings.floor, 4 * rate * (1 - rate))
        return "open", 1.0

    def skips(self, epoch: int, row: int, *, waited: int) -> bool:
        """Whether a row is passed by in an epoch; it is counted as what it is.

        Args:
            waited: rows that have been passed by one after the other before it, for whatever reason. After as many as
                an epoch has, none is any more: there is always a prompt to try.
        """
        standing, probability = self.standing(row)
        if probability >= 1:
            return False
        draw = hashed(np.array([row], dtype=np.uint64), stream_key(self._seed, _STREAM, epoch))
        if float(draw[0]) * 2.0**-64 >= probability:
            if waited < self.rows:
                self._count(f"skipped_{standing}")
                return True
            self._count("forced")
        elif standing != "certain":
            self._count("revisited")
        return False

    def start_step(self) -> None:
        """Count what is passed by from zero."""
        self._counts.clear()

    def metrics(self) -> dict[str, float]:
        """What has been passed by since `start_step`, and what is thought of all rows now."""
        names = ["skipped_solved", "skipped_failed", "revisited", "forced"]
        if self.settings.prefer == "uncertain":
            names.insert(2, "skipped_certain")
        found = {name: float(self._counts.get(name, 0)) for name in names}
        tried = self._tried.sum(1)
        known = tried >= self._enough
        rates = self._passed.sum(1)[known] / tried[known]
        solved_at, failed_at = self.settings.solved_at, self.settings.failed_at
        found |= {
            "known": float(known.sum()),
            "solved": 0.0 if solved_at is None else float((rates >= solved_at).sum()),
            "failed": 0.0 if failed_at is None else float((rates <= failed_at).sum()),
            "pass_rate": float(rates.mean()) if len(rates) else float("nan"),
        }
        return {f"curriculum/{name}": value for name, value in found.items()}

    def save(self, path: Path) -> None:
        """Write what was recorded: of the rows that were tried, their numbers and counts."""
        save_file(self.held(), path)

    def held(self) -> dict[str, np.ndarray]:
        """What `save` writes, in arrays that later records do not change."""
        seen = np.flatnonzero(self._tried.any(1))
        return {"rows": seen, "passed": self._passed[seen], "tried": self._tried[seen]}

    def load(self, path: Path) -> None:
        """Take back what `save` wrote."""
        state: dict[str, Any] = load_file(path)
        self._passed[:], self._tried[:] = 0, 0
        self._passed[state["rows"]], self._tried[state["rows"]] = state["passed"], state["tried"]

    def _count(self, name: str) -> None:
        self._counts[name] = self._counts.get(name, 0) + 1
