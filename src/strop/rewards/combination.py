"""From the verdicts of all verifiers on one completion to its reward: gates, clipping, and the weighted sum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from strop.config.rewards import RewardSettings, VerifierSettings
from strop.rewards.protocol import Reward, Verdict


def is_for(verifier: VerifierSettings, row: Mapping[str, Any]) -> bool:
    """Whether a verifier is for completions of this row: every column of `when` has one of the values it names."""
    return not verifier.when or all(
        row.get(column) in wanted if isinstance(wanted, list) else row.get(column) == wanted
        for column, wanted in verifier.when.items()
    )


def passes(verifier: VerifierSettings, verdict: Verdict) -> bool:
    """Whether what waits for a verifier may count.

    A gate that does not apply to a completion stands open. So does one that failed, whose status the reward takes.
    """
    return verdict.status != "ok" or verdict.score is None or verdict.score >= verifier.passes_at


def combine(verdicts: Mapping[str, Verdict], settings: RewardSettings, row: Mapping[str, Any] | None = None) -> Reward:
    """The reward of one completion.

    The total is the sum of weight times score over the verifiers that apply, each score and the total held to its
    `clip`. A verifier counts only if every other one that it needs (`gate`, `requires`) passes, and if what that one
    needs does. If any verifier that counts failed, the reward takes its status (the first one's, in order) and the
    total is NaN: a part of a sum is not a smaller reward. The same if no verifier applies, for then nothing says what
    the completion is worth.

    Args:
        verdicts: by name, in the order of `settings.verifiers`.
        settings: weights, gates, clips and `correct_at`.
        row: the data row, for `when`; a verifier that is not for it is left out.
    """
    if len(verdicts) == len(settings.verifiers) == 1 and (plain := _of_one(verdicts, settings)) is not None:
        return plain
    verifiers = dict(zip(verdicts, settings.verifiers, strict=True))
    concerned = [name for name, verifier in verifiers.items() if is_for(verifier, row or {})]
    shut = shut_out(verdicts, settings, concerned)
    counted = {name: verdicts[name] for name in concerned if name not in shut}
    components: dict[str, float] = {}
    for name, verdict in counted.items():
        if verdict.status == "ok" and verdict.score is not None:
            components[name] = verdict.score
            components |= {f"{name}/{part}": value for part, value in verdict.components.items()}

    def failure(detail: str, name: str, status: Any = "verifier_error") -> Reward:
        return Reward(math.nan, components, None, status, detail, failed=name)

    for name, verdict in counted.items():
        if verdict.status != "ok":
            return failure(f"{name}: {verdict.detail}", name, verdict.status)
    scores = {name: components[name] for name in counted if name in components}
    first = next(iter(concerned), next(iter(verdicts)))
    if not scores:
        return failure(f"{', '.join(verdicts)}: no verifier applies to this completion", "")
    total = sum(verifiers[name].weight * held(score, verifiers[name].clip) for name, score in scores.items())
    total = held(total, settings.clip)
    if not math.isfinite(total):
        return failure(f"the weighted sum of {scores} is {total}", first)
    detail = "; ".join(f"{name}: {verdict.detail}" for name, verdict in counted.items() if verdict.detail)
    correct = False if first in shut else scores[first] >= settings.correct_at if first in scores else None
    return Reward(total, components, correct, detail=detail)


def _of_one(verdicts: Mapping[str, Verdict], settings: RewardSettings) -> Reward | None:
    """`combine` where there is one verifier, for all rows, that gave a number, as in most recipes, at a third of the
    time. None where it is not as simple as that."""
    (name, verdict), verifier = next(iter(verdicts.items())), settings.verifiers[0]
    score = verdict.score
    if verdict.status != "ok" or score is None or verdict.components or verifier.when:
        return None
    # 0 and a number is what `sum` adds up, which has no -0.
    total = held(0 + verifier.weight * held(score, verifier.clip), settings.clip)
    if not math.isfinite(total):
        return None
    detail = f"{name}: {verdict.detail}" if verdict.detail else ""
    return Reward(total, {name: score}, score >= settings.correct_at, detail=detail)


def shut_out(verdicts: Mapping[str, Verdict], settings: RewardSettings, concerned: list[str]) -> set[str]:
    """Names of the verifiers that a gate shuts out.

    Args:
        concerned: names of those that are for the row; the others shut nothing.
    """
    if not any(verifier.gate or verifier.requires is not None for verifier in settings.verifiers):
        return set()
    verifiers = dict(zip(verdicts, settings.verifiers, strict=True))
    needs = settings.needs()

    def open_(name: str) -> bool:
        """Whether everything that a verifier needs passes, and is not shut out itself."""
        waits_for = [other for other in needs[name] if other in concerned]
        return all(open_(other) and passes(verifiers[other], verdicts[other]) for other in waits_for)

    return {name for name in concerned if not open_(name)}


def held(value: float, bounds: list[float | None] | None) -> float:
    """A number held to its bounds."""
    low, high = bounds or (None, None)
    if low is not None:
        value = max(value, low)
    return value if high is None else min(value, high)
