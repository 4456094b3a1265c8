"""Rows as JSON that scripts rely on, and as a Markdown table that no name can break."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest

from fastfedul.report.content import Row
from fastfedul.report.tables import render_markdown, rows_to_json

KEYS = {
    *("method", "main", "backdoor", "main_count", "backdoor_count", "mia_auc"),
    *("distance", "angle_degrees", "seconds", "client_calls", "history_bytes"),
    *("main_interval", "backdoor_interval"),
}


def test_every_row_has_exactly_these_keys(rows: tuple[Row, ...]) -> None:
    found = rows_to_json(rows)
    assert [row["method"] for row in found] == [row.method for row in rows]
    assert all(set(row) == KEYS for row in found)
    assert found[0]["main_count"] == [351, 360]
    assert found[0]["backdoor_interval"] == [0.896, 0.953]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_what_json_cannot_hold_becomes_null() -> None:
    row = Row("x", math.nan, (0, 0), (math.nan, math.nan), distance=math.inf)
    [found] = rows_to_json([row])
    assert found["main"] is found["distance"] is found["backdoor_count"] is None
    assert found["main_interval"] == [None, None]
    assert json.dumps(found, allow_nan=False)


def test_numpy_numbers_become_plain_ones() -> None:
    counts = (int(np.int64(1)), int(np.int64(2)))
    row = Row("x", float(np.float32(0.5)), counts, (0.1, 0.9), seconds=np.float64(2))
    assert json.dumps(rows_to_json([row]))


def test_no_rows_are_an_empty_list() -> None:
    assert rows_to_json(()) == []


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_every_row_is_a_line_with_counts_and_intervals(rows: tuple[Row, ...]) -> None:
    head, rule, *body = map(cells, render_markdown(rows).splitlines())
    assert len(body) == len(rows)
    assert {len(line) for line in (head, rule, *body)} == {9}
    after = dict(zip(head, body[2], strict=True))
    assert after["Method"] == "fast-fedul"
    assert after["Right answers"] == "91.9 % (331 of 360; 88.7–94.3 %)"
    assert after["Attack works"] == "2.2 % (7 of 325; 1.0–4.4 %)"
    assert (after["Time"], after["History read"]) == ("12 ms", "7.0 MiB")


def test_what_was_not_measured_is_a_dash() -> None:
    line = render_markdown([Row("a", 0.5, (1, 2), (0.1, 0.9))]).splitlines()[2]
    assert cells(line)[2:7] == ["–"] * 5


@pytest.mark.parametrize(
    "name",
    ["a|b", "a\nb", "<script>alert(1)</script>", "[x](y)", "`x`", "\\|", "z" * 999],
)
def test_no_name_breaks_the_table(name: str) -> None:
    lines = render_markdown([Row(name, 0.5, (1, 2), (0.1, 0.9))]).splitlines()
    assert len(lines) == 3
    assert len(cells(lines[2].replace("\\\\", ""))) == 9
    assert not re.search(r"(?<!\\)[<\[`]", lines[2])
    assert len(lines[2]) < 250


def test_no_rows_leave_the_head() -> None:
    assert len(render_markdown(()).splitlines()) == 2
