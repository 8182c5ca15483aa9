"""Rows from Python: a sequence of dicts, given or returned by a function that a recipe names."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from strop.config.data import Columns, DataSource
from strop.data.columns import listed, nearest
from strop.data.fingerprints import rows_fingerprint
from strop.errors import DataError, StropError

COLUMN_ROWS = 1000
"""Columns are those of the first rows, so many."""


class RowsSource:
    """A sequence of dicts as a source.

    Raises:
        DataError: there are no rows, or one of the first is not a dict.
    """

    blocks = None

    def __init__(self, rows: Sequence[dict[str, Any]], *, name: str = "rows") -> None:
        self.mapping = Columns()
        self._rows = rows
        self._name = name
        if not len(rows):
            raise DataError("there are no rows", where=name, mend="Return at least one row.")
        columns: dict[str, None] = {}
        for i in range(min(len(rows), COLUMN_ROWS)):
            columns.update(dict.fromkeys(self[i]))
        self.columns = list(columns)
        self.fingerprint = rows_fingerprint(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        row = self._rows[i]
        if not isinstance(row, dict):
            raise DataError(
                f"the row is not a dict but {type(row).__name__}",
                where=self.location(i),
                mend='Each row must be a dict such as {"prompt": "...", "answer": "..."}.',
            )
        return row

    def location(self, i: int) -> str:
        return f"{self._name}, row {i} counted from 0"

    def describe(self) -> str:
        return f"Python {self._name}, {len(self):,} rows, columns {listed(self.columns)}"


def open_python(settings: DataSource) -> RowsSource:
    """Call `module:function` with `settings.arguments` and take the rows that it returns.

    The module may lie in the current folder or anywhere on the Python path.

    Raises:
        DataError: module or function cannot be imported, an argument does not fit, the function fails, or what it
            returns is not a sequence of dicts.
    """
    function = _imported(settings.path)
    _check_arguments(function, settings)
    try:
        rows = function(**settings.arguments)
        if hasattr(rows, "iloc"):  # a pandas frame, whose [i] is a column
            rows = rows.to_dict("records")
        elif not _is_sequence(rows) and isinstance(rows, Iterable) and not isinstance(rows, dict | str):
            rows = list(rows)
    except StropError:
        raise
    except Exception as error:
        raise DataError(
            f"{settings.path} failed: {type(error).__name__}: {error}",
            where=_last_frame(error),
            mend="Call it in Python with the same arguments to see the whole traceback.",
        ) from error
    if not _is_sequence(rows):
        raise DataError(
            f"{settings.path} returned {type(rows).__name__}, not a sequence of rows",
            where=settings.path,
            mend="Return a list of dicts.",
        )
    return RowsSource(rows, name=settings.path)


def row_id(index: int) -> str:
    """The stable name of a row: `row-000017` for index 17."""
    return f"row-{index:06d}"


def row_number(name: str) -> int:
    """The index of a row that `row_id` named."""
    return int(name.removeprefix("row-"))


def see_working_folder() -> None:
    """Let modules that lie in the working folder be imported; last, so that none hides an installed package."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _imported(path: str) -> Any:
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise DataError(f"{path!r} does not name a Python function", where=path, mend="Write it as `module:function`.")
    see_working_folder()
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(missing + "."):
            here = [file.stem for file in Path.cwd().glob("*.py")]
            raise DataError(
                f"the module {module_name!r} was found neither in {os.getcwd()} nor on the Python path",
                where=path,
                mend=nearest(module_name, here) or "Start strop in the folder that holds the module, or install it.",
            ) from error
        raise DataError(
            f"the module {module_name!r} needs {missing!r}, which is not installed",
            where=_last_frame(error),
            mend=f"Install {missing!r}.",
        ) from error
    except Exception as error:
        raise DataError(
            f"the module {module_name!r} cannot be imported: {type(error).__name__}: {error}",
            where=_last_frame(error),
            mend=f'Try it alone: python -c "import {module_name}"',
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        there = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise DataError(
            f"the module {module_name!r} has no function {name!r}",
            where=getattr(module, "__file__", None) or module_name,
            mend=nearest(name, there) or f"It has: {listed(there)}.",
        )
    return function


def _check_arguments(function: Any, settings: DataSource) -> None:
    try:
        signature = inspect.signature(function)
        signature.bind(**settings.arguments)
    except ValueError:
        return  # a built-in without a signature: the call itself will tell
    except TypeError as error:
        unknown = [key for key in settings.arguments if key not in signature.parameters]
        hint = nearest(unknown[0], signature.parameters) if unknown else ""
        problem = f"it has no argument {unknown[0]!r}" if unknown else str(error)
        raise DataError(
            f"the arguments do not fit {settings.path}: {problem}",
            where="arguments",
            mend=hint or f"It takes: {listed(signature.parameters)}.",
        ) from error


def _is_sequence(rows: Any) -> bool:
    return hasattr(rows, "__len__") and hasattr(rows, "__getitem__") and not isinstance(rows, dict | str | bytes)


def _last_frame(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
