"""`python`: any function of the user's, with the signature that TRL's reward functions have."""

from __future__ import annotations

import asyncio
import difflib
import importlib
import inspect
import math
import numbers
import os
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from operator import attrgetter
from typing import Any

from strop.config.rewards import PythonVerifier
from strop.errors import RunFailure, UserError
from strop.rewards.failures import describe_exception, shorten
from strop.rewards.protocol import Completed, Verdict

_OF_TRAINERS = ("trainer_state", "log_extra", "log_metric", "environments")
"""What TRL's trainer gives a function beside the data; here is no such trainer."""
_NUMBERS = (float, numbers.Real, Decimal)
"""What a number may be: first what most are."""
_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def load_function(path: str, *, where: str) -> Callable[..., Any]:
    """Import `module:function`, from the working folder first and then from the Python path.

    Raises:
        UserError: the path has another form, or the module or the function cannot be imported.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not name or not all(part.isidentifier() for part in module_name.split(".")):
        suggestion = module_name.removesuffix(".py").replace("/", ".").strip(".") or "rewards"
        raise UserError(
            f"{path!r} does not name a function",
            where=where,
            mend=f"write it as module:function, such as {suggestion}:{name or 'reward'}",
        )
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise _broken_module(module_name, error, where) from error
        raise UserError(
            f"the module {module_name!r} of {path!r} was not found",
            where=where,
            mend=f"start strop in the folder that holds {module_name.replace('.', '/')}.py, "
            f"or put that folder on PYTHONPATH",
        ) from None
    except (Exception, SystemExit) as error:
        raise _broken_module(module_name, error, where) from error
    try:
        function = attrgetter(name)(module)
    except AttributeError:
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(name, functions, n=1, cutoff=0.0)
        raise UserError(
            f"the module {module_name!r} ({getattr(module, '__file__', 'built in')}) has no function {name!r}",
            where=where,
            mend=f"the nearest name in it is {near[0]!r}" if near else "it holds no function at all",
        ) from None
    if not callable(function):
        raise UserError(
            f"{path!r} is a {type(function).__name__}, and cannot be called",
            where=where,
            mend="name a function or a class in that module",
        )
    return function


def _broken_module(module_name: str, error: BaseException, where: str) -> UserError:
    return UserError(
        f"importing the module {module_name!r} failed: {describe_exception(error)}",
        where=where,
        mend=f"mend the module; `python -c 'import {module_name}'` shows the whole traceback",
    )


class PythonFunction:
    """Calls `function(prompts=…, completions=…, completion_ids=…, **columns)` and takes its list of numbers.

    Every column of the rows is passed as a list of its own name, None where a row lacks it; `answer` is the answer
    column whatever the data calls it. A function without `**kwargs` gets what it has parameters for. Where the prompt
    is a list of messages, the completion is one too: `[{"role": "assistant", "content": text}]`, or of an episode of
    several turns all that followed the prompt. An `async def` runs in an event loop of its own for each call.

    None for a completion says that the function does not apply to it. NaN or infinity is a verifier error of that
    completion; an exception is one of all completions of the call.

    Args:
        settings: the function and more keyword arguments for it, which win over columns of the same name.
        where: key path of the settings, for messages.

    Raises:
        UserError: the function cannot be imported or cannot be called like this.

    Source: the reward functions of TRL's GRPOTrainer.
    """

    def __init__(self, settings: PythonVerifier, *, where: str = "rewards.verifiers") -> None:
        self.name = settings.name or settings.kind
        self.path = settings.function
        self.arguments = settings.arguments
        self._alone = settings.call_with == "completion"
        self.function = load_function(settings.function, where=f"{where}.function")
        self.accepted, self.required = self._read_signature(where)
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        self.file: str | None = getattr(code, "co_filename", None)

    def verify(self, completed: Sequence[Completed]) -> list[Verdict]:
        """One verdict for each completion, in order.

        Raises:
            RunFailure: the function needs a column that the rows lack, or returns something other than one number or
                None for each completion.
        """
        if self._alone:
            return [verdict for item in completed for verdict in self._call([item])]
        return self._call(completed)

    def _call(self, completed: Sequence[Completed]) -> list[Verdict]:
        if not completed:
            return []
        keywords = self._keywords(completed)
        try:
            returned = self.function(**keywords)
            if inspect.isawaitable(returned):
                returned = asyncio.run(_result_of(returned))
        except (Exception, SystemExit) as error:
            detail = f"{self.path}: {describe_exception(error, file=self.file)}"
            return [Verdict(None, "verifier_error", detail) for _ in completed]
        return [self._verdict(item, index) for index, item in enumerate(self._as_list(returned, len(completed)))]

    def _read_signature(self, where: str) -> tuple[frozenset[str] | None, tuple[str, ...]]:
        """Names of the parameters that can be given (None: any), and of those that must be."""
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):  # Some builtins have no signature.
            return None, ()
        for parameter in parameters:
            if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
                raise UserError(
                    f"{self.path!r} takes {parameter.name!r} by position only; rewards are called by keyword",
                    where=f"{where}.function",
                    mend="take prompts, completions and columns as keyword arguments",
                )
        named = [parameter for parameter in parameters if parameter.kind in _KEYWORD]
        for parameter in named:
            if parameter.name in _OF_TRAINERS and parameter.default is parameter.empty:
                raise UserError(
                    f"{self.path!r} takes {parameter.name!r}, which only TRL's own trainer has",
                    where=f"{where}.function",
                    mend=f"give the parameter a default: `{parameter.name}=None`",
                )
        any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        accepted = None if any_name else frozenset(parameter.name for parameter in named)
        for key in self.arguments:
            if key in _GIVEN or (accepted is not None and key not in accepted):
                reason = "is filled by strop" if key in _GIVEN else f"is not a parameter of {self.path!r}"
                raise UserError(
                    f"the argument {key!r} {reason}",
                    where=f"{where}.arguments.{key}",
                    mend=f"the function's parameters are {', '.join(p.name for p in named) or 'none'}",
                )
        return accepted, tuple(parameter.name for parameter in named if parameter.default is parameter.empty)

    def _keywords(self, completed: Sequence[Completed]) -> dict[str, Any]:
        names = {name: None for item in completed for name in item.row}
        columns: dict[str, Any] = {name: [item.row.get(name) for item in completed] for name in names}
        # As in TRL, the text columns travel under their plural names only.
        for name in ("prompt", "completion"):
            columns.pop(name, None)
        if "answer" not in columns and any(item.answer is not None for item in completed):
            columns["answer"] = [item.answer for item in completed]
        columns |= self.arguments
        columns |= {name: given(completed) for name, given in _GIVEN.items() if self._takes(name)}
        lacking = [name for name in self.required if name not in columns]
        if lacking:
            known = list(columns | _GIVEN)
            near = difflib.get_close_matches(lacking[0], known, n=1)
            raise RunFailure(
                f"{self.path!r} has a parameter {lacking[0]!r}, and the data has no such column",
                where=f"reward function {self.path}",
                mend=(f"did you mean {near[0]!r}? " if near else "")
                + f"it can have {', '.join(known)}; give the parameter a default if only some rows have the column",
            )
        return {name: value for name, value in columns.items() if self._takes(name)}

    def _takes(self, name: str) -> bool:
        return self.accepted is None or name in self.accepted

    def _as_list(self, returned: Any, expected: int) -> list[Any]:
        items = returned
        if getattr(returned, "ndim", None) == 1 and hasattr(returned, "tolist"):  # numpy, torch
            items = returned.tolist()
        if not isinstance(items, list | tuple):
            raise self._wrong(f"returned a {type(returned).__name__} ({shorten(repr(returned), 80)})", expected)
        if len(items) != expected:
            raise self._wrong(f"returned {len(items)} numbers for {expected} completions", expected)
        return list(items)

    def _verdict(self, item: Any, index: int) -> Verdict:
        if item is None:
            return Verdict(None)
        if type(item) is float and math.isfinite(item):
            return Verdict(item)
        value = item
        if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            value = value.item()
        if not isinstance(value, _NUMBERS):
            raise self._wrong(
                f"returned {shorten(repr(item), 80)} ({type(item).__name__}) for completion {index}", None
            )
        try:
            score = float(value)
        except OverflowError:
            score = math.inf
        if not math.isfinite(score):
            return Verdict(None, "verifier_error", f"{self.path} returned {shorten(repr(item), 80)}")
        return Verdict(score)

    def _wrong(self, what: str, expected: int | None) -> RunFailure:
        count = "one number or None for each completion" if expected is None else f"a list of {expected} numbers"
        return RunFailure(
            f"the reward function {self.path!r} {what}; expected {count}",
            where=f"reward function {self.path}" + (f" ({self.file})" if self.file else ""),
            mend="return a list with one number for each completion, in order; None where the reward does not apply",
        )


def _messages_behind(item: Completed) -> list[dict[str, Any]]:
    """The messages that followed a prompt of messages."""
    given, messages = list(item.prompt), [dict(message) for message in item.messages]
    if not messages:
        return [{"role": "assistant", "content": item.completion}]
    # A system message may stand before the prompt, and an environment may have replaced all of it.
    for start in (0, 1):
        if messages[start : start + len(given)] == given:
            return messages[start + len(given) :]
    first = next((at for at, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
    return messages[first:]


# A function may write into what it is given; messages are shared by a whole group, so it gets its own.


def _prompts(completed: Sequence[Completed]) -> list[Any]:
    return [
        item.prompt if isinstance(item.prompt, str) else [dict(message) for message in item.prompt]
        for item in completed
    ]


def _completions(completed: Sequence[Completed]) -> list[Any]:
    return [item.completion if isinstance(item.prompt, str) else _messages_behind(item) for item in completed]


def _completion_ids(completed: Sequence[Completed]) -> list[Any]:
    return [item.own_ids() for item in completed]


_GIVEN = {"prompts": _prompts, "completions": _completions, "completion_ids": _completion_ids}
"""What a function is given beside the columns."""


async def _result_of(awaitable: Any) -> Any:
    return await awaitable
