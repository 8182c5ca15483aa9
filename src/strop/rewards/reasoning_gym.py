"""`reasoning_gym`: the task that made a row scores the answer to it."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from strop.config.adapted_rewards import ReasoningGymVerifier
from strop.errors import MissingExtra
from strop.rewards.failures import describe_exception
from strop.rewards.harmless import harmless
from strop.rewards.protocol import Completed, Verdict

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_OF_TUPLES = ("arc_agi", "rearc")
"""Tasks that compare tuples, which rows from JSON have as lists."""


class ReasoningGym:
    """The score that a task of Reasoning Gym gives, with its partial credit.

    Several tasks evaluate the answer (`eval`, sympy's parser): see `harmless`. Several raise an exception at an answer
    that they cannot read. Where the same task scores an empty answer to the same row, it is the answer that is at
    fault, and it is worth 0; else it is an error of the verifier.

    Raises:
        MissingExtra: the package is not installed.
    """

    def __init__(self, settings: ReasoningGymVerifier, *, where: str = "rewards.verifiers") -> None:
        self.name = settings.name or settings.kind
        self._take = settings.take
        self._tasks: dict[str, Any] = {}
        if importlib.util.find_spec("reasoning_gym") is None:
            raise MissingExtra("reasoning-gym", extra="gym", needed_for=f"`{where}.kind: reasoning_gym`")

    def verify(self, completed: Sequence[Completed]) -> list[Verdict]:
        return [self._verdict(item) for item in completed]

    def _verdict(self, item: Completed) -> Verdict:
        try:
            task, entry = self._entry(item.row)
        except ValueError as error:
            return Verdict(None, "verifier_error", str(error))
        detail = ""
        try:
            with harmless():
                score = float(task.score_answer(self.answer(item.completion), entry))
        except MemoryError:
            raise
        except Exception as error:
            try:
                with harmless():
                    task.score_answer(None, entry)
            except Exception:
                return Verdict(None, "verifier_error", describe_exception(error))
            score, detail = 0.0, f"the task cannot read the answer: {describe_exception(error)}"
        if not math.isfinite(score):
            return Verdict(None, "verifier_error", f"the task scored {score}")
        return Verdict(score, detail=detail)

    def answer(self, completion: str) -> str | None:
        """The answer in a completion; None where the tag is missing."""
        found = _TAG.findall(completion) if self._take != "whole" else []
        if found:
            return str(found[-1]).strip()
        return None if self._take == "tag" else completion.strip()

    def _entry(self, row: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The task of a row, and the row as the task made it.

        Raises:
            ValueError: the row was not made by a task.
        """
        name, metadata = row.get("task"), row.get("metadata")
        if not isinstance(name, str) or not isinstance(metadata, Mapping):
            raise ValueError("the row lacks `task` and `metadata`, as rows of `reasoning-gym:TASK` have them")
        if name in _OF_TUPLES:
            metadata = _in_tuples(metadata)
        return self._task(name, row.get("task_arguments") or {}), {
            "question": row.get("prompt"),
            "answer": row.get("answer"),
            "metadata": metadata,
        }

    def _task(self, name: str, arguments: Mapping[str, Any]) -> Any:
        key = f"{name} {json.dumps(arguments, sort_keys=True, default=str)}"
        if key not in self._tasks:
            from reasoning_gym.factory import DATASETS, create_dataset

            if name not in DATASETS or name == "composite":
                raise ValueError(f"Reasoning Gym has no task {name!r}")
            # Its own rows are never looked at.
            self._tasks[key] = create_dataset(name, **arguments, size=1, seed=0)
        return self._tasks[key]


def _in_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _in_tuples(one) for key, one in value.items()}
    return tuple(_in_tuples(one) for one in value) if isinstance(value, list | tuple) else value
