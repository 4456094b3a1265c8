from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastfedul.errors import InvalidInputError
from fastfedul.strict_json import parse

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner),
    max_leaves=12,
)


@given(value=VALUES, indent=st.integers(0, 3))
def test_what_was_written_is_read_back(value: Any, indent: int) -> None:
    loose = json.dumps(value, indent=indent, ensure_ascii=bool(indent % 2))
    found = parse(loose)
    assert found == value
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"a": 1, "a": 1}',
        "NaN",
        "[Infinity]",
        "1e999",
        "9" * 5000,
        '"\\ud800"',
        '{"\\udfff": 1}',
        "[" * 100_000,
    ],
)
def test_what_can_be_understood_in_two_ways_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("9007199254740991", 9007199254740991),
        ("9007199254740993", 9007199254740992.0),
        ("-0", 0),
    ],
)
def test_a_large_integer_is_read_as_the_double_that_it_is(
    text: str, value: float
) -> None:
    found = parse(text)
    assert (found, type(found)) == (value, type(value))
