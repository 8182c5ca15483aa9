"""One recorded completion: a row that holds what a policy sampled before, read and checked.

Nothing is guessed and nothing is filled in: a row that does not fit is refused with its place in the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np

from strop.config.offline import RolloutColumns
from strop.errors import DataError

STATUSES = ("stop", "length", "aborted", "environment_error", "verifier_error", "timeout")
ENDED = ("stop", "length")
"""Of `STATUSES`, those of completions that have a reward."""
GREEDY = -1
"""The value in the column `sample` of a group's most likely completion, which is a baseline and never trained."""

MOST_ABOVE_0 = 1e-4
"""A hair above 0 is rounding of log-sum-exp; anything more is a log-probability of something else."""


@dataclass(frozen=True)
class RecordedCompletion:
    """One completion.

    row: the columns that are not the recording's own, for rewards. text: the completion as verifiers see it. tokens:
    [n] int64, never empty. logprobs: [n] float32, None where they are not known or not wanted. status: one of
    `STATUSES`. reward: NaN where the status is an error, or where it is not wanted. correct, components, detail: as the
    verifiers said then. greedy: whether it is the group's baseline. version, fingerprint: the weights that sampled it,
    0 and empty where the data does not say.
    """

    row: dict[str, Any]
    text: str
    tokens: np.ndarray
    logprobs: np.ndarray | None
    status: str
    reward: float
    correct: bool | None = None
    components: dict[str, float] = field(default_factory=dict)
    detail: str = ""
    greedy: bool = False
    version: int = 0
    fingerprint: str = ""


def token_ids(value: Any, name: str, vocabulary: int, where: str) -> np.ndarray:
    """A column of token ids, [n] int64.

    Raises:
        DataError: it is no list of whole numbers, is empty, or holds an id that the model does not have.
    """
    if isinstance(value, list | tuple) and not value:
        raise DataError(f"the column {name!r} is an empty list", where=where, mend="Delete the row, or give it tokens.")
    ids = _array(value, "iu")
    if ids is None:
        raise DataError(
            f"the column {name!r} must hold a list of token ids, it holds {_shown(value)}",
            where=where,
            mend="Write whole numbers, or leave the column out and give the text.",
        )
    ids = ids.astype(np.int64)
    wrong = np.flatnonzero((ids < 0) | (ids >= vocabulary))
    if len(wrong):
        raise DataError(
            f"entry {wrong[0]} of {name!r} is the token {ids[wrong[0]]}, and the model knows 0 to {vocabulary - 1}",
            where=where,
            mend="Use the model that sampled the completions, or one with its tokenizer.",
        )
    return ids


def log_probabilities(value: Any, name: str, count: int, where: str) -> np.ndarray:
    """A column of log-probabilities, [count] float32.

    Raises:
        DataError: it is no list of numbers, has another length, or holds NaN, infinity or a number above 0.
    """
    if value is None:
        raise DataError(
            f"the row has no log-probabilities in the column {name!r}",
            where=where,
            mend="Set offline.logprobs: compute, which asks the model that the run starts from; or `none`.",
        )
    found = np.zeros(0) if isinstance(value, list | tuple) and not value else _array(value, "fiu")
    if found is None:
        raise DataError(
            f"the column {name!r} must hold a list of numbers, it holds {_shown(value)}",
            where=where,
            mend="Give a log-probability for each sampled token, or set offline.logprobs: compute.",
        )
    if len(found) != count:
        raise DataError(
            f"the column {name!r} has {len(found)} log-probabilities for {count} tokens",
            where=where,
            mend="Give one for each sampled token, the one that ended the completion included; a text is tokenised "
            "anew, so log-probabilities need the token ids beside them. Or set offline.logprobs: compute.",
        )
    numbers = found.astype(np.float64)
    wrong = np.flatnonzero(~((numbers > -math.inf) & (numbers <= MOST_ABOVE_0)))
    if len(wrong):
        raise DataError(
            f"entry {wrong[0]} of {name!r} is {numbers[wrong[0]]:g}, which is the logarithm of no probability",
            where=where,
            mend="Give natural logarithms, which are at most 0; or set offline.logprobs: compute.",
        )
    return np.minimum(numbers, 0.0).astype(np.float32)


def reward_of(row: Mapping[str, Any], columns: RolloutColumns, status: str, where: str) -> float:
    """The reward of a row; NaN where its status says that there is none.

    Raises:
        DataError: a completion that ended has no finite number there.
    """
    value = row.get(columns.reward)
    if status not in ENDED:
        return math.nan
    if not _is_number(value) or not math.isfinite(value):
        raise DataError(
            f"the reward in the column {columns.reward!r} is {_shown(value)}, not a number",
            where=where,
            mend="Give every completion a reward; one that could not be scored has the status verifier_error. Or have "
            "the verifiers score them: offline.rewards: verify.",
        )
    return float(value)


def status_of(row: Mapping[str, Any], columns: RolloutColumns, where: str) -> str:
    """How the completion ended; `stop` where nothing says."""
    value = None if columns.status is None else row.get(columns.status)
    if value is None:
        return "stop"
    if value not in STATUSES:
        raise DataError(
            f"the status in the column {columns.status!r} is {_shown(value)}, none of {', '.join(STATUSES)}",
            where=where,
            mend="Name another column in offline.columns.status, or null where the data has none.",
        )
    return str(value)


def check_temperature(row: Mapping[str, Any], columns: RolloutColumns, expected: float, where: str) -> None:
    """Raise DataError if the row says that it was sampled at another temperature than the recipe's."""
    value = None if columns.temperature is None else row.get(columns.temperature)
    if value is None or value == expected:
        return
    if not _is_number(value):
        raise DataError(
            f"the temperature in the column {columns.temperature!r} is {_shown(value)}, not a number",
            where=where,
            mend="Name another column in offline.columns.temperature, or null where the data has none.",
        )
    raise DataError(
        f"the completion was sampled at temperature {value:g}, and rollout.temperature is {expected:g}: its tokens "
        "would be scored under another distribution than the one they were drawn from",
        where=where,
        mend=f"Set rollout.temperature to {value:g}.",
    )


def is_greedy(row: Mapping[str, Any]) -> bool:
    """Whether the row is a group's baseline."""
    return row.get("sample") == GREEDY and _is_whole(row.get("sample"))


def origin_of(row: Mapping[str, Any], where: str) -> tuple[int, str]:
    """(weight version, model fingerprint) of the weights that sampled a row."""
    version = row.get("weight_version")
    if version is None:
        version = 0
    if not _is_whole(version) or version < 0:
        raise DataError(
            f"the column 'weight_version' holds {_shown(version)}, not a number of steps",
            where=where,
            mend="Give a whole number of 0 or more, or leave the column out.",
        )
    return int(version), str(row.get("model_fingerprint") or "")


def judged_of(row: Mapping[str, Any]) -> tuple[bool | None, dict[str, float], str]:
    """(correct, components, detail) as `strop rollout` wrote them; a column of another form is somebody else's."""
    correct, components, detail = row.get("correct"), row.get("components"), row.get("detail")
    # Parquet gives a map as a list of pairs.
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(components, Mapping):
        pairs = components.items()
    elif _are_pairs(components):
        pairs = components
    scores = {str(name): float(score) for name, score in pairs if _is_number(score)}
    return correct if isinstance(correct, bool) else None, scores, detail if isinstance(detail, str) else ""


def own_columns(row: Mapping[str, Any], columns: RolloutColumns) -> dict[str, Any]:
    """The columns of a row that are not the recording's."""
    taken = {
        columns.prompt_ids,
        columns.completion,
        columns.completion_ids,
        columns.logprobs,
        columns.reward,
        columns.status,
        columns.temperature,
    }
    return {name: value for name, value in row.items() if name not in taken}


def _array(value: Any, kinds: str) -> np.ndarray | None:
    """A flat list as an array of one of some kinds of numbers, or None."""
    if not isinstance(value, list | tuple):
        return None
    try:
        found = np.asarray(value)
    except (ValueError, OverflowError):
        return None
    return found if found.ndim == 1 and found.dtype.kind in kinds else None


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float | np.integer | np.floating)


def _are_pairs(value: Any) -> TypeGuard[Sequence[tuple[Any, Any]]]:
    return isinstance(value, Sequence) and all(isinstance(item, tuple) and len(item) == 2 for item in value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
