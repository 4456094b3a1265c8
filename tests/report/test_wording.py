"""Numbers read well, and no name can break a line or a page."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastfedul.report.wording import (
    shorten,
    show_bytes,
    show_count,
    show_distance,
    show_forgotten,
    show_interval,
    show_number,
    show_seconds,
    show_share,
    tidy,
    tidy_lines,
)


@given(text=st.text(st.characters(exclude_categories=())), width=st.integers(2, 80))
def test_any_name_becomes_one_short_line_that_can_be_encoded(
    text: str, width: int
) -> None:
    shown = shorten(text, width)
    assert len(shown) <= width
    assert len(shown.splitlines()) <= 1
    assert shown.encode().decode() == shown


def test_what_turns_the_direction_of_writing_is_not_shown() -> None:
    assert tidy("a\u202eb\u2066c\x00d\ud800e") == "a\ufffdb\ufffdc\ufffdd\ufffde"


def test_emoji_survive_also_when_joined() -> None:
    family = "\U0001f469\u200d\U0001f4bb"
    assert tidy(family) == family


def test_wide_letters_take_two_columns() -> None:
    assert shorten("漢" * 20, 10) == "漢漢漢漢…"
    assert shorten("漢" * 5, 10) == "漢" * 5


def test_commands_keep_their_line_breaks() -> None:
    assert tidy_lines("a \\\r\n\tb\x1b") == "a \\\n\tb\ufffd"


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_what_is_not_known_is_a_dash(value: float | None) -> None:
    shown = (show_share(value), show_seconds(value), show_distance(value))
    assert {*shown, show_number(value, 2)} == {"–"}


def test_an_interval_without_ends_is_not_shown() -> None:
    assert show_interval(None) == show_interval((math.nan, math.nan)) == ""
    assert show_count(None) == ""


def test_shares_counts_and_intervals() -> None:
    assert show_share(0.9194) == "91.9 %"
    assert show_count((1331, 3600)) == "1,331 of 3,600"
    assert show_interval((0.887, 0.9432)) == "88.7–94.3 %"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 ms"),
        (0.9996, "1.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (3661, "1 h 1 min"),
    ],
)
def test_a_duration_has_the_unit_that_suits_it(seconds: float, shown: str) -> None:
    assert show_seconds(seconds) == shown


def test_bytes_have_units_without_end() -> None:
    shown = [show_bytes(7 * 1024**power) for power in range(6)]
    assert [text.split(" ")[1] for text in shown] == [
        "B", "KiB", "MiB", "GiB", "TiB", "TiB",
    ]  # fmt: skip


def test_of_many_forgotten_clients_a_few_are_named() -> None:
    many = [(place, f"c{place}") for place in range(100)]
    shown = show_forgotten(many, 2)
    assert shown == "c0 after round 0, c1 after round 1 and 98 more"
    assert show_forgotten([]) == ""
