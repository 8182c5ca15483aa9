"""Values as plain data: what crosses from one process to another, as JSON that says the type.

Reading it makes objects of Python's own types only, whatever was written. Nothing here may be trusted to have been
written by the encoder below: the program at the other end can write what it likes.
"""

from __future__ import annotations

import datetime
import fractions
import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

DEEPEST = 200
"""Levels of nesting that are written and read."""
LONGEST_NUMBER = 5000
"""Digits of a decimal number, and about those of a fraction's parts, that are read."""
_SMALL = 1 << 53
"""Whole numbers below this are written as JSON numbers; longer ones in hexadecimal, which is read in linear time."""

_EXACT = frozenset({type(None), bool, int, float, str, list, tuple, dict, set, frozenset, bytes})
ENCODABLE = (
    int, float, str, list, tuple, dict, set, frozenset, bytes, bytearray, complex, Decimal, fractions.Fraction,
    datetime.date, datetime.time, datetime.timedelta,
)  # fmt: skip
"""Types that are written, with their subclasses."""

Other = Callable[[Any], Any]
"""What to write for (or make of) a value that is not plain; None: write it as the plain type that it derives from."""


class NotPlain(ValueError):
    """A value that has no plain form, or a text that is none."""


def dumps(value: Any, other: Other | None = None) -> str:
    """A value as text.

    Subclasses of Python's types are written as those types, arrays as lists. `other` is asked about everything that is
    not exactly of one of the commonest types.

    Raises:
        NotPlain: it holds something without a plain form, or is nested too deeply.
    """
    return json.dumps(encode(value, other), separators=(",", ":"))


def loads(text: str, other: Other | None = None) -> Any:
    """The value of a text that `dumps` wrote.

    Raises:
        NotPlain: nothing that `dumps` writes.
    """
    try:
        return decode(json.loads(text), other)
    except (RecursionError, TypeError, KeyError, ValueError, ArithmeticError) as error:
        raise NotPlain(f"not plain data: {type(error).__name__}") from None


def encode(value: Any, other: Other | None = None, depth: int = 0) -> Any:
    """A value as what `json.dumps` takes; see `dumps`."""
    if depth > DEEPEST:
        raise NotPlain("nested too deeply, or in a circle")
    if value is None or value is True or value is False:
        return value
    if other is not None and type(value) not in _EXACT and (data := other(value)) is not None:
        return {"other": data}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        whole = int.__int__(value)
        return whole if -_SMALL < whole < _SMALL else {"int": format(whole, "x")}
    if isinstance(value, float):
        number = float.__float__(value)
        return number if math.isfinite(number) else {"float": repr(number)}
    if isinstance(value, list):
        return [encode(item, other, depth + 1) for item in list.__iter__(value)]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, other, depth + 1) for item in tuple.__iter__(value)]}
    if isinstance(value, dict):
        return {"dict": [[encode(part, other, depth + 1) for part in item] for item in dict.items(value)]}
    return _encode_rare(value, other, depth)


def _encode_rare(value: Any, other: Other | None, depth: int) -> Any:
    if isinstance(value, set | frozenset):
        name = "set" if isinstance(value, set) else "frozenset"
        return {name: [encode(item, other, depth + 1) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {"bytes" if isinstance(value, bytes) else "bytearray": value.hex()}
    if isinstance(value, complex):
        return {"complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, Decimal):
        return {"decimal": str(value)}
    if isinstance(value, fractions.Fraction):
        return {"fraction": [encode(value.numerator), encode(value.denominator)]}
    for kind in (datetime.datetime, datetime.date, datetime.time):
        if isinstance(value, kind):
            return {kind.__name__: value.isoformat()}
    if isinstance(value, datetime.timedelta):
        return {"timedelta": [value.days, value.seconds, value.microseconds]}
    kind_name = f"{type(value).__module__}.{type(value).__name__}"
    if kind_name == "collections.deque":
        return [encode(item, other, depth + 1) for item in value]
    if kind_name.startswith("numpy.") and hasattr(value, "tolist"):
        return encode(value.tolist(), other, depth + 1)
    raise NotPlain(f"a {type(value).__name__} is not plain data")


def decode(data: Any, other: Other | None = None) -> Any:
    """The value of what `json.loads` gave; see `loads`."""
    if isinstance(data, list):
        return [decode(item, other) for item in data]
    if not isinstance(data, dict):
        return data
    [(kind, content)] = data.items()
    if kind == "other":
        if other is None:
            raise ValueError("not plain")
        return other(content)
    reader = _READERS.get(kind)
    if reader is not None:
        return reader(content)
    if kind == "dict":
        return {_hashable(decode(key, other)): decode(value, other) for key, value in content}
    if kind in ("set", "frozenset"):
        members = [_hashable(decode(item, other)) for item in content]
        return set(members) if kind == "set" else frozenset(members)
    if kind == "tuple":
        return tuple(decode(item, other) for item in content)
    raise ValueError(kind)


def _hashable(value: Any) -> Any:
    hash(value)
    return value


def _hexadecimal(content: Any) -> int:
    return int(_text(content), 16)


def _text(content: Any) -> str:
    if not isinstance(content, str):
        raise ValueError("not a text")
    return content


def _decimal(content: Any) -> Decimal:
    text = _text(content)
    if len(text) > LONGEST_NUMBER:
        raise ValueError("too long")
    return Decimal(text)


def _fraction(content: Any) -> fractions.Fraction:
    above, below = (decode(part) for part in content)
    if (
        not isinstance(above, int)
        or not isinstance(below, int)
        or max(above.bit_length(), below.bit_length()) > 4 * LONGEST_NUMBER
    ):
        raise ValueError("not a fraction")
    return fractions.Fraction(above, below)


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "int": _hexadecimal,
    "float": lambda content: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[content],
    "bytes": lambda content: bytes.fromhex(_text(content)),
    "bytearray": lambda content: bytearray.fromhex(_text(content)),
    "complex": lambda content: complex(*(float(decode(part)) for part in content)),
    "decimal": _decimal,
    "fraction": _fraction,
    "datetime": lambda content: datetime.datetime.fromisoformat(_text(content)),
    "date": lambda content: datetime.date.fromisoformat(_text(content)),
    "time": lambda content: datetime.time.fromisoformat(_text(content)),
    "timedelta": lambda content: datetime.timedelta(*(int(part) for part in content)),
}
