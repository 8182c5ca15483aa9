"""Plain data: what is written is read again as it was, and nothing else can be made by what is read."""

from __future__ import annotations

import collections
import datetime
import enum
import json
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.sandbox.inside.plain import NotPlain, dumps, loads

KEYS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters(codec=None)),
    st.binary(),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.dates(),
    st.datetimes().map(lambda moment: moment.replace(fold=0)),
    st.timedeltas(),
    st.tuples(st.integers(), st.text()),
)
VALUES = st.recursive(
    st.one_of(
        KEYS, st.complex_numbers(allow_nan=False), st.integers(min_value=10**50), st.builds(bytearray, st.binary())
    ),
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(KEYS, inner),
        st.sets(KEYS),
        st.frozensets(KEYS),
    ),
    max_leaves=20,
)


def shape(value: Any) -> Any:
    """A value with the types of everything in it: 1, 1.0 and True are equal, and are not the same."""
    if isinstance(value, list | tuple):
        return type(value), [shape(item) for item in value]
    if isinstance(value, dict):
        return dict, [(shape(key), shape(item)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return type(value), sorted(map(repr, value))
    return type(value), repr(value)


@given(VALUES)
def test_what_is_written_is_read_again(value: Any) -> None:
    assert shape(loads(dumps(value))) == shape(value)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_read_again(number: float) -> None:
    assert repr(loads(dumps([number]))) == repr([number])


class Colour(enum.IntEnum):
    RED = 3


class Loud(str):
    def __str__(self) -> str:
        return "other"

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (collections.OrderedDict(a=1), {"a": 1}),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (collections.defaultdict(list, {1: [2]}), {1: [2]}),
        (collections.deque([1, 2]), [1, 2]),
        (Colour.RED, 3),
        (Loud("text"), "text"),
        (np.float64(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
    ],
)
def test_subclasses_and_arrays_become_what_they_derive_from(value: Any, expected: Any) -> None:
    found = loads(dumps(value))
    assert shape(found) == shape(expected)


@pytest.mark.parametrize("value", [object(), len, (n for n in []), json, type, range(3)])
def test_what_is_not_plain_is_refused(value: Any) -> None:
    with pytest.raises(NotPlain, match="not plain data"):
        dumps([value])


def test_circles_and_depth_are_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(NotPlain, match="circle"):
        dumps(circle)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing",
        "[" * 100_000,
        '{"dict": [[{"dict": []}, 1]]}',
        '{"set": [[1]]}',
        '{"call": "os.system"}',
        '{"other": 1}',
        '{"tuple": 5}',
        '{"dict": [[1, 2, 3]]}',
        '{"int": "zz"}',
        '{"int": 5}',
        '{"float": "1e5"}',
        '{"bytes": "xx"}',
        '{"fraction": [1, 0]}',
        '{"fraction": [1, "a"]}',
        '{"decimal": "one"}',
        '{"datetime": "yesterday"}',
        '{"timedelta": [1e300, 0, 0]}',
        '{"list": [], "set": []}',
        "{}",
        "1" * 5000,
        json.dumps({"decimal": "1" * 10_000}),
        json.dumps({"fraction": [{"int": "f" * 9000}, 3]}),
    ],
)
def test_what_was_not_written_here_is_refused(text: str) -> None:
    with pytest.raises(NotPlain):
        loads(text)


def test_long_numbers_are_read_in_linear_time() -> None:
    assert loads(dumps(10**100_000)) == 10**100_000
    assert loads(dumps([Fraction(1, 3), Decimal("1e-7")])) == [Fraction(1, 3), Decimal("1e-7")]
    assert loads(dumps(datetime.date(2024, 2, 29))) == datetime.date(2024, 2, 29)
