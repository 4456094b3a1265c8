"""Rows as a Markdown table that no name can break."""

from __future__ import annotations

import re

import pytest

from fastfedul.report.as_markdown import render_markdown
from fastfedul.report.content import Row


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
