"""From the verdicts of all verifiers on one completion to its reward: gates, clipping, and the weighted sum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    verifiers = dict(zip(verdicts, settings.verifiers, strict=True))
    concerned = [name for name, verifier in verifiers.items() if is_for(verifier, row or {})]
    shut = shut_out(verdicts, settings, concerned)
    counted = [name for name in concerned if name not in shut]
    components: dict[str, float] = {}
    details: list[str] = []
    total, failed = 0.0, ""
    for name in counted:
        verdict, verifier = verdicts[name], verifiers[name]
        if verdict.status != "ok":
            failed = failed or name
            continue
        if verdict.detail:
            details.append(f"{name}: {verdict.detail}")
        if verdict.score is not None:
            components[name] = verdict.score
            total += verifier.weight * held(verdict.score, verifier.clip)
            for part, value in verdict.components.items():
                components[f"{name}/{part}"] = value
    if failed:
        verdict = verdicts[failed]
        return _failure(components, f"{failed}: {verdict.detail}", failed, verdict.status)
    if not components:
        return _failure(components, f"{', '.join(verdicts)}: no verifier applies to this completion", "")
    total, first = held(total, settings.clip), concerned[0]
    if not math.isfinite(total):
        scores = {name: components[name] for name in counted if name in components}
        return _failure(components, f"the weighted sum of {scores} is {total}", first)
    correct = False if first in shut else components[first] >= settings.correct_at if first in components else None
    return Reward(total, components, correct, detail="; ".join(details))


def combine_all(
    answers: Mapping[str, Sequence[Verdict]], settings: RewardSettings, rows: Sequence[Mapping[str, Any]]
) -> list[Reward]:
    """What `combine` makes of each of some completions.

    Args:
        answers: of each verifier, by name, in the order of `settings.verifiers`: one verdict for each completion.
        rows: the data row of each.
    """
    if len(answers) > 1:
        each = zip(*answers.values(), strict=True)
        return [
            combine(dict(zip(answers, one, strict=True)), settings, row) for one, row in zip(each, rows, strict=True)
        ]
    [(name, verdicts)], [verifier] = answers.items(), settings.verifiers
    weight, clip, total_clip, correct_at = verifier.weight, verifier.clip, settings.clip, settings.correct_at
    rewards = []
    for verdict, row in zip(verdicts, rows, strict=True):
        score = verdict.score
        # The score of a single verifier is all there is to add up, unless there is more to say.
        said = score is None or verdict.status != "ok" or verdict.detail or verdict.components
        if score is not None and not said and is_for(verifier, row):
            total = held(0.0 + weight * held(score, clip), total_clip)
            if math.isfinite(total):
                rewards.append(Reward(total, {name: score}, score >= correct_at))
                continue
        rewards.append(combine({name: verdict}, settings, row))
    return rewards


def _failure(components: dict[str, float], detail: str, name: str, status: Any = "verifier_error") -> Reward:
    return Reward(math.nan, components, None, status, detail, failed=name)


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
    if bounds is None:
        return value
    low, high = bounds
    if low is not None:
        value = max(value, low)
    return value if high is None else min(value, high)
