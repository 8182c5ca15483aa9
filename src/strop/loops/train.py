"""Training by whatever method a recipe asks for."""

from __future__ import annotations

from strop.config import Config
from strop.loops.event_loop import run_to_end
from strop.loops.online import TrainingSummary, train_online
from strop.loops.supervised import train_supervised


def train(config: Config, *, fresh: bool = False, recipe: str | None = None) -> TrainingSummary:
    """Train, or go on where the newest run of this recipe stopped.

    Args:
        config: the recipe. fresh: start a new run instead of going on. recipe: its file, which names the run.

    Raises:
        UserError: something in the recipe cannot work; nothing was written.
        RunFailure: something failed while running; the last checkpoint is kept.
    """
    loop = train_online if config.supervised is None else train_supervised
    return run_to_end(lambda: loop(config, fresh=fresh, recipe=recipe))


__all__ = ["TrainingSummary", "train"]
