"""What environments return is checked here, all of it, before anything is made of it: classes of users return what they
like, and what is wrong is an error of the one episode, told in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from strop.environments.driven import Driven
from strop.environments.protocol import Done, Message, Observation
from strop.environments.self_play import Move

ENVIRONMENT = ("reset", "step", "close")
MATCH = ("reset", "step", "rewards", "close")


class Malformed(Exception):
    """Something returned is not what it should be; the text goes on behind the name of the method."""


def environment(found: Any, methods: Sequence[str] = ENVIRONMENT) -> Any:
    """An environment or a match, as a factory or `fork` returned it."""
    hasattr(found, "ready")  # asked for later, by those who do not expect a `__getattr__` to raise
    if hasattr(found, "drive"):
        methods = ("drive", "close")
    for method in methods:
        if not callable(getattr(found, method, None)):
            raise Malformed(f"returned {_kind(found)}, which has no method `{method}`")
    return found


def opening(found: Any) -> list[Message] | None:
    """What `reset` of an environment returned."""
    if found is None:
        return None
    read = _messages(found, "returned", assistant=True)
    if not read:
        raise Malformed("returned no messages; None stands for the prompt as the data has it")
    if read[-1]["role"] == "assistant":
        raise Malformed("returned messages of which the last is the assistant's, whose turn is next")
    return read


def answer(found: Any) -> Observation | Done:
    """What `step` of an environment returned."""
    if isinstance(found, Done):
        return _done(found)
    if not isinstance(found, Observation):
        raise Malformed(f"returned {_kind(found)}, and no Observation or Done")
    turn = None if found.turn is None else _message(found.turn, "returned an Observation whose turn is")
    return replace(
        found,
        messages=_messages(found.messages, "returned an Observation whose messages are"),
        reward=_number(found.reward, "returned an Observation whose reward is"),
        turn=turn,
    )


def move(found: Any, roles: Sequence[str], begun: Sequence[str] = ()) -> Move:
    """A move of a match. begun: the roles that have had a turn."""
    if not isinstance(found, Move):
        raise Malformed(f"returned {_kind(found)}, and no Move")
    if not isinstance(found.role, str) or found.role not in roles:
        raise Malformed(f"returned a Move for which there is no role {found.role!r} among {', '.join(roles)}")
    first = found.role not in begun
    messages = _messages(found.messages, "returned a Move whose messages are", assistant=first)
    if messages and messages[-1]["role"] == "assistant":
        raise Malformed("returned a Move of whose messages the last is the assistant's, whose turn is next")
    return replace(found, messages=messages, reward=_number(found.reward, "returned a Move whose reward is"))


def move_or_done(found: Any, roles: Sequence[str], begun: Sequence[str]) -> Move | Done:
    """What `step` of a match returned."""
    if isinstance(found, Done):
        return _done(found)
    if not isinstance(found, Move):
        raise Malformed(f"returned {_kind(found)}, and no Move or Done")
    return move(found, roles, begun)


def rewards(found: Any, roles: Sequence[str]) -> dict[str, float]:
    """What `rewards` of a match returned; a role may be left out."""
    if not isinstance(found, Mapping):
        raise Malformed(f"returned {_kind(found)}, and no rewards by role")
    checked = {}
    for role in found:
        if role not in roles:
            raise Malformed(f"returned a reward for {role!r}, which is no role")
        number = _number(found[role], f"returned for {role!r}")
        if number is None:
            raise Malformed(f"returned for {role!r} None, and no number")
        checked[role] = number
    return checked


def driven(found: Any) -> Driven:
    """What `drive` returned."""
    if not isinstance(found, Driven):
        raise Malformed(f"returned {_kind(found)}, and no Driven")
    if found.finish not in ("stop", "length"):
        raise Malformed(f"returned the finish {found.finish!r}, which is neither stop nor length")
    paths = [
        replace(
            path,
            tokens=[int(token) for token in path.tokens],
            prompt=int(path.prompt),
            trained=[bool(mark) for mark in path.trained],
            reward=_number(path.reward, "returned a path whose reward is"),
        )
        for path in found.paths
    ]
    return replace(
        found,
        paths=paths,
        text=None if found.text is None else _text(found.text, "returned a text that is"),
        messages=[_message(one, "returned a message that is", bare=True) for one in found.messages],
        reward=_number(found.reward, "returned a reward that is"),
        error=_error(found.error),
    )


def _done(found: Done) -> Done:
    reward = _number(found.reward, "returned a Done whose reward is")
    return Done(_error(found.error), reward, bool(found.truncated))


def _error(found: Any) -> str | None:
    """What went wrong, as a text: many will give the exception itself."""
    if isinstance(found, BaseException):
        return f"{type(found).__name__}: {found}"
    return None if found is None else str(found)


def _number(found: Any, said: str) -> float | None:
    if found is None:
        return None
    if isinstance(found, (str, bytes)):
        raise Malformed(f"{said} {_kind(found)}, and no number")
    try:
        number = float(found)
    except Exception as error:
        raise Malformed(f"{said} {_kind(found)}, and no number") from error
    if not math.isfinite(number):
        raise Malformed(f"{said} {number}, and no finite number")
    return number


def _messages(found: Any, said: str, *, assistant: bool = False) -> list[Message]:
    """assistant: whether turns of the assistant may be among them, as examples."""
    if not isinstance(found, (list, tuple)):
        raise Malformed(f"{said} {_kind(found)}, and no list of messages")
    read = [_message(message, f"{said} a list whose item {number} is") for number, message in enumerate(found)]
    for number, message in enumerate(read):
        if message["role"] == "assistant" and not assistant:
            raise Malformed(f"{said} a list whose item {number} is the assistant's: only the policy speaks for it")
    return read


def _message(found: Any, said: str, *, bare: bool = False) -> Message:
    """bare: whether it is only shown, so that its content may be what it likes."""
    if not isinstance(found, Mapping):
        raise Malformed(f"{said} {_kind(found)}, and no message such as {{'role': 'user', 'content': 'Go on.'}}")
    message = dict(found)
    for key in () if bare else ("role", "content"):
        if key not in message:
            raise Malformed(f"{said} a message without `{key}`")
        _text(message[key], f"{said} a message whose {key} is")
    _encodable(message, said)
    return message


def _text(found: Any, said: str) -> str:
    if not isinstance(found, str):
        raise Malformed(f"{said} {_kind(found)}, and no text")
    _encodable(found, said)
    return found


def _encodable(found: Any, said: str) -> None:
    """Refuse texts that are no Unicode, however deep they are inside: no tokenizer reads them, no file holds them."""
    if isinstance(found, str):
        try:
            found.encode("utf-8")
        except UnicodeEncodeError as error:
            raise Malformed(f"{said} no Unicode text: it holds {found[error.start]!r}, half of a character") from None
    elif isinstance(found, Mapping):
        for key, value in found.items():
            _encodable(key, said)
            _encodable(value, said)
    elif isinstance(found, (list, tuple)):
        for value in found:
            _encodable(value, said)


def _kind(found: Any) -> str:
    """A thing, by what it is: None, a dict, an object of the user's."""
    if found is None:
        return "None"
    name = type(found).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"
