"""What environments have in common whose turns are actions: finding the action, and showing what came of it."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from strop.config.adapted_environments import ActingEnvironment
from strop.environments.protocol import Done, Message, Observation
from strop.errors import UserError

_COLOURED = re.compile(r"\x1b\[[\d;]*m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPES = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


class Actions:
    """The actions that a turn can hold, by name, in order.

    Args:
        take: which one counts, see `GymnasiumEnvironment`.
    """

    def __init__(self, names: Sequence[str], *, take: str = "last") -> None:
        self.names = list(names)
        self._take = take
        self._number = {name.strip().lower(): at for at, name in enumerate(names)}
        # The longest first: `up left` is not `up`. A number is not found in a longer one, nor -1 as 1.
        either = "|".join(re.escape(name) for name in sorted(self._number, key=len, reverse=True))
        self._pattern = re.compile(rf"(?<![\w.-])(?:{either})(?![\w]|\.\d)")

    def find(self, text: str) -> int | None:
        """The number of the action in a turn; None where there is none."""
        lowered = text.lower()
        if self._take == "whole":
            return self._number.get(lowered.strip())
        found = self._pattern.findall(lowered)
        if not found or (self._take == "only" and len(set(found)) > 1):
            return None
        return self._number[found[0 if self._take == "first" else -1]]


class Shown:
    """How a recipe shows observations to the policy.

    Raises:
        UserError: a template names something else than what there is.
    """

    def __init__(self, settings: ActingEnvironment, *, where: str = "environment") -> None:
        self._settings = settings
        _check(settings.observation, f"{where}.observation", ("observation", "reward", "step"))
        _check(settings.opening, f"{where}.opening", None)

    def opening(self, row: Mapping[str, Any], observation: str) -> list[Message]:
        """The first messages; KeyError for a column that the row lacks."""
        given = row.get("prompt", "")
        before = [] if isinstance(given, str) else [dict(message) for message in given]
        columns = {**row, "prompt": given if isinstance(given, str) else "", "observation": observation}
        text = self._settings.opening.format(**columns)
        return [*before, {"role": "user", "content": text.removeprefix("\n") if not columns["prompt"] else text}]

    def answer(self, observation: str, reward: float | None, step: int) -> Observation:
        shown = "none" if reward is None else f"{reward:g}"
        text = self._settings.observation.format(observation=observation, reward=shown, step=step)
        return Observation([{"role": "user", "content": text}], reward)

    def malformed(self, wanted: str) -> Observation | Done:
        """What a turn without an action gets. wanted: what would have been one."""
        # A reward even where it is none: an episode without any action is worth 0, not nothing.
        penalty = 0.0 - self._settings.malformed_penalty
        if self._settings.malformed == "end":
            return Done(reward=penalty)
        return Observation([{"role": "user", "content": f"That is no action. {wanted}"}], penalty)


def plain(value: Any) -> str:
    """An observation as a text: numbers and texts as they are, arrays as lists, everything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if hasattr(value, "tolist"):  # arrays and scalars of NumPy
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {plain(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(plain(one) for one in value) + "]"
    return str(value)


def picture(text: str) -> str:
    """A picture for a terminal as a text: what is coloured stands in brackets."""
    return _ESCAPES.sub("", _COLOURED.sub(r"[\1]", text)).strip("\n")


def _check(template: str, where: str, known: Sequence[str] | None) -> None:
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise UserError(
            f"the template is malformed: {error}", where=where, mend="write a brace twice: {{ and }}"
        ) from error
    names = [re.split(r"[.\[]", field)[0] for field in fields]
    wrong = [name for name in names if (known is not None and name not in known) or not name]
    if wrong:
        raise UserError(
            f"the template has a field {{{wrong[0]}}}, and there is no such thing",
            where=where,
            mend=f"use {', '.join(f'{{{name}}}' for name in known or ['observation'])}",
        )
    if "observation" not in names:
        raise UserError(
            "the template does not show the observation", where=where, mend="write {observation} where it belongs"
        )


def seed_of(row: Mapping[str, Any], column: str) -> int:
    """The seed of a row's episodes."""
    value = row.get(column)
    if value is None:
        content = json.dumps(dict(row), sort_keys=True, default=str)
        return xxhash.xxh3_64_intdigest(content.encode()) % 2**31
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"the column {column!r} holds {value!r}, which is no seed")
    return value
