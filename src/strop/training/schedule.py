"""Learning rates."""

from __future__ import annotations

import math

from strop.config.training import OptimizerSettings


def learning_rate(settings: OptimizerSettings, update: int, total: int) -> float:
    """Learning rate of an update.

    Args:
        update: 0 for the first. total: updates of the whole run, the warm-up included.

    The warm-up rises in equal parts and reaches the peak at update `warmup_steps`; linear and cosine then fall to
    `final_share` of the peak at the last update.
    """
    peak = settings.learning_rate
    if update < settings.warmup_steps:
        return peak * (update + 1) / (settings.warmup_steps + 1)
    if settings.schedule == "constant":
        return peak
    done = (update - settings.warmup_steps) / max(1, total - 1 - settings.warmup_steps)
    done = min(max(done, 0.0), 1.0)
    fall = 1 - done if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return peak * (settings.final_share + (1 - settings.final_share) * fall)
