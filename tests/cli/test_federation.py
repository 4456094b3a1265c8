"""A ledger outside a run, as a Flower server has it: measured, compared, reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfedul import EvaluationSource
from fastfedul.runs import metrics_file
from fastfedul.runs.evaluation_source import federation_file, write_source
from fastfedul.runs.metrics_file import RoundMetrics
from tests.support.commands import one_line, run, run_json
from tests.support.linear_trainer import SOURCE, examples, trained

pytestmark = pytest.mark.usefixtures("own_configuration")

HERE = "tests.support.linear_trainer"


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """A ledger that says how its model is evaluated."""
    path = trained(tmp_path / "recorded")
    write_source(path, SOURCE)
    return path


def test_evaluate_counts_right_answers_on_the_named_examples(ledger: Path) -> None:
    before = run_json("evaluate", ledger)
    run("forget", ledger, "eve")
    after = run_json("evaluate", ledger)
    assert before["main_count"][1] == after["main_count"][1] == 60
    assert after["main"] > before["main"]
    assert (after["backdoor"], after["attackers"]) == (None, [])
    assert after["forgotten"] == ["eve"]
    assert "accuracy" in run("evaluate", ledger).stdout


def test_compare_has_no_retrained_row_and_leaves_out_who_asks_clients(
    ledger: Path,
) -> None:
    asked = ("--methods", "fast-fedul,federaser")
    found = run_json("compare", ledger, "--forget", "eve", *asked)
    assert [row["method"] for row in found["rows"]] == ["before", "fast-fedul"]
    assert "needs the help of clients" in found["refused"]["federaser"]
    before, after = found["rows"]
    assert after["main"] > before["main"]
    assert after["distance"] is None
    assert after["seed"] is None
    assert found["seeds"] == []
    page = ledger.with_name("recorded.report.html")
    assert found["report"] == str(page)
    assert "cannot retrain" in page.read_text()
    assert (
        "left out: federaser"
        in run("compare", ledger, "--forget", "eve", *asked).stdout
    )
    alone = run("compare", ledger, "--forget", "eve", "--methods", "federaser", code=1)
    assert "needs the help of clients" in one_line(alone)
    assert "name the clients" in one_line(run("compare", ledger, code=2))


def test_the_report_shows_the_metrics_that_were_recorded(ledger: Path) -> None:
    for index in range(6):
        own = RoundMetrics(index, 0.1 * index, None, 1.0)
        metrics_file.append(metrics_file.metrics_of(ledger), own)
    page = Path(run_json("report", ledger)["report"])
    assert "Round by round" in page.read_text()
    assert "Now" in page.read_text()
    run_json("report", ledger, "--forget", "eve")
    assert "eve" in page.read_text()
    inside = run("report", ledger, "--out", ledger / "page.html", code=2)
    assert "is a place of the run itself" in one_line(inside)


def test_trace_and_contribution_take_the_test_examples_of_the_ledger(
    ledger: Path,
) -> None:
    worth = run_json("contribution", ledger)
    assert worth["source"] == "the federation's test examples"
    assert worth["clients"][-1]["client"] == "eve"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "its network and test examples are not known"),
        ("model = 3\ntest = 'x'", "model is"),
        ("model = 'x'", "lacks 'test'"),
        ("model = 'x'\ntest = 'y.npz'\nspeed = 1", "unknown key 'speed'"),
        ("model = ", "cannot read"),
        (f"model = 'auto'\ntest = '{HERE}:missing'", "cannot load the test data"),
        (f"model = 'auto'\ntest = '{HERE}:mistaken'", "returns examples and labels"),
        (f"model = 'auto'\ntest = '{HERE}:examples'", "takes images"),
        ("model = 'auto'\ntest = 'none.npz'", "there is no file"),
    ],
)
def test_a_file_that_does_not_say_how_is_refused_by_one_line(
    content: str | None, said: str, ledger: Path
) -> None:
    if content is None:
        federation_file(ledger).unlink()
    else:
        federation_file(ledger).write_text(content)
    assert said in one_line(run("evaluate", ledger, code=2))
    assert said in one_line(run("compare", ledger, "--forget", "eve", code=2))


def test_examples_of_another_shape_or_class_do_not_fit(
    ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def three_classes() -> Any:
        rows, labels = examples()
        return rows, labels + 1

    def wide() -> Any:
        rows, labels = examples()
        return np.hstack([rows, rows]), labels

    monkeypatch.setattr(f"{HERE}.examples", three_classes)
    assert "another network" in one_line(run("evaluate", ledger, code=2))
    monkeypatch.setattr(f"{HERE}.examples", wide)
    assert "another network" in one_line(run("evaluate", ledger, code=2))


def test_a_file_is_looked_for_beside_the_file_that_names_it(tmp_path: Path) -> None:
    ledger = trained(tmp_path / "ledger")
    write_source(ledger, EvaluationSource(model="auto", test="own.npz"))
    np.savez(tmp_path / "own.npz", images=np.zeros((2, 8, 8), np.uint8))
    assert f"{tmp_path}/own.npz has no labels" in one_line(
        run("evaluate", ledger, code=2)
    )
