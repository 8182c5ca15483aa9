"""Which checkpoints are the best by a held-out score, and when a run has stopped getting better.

Both are functions of the evaluations so far, which every checkpoint holds: a run that goes on decides as it would have
without the stop, and one that is asked for another metric decides by that of all its evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from strop.config import Config
from strop.config.run import EarlyStopSettings, WatchedMetric
from strop.errors import UserError

Evaluations = Sequence[tuple[int, Mapping[str, float]]]
"""Steps in increasing order, each with its scores by name, without the `eval/` of `metrics.jsonl`."""

BETTER = {
    "accuracy": "max",
    "reward": "max",
    "token_accuracy": "max",
    "agreement": "max",
    "divergence": "min",
    "margin": "max",
    "loss": "min",
    "perplexity": "min",
}
"""Whether more or less is better, where that can be said."""
OF_COMPLETIONS = ("accuracy", "reward", "completion_length")
OF_PAIRS = ("loss", "accuracy", "margin")
OF_METHODS = {
    "sft": ("loss", "perplexity", "token_accuracy"),
    "distillation": ("loss", "perplexity", "token_accuracy", "divergence", "agreement"),
    "kto": ("loss", "accuracy"),
    "process_reward": ("loss", "accuracy"),
}
"""Scores of the methods that learn from examples and do not compare two completions."""


def scores_of(config: Config) -> tuple[str, ...]:
    """Names of the scores that each evaluation of a run gives."""
    if config.supervised is None:
        verifiers = config.evaluation.verifiers or (config.rewards.verifiers if config.rewards is not None else [])
        names = [verifier.name or verifier.kind for verifier in verifiers]
        return OF_COMPLETIONS + (tuple(f"reward/{name}" for name in names) if len(names) > 1 else ())
    return OF_METHODS.get(config.supervised.method, OF_PAIRS)


def metric_problems(config: Config) -> Iterator[UserError]:
    """What is wrong with the metrics that a recipe decides by; nothing that needs more than the recipe."""
    watched = {"checkpoint.best": config.checkpoint.best, "evaluation.early_stop": config.evaluation.early_stop}
    names = [f"eval/{name}" for name in scores_of(config)]
    for key, settings in watched.items():
        if settings is None or config.data.eval is None:
            continue
        if settings.metric not in names:
            close = get_close_matches(settings.metric, names, n=1)
            inside = [name for name in names if name.rpartition("/")[2] == settings.metric.rpartition("/")[2]]
            mend = f"did you mean {(inside or close)[0]}? " if inside or close else ""
            yield UserError(
                f"`{key}.metric` is {settings.metric!r}, which no evaluation of this recipe gives",
                where=f"{key}.metric",
                mend=f"{mend}there are {', '.join(names)}",
            )
        elif settings.mode == "auto" and _better(_name(settings)) is None:
            what = f"`{key}.mode` is auto, and nobody knows whether more of {settings.metric} is better"
            yield UserError(what, where=f"{key}.mode", mend="set it to max or min")
    if config.checkpoint.best is not None and config.data.eval is None:
        what = "`checkpoint.best` has no effect without held-out data"
        yield UserError(what, where="checkpoint.best", mend="remove it, or add data.eval")
    if config.evaluation.early_stop is not None and config.data.eval is not None and not config.evaluation.every:
        what = "`evaluation.early_stop` has no effect while only the start and the end are evaluated"
        yield UserError(what, where="evaluation.early_stop", mend="set evaluation.every, or remove it")


def ranking(evaluations: Evaluations, settings: WatchedMetric) -> list[tuple[int, float]]:
    """(step, score) of the evaluations that gave a score, best first; of equal ones the earlier comes first."""
    sign = _sign(settings)
    scored = [(step, scores.get(_name(settings), math.nan)) for step, scores in evaluations]
    known = [(step, value) for step, value in scored if not math.isnan(value)]
    return sorted(known, key=lambda one: (-sign * one[1], one[0]))


def stop_reason(evaluations: Evaluations, settings: EarlyStopSettings | None) -> str:
    """Why a run ends here: too many evaluations in a row have not beaten the best one. Empty while it goes on."""
    if settings is None:
        return ""
    sign, best, best_step, waited = _sign(settings), -math.inf, 0, 0
    for step, scores in evaluations:
        value = sign * scores.get(_name(settings), math.nan)
        # NaN beats nothing.
        if value > best + settings.min_delta:
            best, best_step, waited = value, step, 0
        else:
            waited += 1
    if waited < settings.patience:
        return ""
    least = f" by more than {settings.min_delta:g}" if settings.min_delta else ""
    times = "evaluation" if waited == 1 else f"{waited} evaluations"
    since = f"its {sign * best:.4g} of step {best_step}" if math.isfinite(best) else "anything"
    return f"{settings.metric} has not beaten {since}{least} for {times}"


def evaluations_of(state: Mapping[str, Any]) -> list[tuple[int, dict[str, float]]]:
    """The evaluations in a checkpoint's state; none in one that was written before they were kept."""
    return [(int(step), dict(scores)) for step, scores in state.get("evaluations", [])]


def _name(settings: WatchedMetric) -> str:
    return settings.metric.removeprefix("eval/")


def _better(name: str) -> str | None:
    """Whether more or less of a score is better; of what a verifier gives more is."""
    return "max" if name.startswith("reward/") else BETTER.get(name)


def _sign(settings: WatchedMetric) -> int:
    mode = _better(_name(settings)) if settings.mode == "auto" else settings.mode
    return -1 if mode == "min" else 1
