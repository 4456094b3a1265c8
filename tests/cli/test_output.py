"""What commands print: progress without a terminal, and tables on narrow screens."""

from __future__ import annotations

import time

import pytest

from fastfedul.cli import output
from tests.support.commands import run


def test_a_task_without_a_terminal_prints_lines_once_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with output.task_progress("short"), output.working("short, too"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(output, "QUIET_SECONDS", 0.01)
    monkeypatch.setattr(output, "_SECOND_LINE", 0.01)
    with output.task_progress("loading") as say:
        time.sleep(0.1)
        say("retraining", 1, 4)
    with output.working("forgetting"):
        time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "loading"
    assert lines[1].startswith("loading, ")
    assert "retraining: 1 of 4" in lines
    assert "forgetting" in lines


@pytest.mark.parametrize("columns", [40, 50, 60, 70, 80])
def test_a_number_stays_beside_its_unit(columns: int) -> None:
    sizes = ("--parameters", 1_100_000, "--clients", 7, "--rounds", 30)
    shown = run("ledger", "estimate", *sizes, columns=columns).stdout
    wide = run("ledger", "estimate", *sizes, columns=200).stdout
    units = ("MiB", "GiB", " s", "ms")
    assert [shown.count(u) for u in units] == [wide.count(u) for u in units]
    assert not any(
        line.split()[:1] in (["MiB"], ["GiB"]) for line in shown.splitlines()
    )
