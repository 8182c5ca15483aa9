"""The best checkpoints of a run (`checkpoint.best`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from strop.config.run import BestSettings
from strop.loops.selection import Evaluations, ranking
from strop.tracking.summary import short_path
from strop.tracking.text import show_metric
from strop.training.checkpoint import best_checkpoints, checkpoint_of, point_best


class Best:
    """Which checkpoints of a folder are the best by the evaluations so far; none where nothing is asked for.

    Args:
        evaluations: gives those of the run as they are.
    """

    def __init__(self, settings: BestSettings | None, folder: Path, evaluations: Callable[[], Evaluations]) -> None:
        self._settings, self._folder, self._evaluations = settings, folder, evaluations

    def ranking(self) -> tuple[list[int], int]:
        """Evaluated steps, best first, and how many of them keep their checkpoints."""
        if self._settings is None:
            return [], 0
        return [step for step, _ in ranking(self._evaluations(), self._settings)], self._settings.keep

    def takes(self, step: int) -> bool:
        """Whether the checkpoint of a step would be among the best."""
        return step in best_checkpoints(self._folder, *self.ranking(), planned=step)

    def point(self) -> None:
        """Let the pointer say which one it is."""
        point_best(self._folder, *self.ranking())

    def model(self) -> Path | None:
        """The model of the best checkpoint."""
        steps = best_checkpoints(self._folder, *self.ranking())
        return checkpoint_of(self._folder, steps[0]) / "model" if steps else None

    def score(self) -> dict[str, Any]:
        """Metric, step and score of the best checkpoint, for the manifest."""
        steps = best_checkpoints(self._folder, *self.ranking())
        if self._settings is None or not steps:
            return {}
        scores = dict(ranking(self._evaluations(), self._settings))
        return {"metric": self._settings.metric, "step": steps[0], "score": scores[steps[0]]}

    def line(self) -> str:
        """The same for people."""
        found, model = self.score(), self.model()
        if model is None:
            return ""
        name = str(found["metric"]).removeprefix("eval/")
        return f"step {found['step']}, {name} {show_metric(name, found['score'])}: {short_path(model)}"


__all__ = ["Best"]
