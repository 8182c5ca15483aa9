"""The inputs of `call` and `check` jobs, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strop.sandbox.inside import plain


def call_input(entry: str, arguments: Sequence[Any], keywords: Mapping[str, Any] | None = None) -> str:
    """One call of a function.

    Args:
        entry: its name; `Class.method` is called on `Class()`.
        arguments, keywords: plain data; see `inside/plain.py`.

    Raises:
        plain.NotPlain: an argument is not plain data.
    """
    given = {"arguments": plain.dumps(list(arguments)), "keywords": plain.dumps(dict(keywords or {}))}
    return json.dumps({"entry": entry, **given})


def value_of(value: str) -> Any:
    """What a call returned.

    Raises:
        plain.NotPlain: nothing was returned that is plain data.
    """
    return plain.loads(value)


def check_input(code: str, entry: str = "") -> str:
    """One test: code that is run after the job's `source`, in the same names.

    Args:
        code: it passes if it raises nothing.
        entry: function of the program that it gets under its own name and as `candidate`.
    """
    return json.dumps({"test": code, "entry": entry})


@dataclass(frozen=True)
class Checked:
    """What became of one test of a `check` job. fault: what is wrong with the test itself."""

    passed: bool
    detail: str = ""
    fault: str = ""


def checked(value: str) -> Checked:
    """What a run of a test wrote; not passed where it wrote nothing, because it did not come to its end."""
    try:
        data = json.loads(value)
        return Checked(data["passed"] is True, str(data.get("detail", "")), str(data.get("fault", "")))
    except (ValueError, LookupError, TypeError, RecursionError):
        return Checked(passed=False)
