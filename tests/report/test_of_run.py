"""What the page of a comparison says about itself."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="training needs the extra torch")

from fastfedul.report.of_run import report_of, row_of
from fastfedul.runs.comparison import Comparison, compare
from fastfedul.runs.training import RunConfig, train

METHODS = ("fedaccum", "kd", "fast-fedul-paper")
"""Of the history alone, refused for want of the server's images, and with damping."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = RunConfig.from_options(
        clients=3, rounds=4, epochs=1, train_size=200, attack="pixel", workers=1
    )
    train(config, folder)
    return folder


@pytest.fixture(scope="module")
def found(run: Path) -> Comparison:
    return compare(
        run,
        methods=METHODS,
        damping=0.12345678,
        settings={"fast-fedul-paper": {"keep": "uniform:2", "keep_seed": 3}},
    )


def with_methods(found: Comparison, *methods: str) -> Comparison:
    """Return a comparison with rows of these methods."""
    before, retrained, some, *_ = found.rows
    rows = (before, retrained, *(replace(some, method=name) for name in methods))
    return replace(found, rows=rows, refused={})


@pytest.mark.slow
def test_the_last_command_gives_the_numbers_of_the_page(
    run: Path, found: Comparison, tmp_path: Path
) -> None:
    words = shlex.split(report_of(run, found).commands[-1])
    assert words[:3] == ["fastfedul", "compare", "RUN"]
    command = [sys.executable, "-m", *words[:2], str(run), *words[3:], "--json"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "page.html")],
        capture_output=True,
        check=True,
        timeout=250,
    )
    again = json.loads(done.stdout)
    assert list(again["refused"]) == ["kd"]
    rows = {row["method"]: row for row in again["rows"]}
    assert list(rows) == ["before", "retrained", "fedaccum", "fast-fedul-paper"]
    for own in map(row_of, found.rows):
        assert rows[own.method]["distance"] == own.distance
        assert tuple(rows[own.method]["main_count"]) == own.main_count


def test_a_page_without_methods_shows_no_command_that_would_add_some(
    run: Path, found: Comparison
) -> None:
    assert report_of(run, with_methods(found)).commands == ()


@pytest.mark.parametrize(
    ("methods", "alone"),
    [
        (("fast-fedul", "fast-fedul-paper"), True),
        (("fast-fedul", "fedrecover"), False),
        ((), False),
    ],
)
def test_only_methods_that_ask_nobody_forget_from_records_alone(
    run: Path, found: Comparison, methods: tuple[str, ...], alone: bool
) -> None:
    [_, said] = report_of(run, with_methods(found, *methods)).summary
    assert ("from its records alone" in said) is alone
    assert ("in every way that the table shows" in said) is not alone
