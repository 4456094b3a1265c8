from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastfedul.canonical_json import encode, parse
from fastfedul.errors import InvalidInputError

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


@pytest.mark.parametrize(
    ("bits", "text"),
    [
        # Appendix B of RFC 8785.
        (0x0000000000000000, "0"),
        (0x8000000000000000, "0"),
        (0x0000000000000001, "5e-324"),
        (0x8000000000000001, "-5e-324"),
        (0x7FEFFFFFFFFFFFFF, "1.7976931348623157e+308"),
        (0x4340000000000000, "9007199254740992"),
        (0xC340000000000000, "-9007199254740992"),
        (0x4430000000000000, "295147905179352830000"),
        (0x44B52D02C7E14AF5, "9.999999999999997e+22"),
        (0x44B52D02C7E14AF6, "1e+23"),
        (0x44B52D02C7E14AF7, "1.0000000000000001e+23"),
        (0x444B1AE4D6E2EF4E, "999999999999999700000"),
        (0x444B1AE4D6E2EF50, "1e+21"),
        (0x3EB0C6F7A0B5ED8C, "9.999999999999997e-7"),
        (0x3EB0C6F7A0B5ED8D, "0.000001"),
        (0x41B3DE4355555553, "333333333.3333332"),
        (0xBECBF647612F3696, "-0.0000033333333333333333"),
    ],
)
def test_numbers_are_written_as_the_standard_says(bits: int, text: str) -> None:
    [number] = struct.unpack(">d", bits.to_bytes(8, "big"))
    assert encode(number).decode() == text


def test_members_are_sorted_by_utf_16_and_text_is_escaped_least() -> None:
    # Section 3.2.3 of RFC 8785.
    names = ["\u20ac", "\r", "\ufb33", "1", "\U0001f600", "\u0080", "\u00f6"]
    ordered = ["\r", "1", "\u0080", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]
    assert list(json.loads(encode(dict.fromkeys(names, 1)))) == ordered
    assert encode('€$\x0f\nA\'B"\\\\"/').decode() == '"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"'


def test_the_example_of_the_standard_comes_out_byte_for_byte() -> None:
    # Sections 3.2.2 and 3.2.4 of RFC 8785.
    text = (
        '{"numbers": [333333333.33333329, 1E30, 4.50, 2e-3,'
        " 0.000000000000000000000000001],"
        r""""string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/","""
        '"literals": [null, true, false]}'
    )
    expected = (
        '{"literals":[null,true,false],'
        '"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
        r""""string":"€$\u000f\nA'B\"\\\\\"/"}"""
    )
    assert encode(parse(text)) == expected.encode()


@given(value=VALUES)
def test_what_was_encoded_is_read_back_and_encoded_the_same(value: Any) -> None:
    text = encode(value).decode()
    found = parse(text)
    assert encode(found).decode() == text
    assert found == value


@given(value=VALUES, indent=st.integers(0, 3))
def test_white_space_and_order_make_no_difference(value: Any, indent: int) -> None:
    loose = json.dumps(value, indent=indent, ensure_ascii=bool(indent % 2))
    assert encode(parse(loose)) == encode(value)


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


def test_no_number_of_json_is_refused() -> None:
    for number in (math.nan, math.inf):
        with pytest.raises(InvalidInputError):
            encode([number])
    for value in (2**53, -(2**53), 10**5000, {"a": b"bytes"}, {1: "a"}, "\ud800"):
        with pytest.raises(InvalidInputError) as caught:
            encode(value)
        assert "\n" not in str(caught.value)


def test_nesting_without_end_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(InvalidInputError, match="nested too deeply"):
        encode(value)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("9007199254740991", "9007199254740991"),
        ("9007199254740992", "9007199254740992"),
        ("9007199254740993", "9007199254740992"),
        ("-0", "0"),
        ("1E400", None),
        ("1" + "0" * 400, None),
    ],
)
def test_a_large_integer_is_read_as_the_double_that_it_is(
    text: str, canonical: str | None
) -> None:
    if canonical is None:
        with pytest.raises(InvalidInputError):
            parse(text)
    else:
        assert encode(parse(text)).decode() == canonical
