"""What the page of a comparison says about itself."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="training needs the extra torch")

from fastfedul import DiskLedger, forget
from fastfedul.report.model_rows import rows_of
from fastfedul.report.of_run import report_of, row_of
from fastfedul.runs.comparison import Comparison, compare
from fastfedul.runs.training import RunConfig, train
from tests.support import commands

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
    return replace(found, rows=rows, refused={}, methods=methods)


def test_the_settings_have_the_names_and_words_of_the_command_line(
    run: Path, found: Comparison
) -> None:
    settings = report_of(run, found).settings
    shown = commands.run("train", "--help").stdout
    for name in settings:
        assert f"{name} " in shown or f"{name}," in shown, name
    assert settings["--train-size"] == 200
    assert settings["--per-round"] == "all"
    assert settings["--forget"] == "nobody"
    assert settings["--erase"] == "yes"


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


def test_an_angle_is_of_all_parameters_on_the_page_and_in_the_rows(
    run: Path, found: Comparison
) -> None:
    [*_, last] = found.rows
    assert last.closeness is not None
    whole = last.closeness.angle_degrees
    assert whole != last.closeness.last_layer_angle_degrees
    assert report_of(run, found).rows[-1].angle_degrees == whole
    row = rows_of(found)[-1]
    assert row["angle_degrees"] == whole
    assert row["last_layer_angle_degrees"] == last.closeness.last_layer_angle_degrees


def test_rows_have_the_keys_that_scripts_read_and_are_json(found: Comparison) -> None:
    rows = rows_of(found)
    wanted = {
        *("method", "main", "main_count", "main_interval", "seed", "settings"),
        *("backdoor", "backdoor_count", "backdoor_interval", "seconds", "kl"),
        *("mia_auc", "mia_auc_interval", "mia_tpr_at_1_fpr", "distance"),
        *("angle_degrees", "last_layer_angle_degrees", "prediction_change"),
        *("client_calls", "history_bytes"),
    }
    assert all(set(row) == wanted for row in rows)
    assert json.loads(json.dumps(rows, allow_nan=False)) == [dict(r) for r in rows]


def test_a_client_that_left_before_and_the_compared_client_are_both_marked(
    run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    with DiskLedger(folder) as ledger:
        forget(ledger, ["client-2"])
    report = report_of(folder, compare(folder, methods=("fast-fedul",)))
    assert {name: after for after, name in report.forgotten} == {
        "client-0": 4,
        "client-2": 4,
    }


def test_a_limit_of_a_method_is_a_note_of_the_page(
    run: Path, found: Comparison
) -> None:
    limited = replace(found, caveats=("fedaccum guesses.",))
    assert "fedaccum guesses." in report_of(run, limited).notes
    assert "fedaccum guesses." not in report_of(run, found).notes
