"""A function of the user's that chooses some of a number of groups."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from typing import Any

from strop.config.window import PastSettings
from strop.errors import RunFailure, UserError
from strop.rewards.failures import describe_exception, shorten
from strop.rewards.python import load_function


class OwnChoice:
    """Calls `function(groups, count, …)`, which returns the numbers of so many of the groups, each once.

    Args:
        path: `module:function`. where: the key that names it. takes: names of its arguments, for the message.

    Raises:
        UserError: it cannot be imported, or not be called with these arguments.
    """

    def __init__(self, path: str, *, where: str, takes: tuple[str, ...]) -> None:
        self._path, self._where = path, where
        self._function = load_function(path, where=where)
        form = f"{path.partition(':')[2]}({', '.join(takes)})"
        if inspect.iscoroutinefunction(self._function):
            raise UserError(f"{path!r} is an async function", where=where, mend=f"make it a plain one: def {form}")
        try:
            inspect.signature(self._function).bind(*takes)
        except TypeError as error:
            raise UserError(
                f"{path!r} cannot be called as {form}: {error}", where=where, mend=f"write it as def {form}"
            ) from None
        except ValueError:  # Some builtins have no signature.
            pass

    def __call__(self, known: Collection[int], count: int, *arguments: Any) -> list[int]:
        """What the function chooses of the numbers that are known, called with `arguments`.

        Raises:
            RunFailure: it failed, or returned anything else.
        """
        try:
            returned = self._function(*arguments)
        except Exception as error:
            code = getattr(inspect.unwrap(self._function), "__code__", None)
            told = describe_exception(error, file=getattr(code, "co_filename", None))
            raise self._wrong(f"failed: {told}", "mend the function") from error
        mend = f"return a list of {count} of the numbers of the groups it was given (group.number), each once"
        shown = shorten(repr(returned), 80)
        if not isinstance(returned, Iterable) or isinstance(returned, str | bytes):
            raise self._wrong(f"returned {shown} ({type(returned).__name__})", mend)
        found = [as_number(item) for item in returned]
        for item in found:
            if item is None or item not in known:
                raise self._wrong(f"returned {shown}, of which not everything is the number of a group", mend)
        chosen = [item for item in found if item is not None]
        if len(set(chosen)) < len(chosen):
            raise self._wrong(f"returned {shown}, which has a group twice", mend)
        if len(chosen) != count:
            raise self._wrong(f"returned {len(chosen)} groups, and {count} were asked for", mend)
        return chosen

    def _wrong(self, what: str, mend: str) -> RunFailure:
        return RunFailure(f"the function {self._path!r} {what}", where=self._where, mend=mend)


def own_select(settings: PastSettings) -> OwnChoice | None:
    """The function that `rollout.window.past.select` names; None where it names none.

    Raises:
        UserError: it cannot be imported or called.
    """
    if ":" not in settings.select:
        return None
    return OwnChoice(settings.select, where="rollout.window.past.select", takes=("groups", "count", "rng"))


def as_number(item: Any) -> int | None:
    """A whole number of Python's or NumPy's; None for anything else."""
    if isinstance(item, bool) or not hasattr(item, "__index__"):
        return None
    return int(item.__index__())
