"""Errors that a user reads: what is wrong, where, and how to mend it.

A `UserError` is the user's to mend (the command line exits 2 and has written nothing); a `RunFailure` is something
that went wrong while running (exit 1, what was saved is kept).
"""

from __future__ import annotations

from typing import Any


class StropError(Exception):
    """Base of every error strop raises on purpose.

    Args:
        what: one sentence that says what is wrong.
        where: the file, line, key path or function at fault; empty when there is none.
        mend: one sentence that says what to do about it.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", mend: str = "") -> None:
        self.what = what
        self.where = where
        self.mend = mend
        super().__init__(self.block())

    def __reduce__(self) -> tuple[Any, ...]:
        # Classes below take other arguments; errors of another process must arrive as what they were.
        return _again, (type(self), self.args), self.__dict__

    def block(self) -> str:
        """The error as the command line prints it, without a traceback."""
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.mend:
            lines.append(f"  mend:  {self.mend}")
        return "\n".join(lines)


def _again(kind: type[StropError], args: tuple[Any, ...]) -> StropError:
    """An error as it was, made without its `__init__`."""
    error: StropError = kind.__new__(kind, *args)
    return error


class UserError(StropError):
    """A mistake that the user can mend before anything runs; the command line exits with 2."""

    exit_code = 2


class ConfigError(UserError):
    """One or more problems in a recipe or an override; `problems` holds them all."""

    def __init__(self, problems: list[UserError]) -> None:
        self.problems = problems
        super().__init__(problems[0].what, where=problems[0].where, mend=problems[0].mend)

    def block(self) -> str:
        blocks = [UserError.block(problem) for problem in self.problems]
        if len(blocks) == 1:
            return blocks[0]
        return f"{len(blocks)} problems:\n" + "\n".join(blocks)


class DataError(UserError):
    """A dataset that cannot be read or does not hold what the recipe asks of it."""


class ModelError(UserError):
    """A model folder or tokenizer that cannot be used as asked."""


class MissingExtra(UserError):
    """An optional dependency that is not installed."""

    def __init__(self, package: str, *, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed",
            mend=f"pip install 'strop[{extra}]'",
        )


class RunFailure(StropError):
    """Something failed while running; the last checkpoint is kept and the command line exits with 1."""
