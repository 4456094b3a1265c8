"""Runs are done once, in whole, and go on after a stop."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    FastFedUL,
    MemoryLedger,
    Model,
    NoSkew,
    Params,
    Round,
    UnlearnRequest,
)
from fastfedul.errors import FastFedULError
from fastfedul.params import Layout
from paper.board import retired, rows, running
from paper.board.running import Finished, do_runs
from paper.board.runs import Run, all_runs, config_of
from paper.board.store import Results, is_done, lock_file, read_lines

RUNS = all_runs()[:3]


def fake(run: Run, folder: Path) -> list[rows.Row]:
    (folder / "ledger").write_text("large")
    return [
        {**run.facts, "method": name, "refused": None} for name in (rows.BEFORE, "kd")
    ]


def failing(run: Run, folder: Path) -> list[rows.Row]:
    if run == RUNS[1]:
        raise RuntimeError("no such method")
    return fake(run, folder)


def stopped(run: Run, folder: Path) -> list[rows.Row]:
    if run == RUNS[1]:
        raise KeyboardInterrupt
    return fake(run, folder)


@pytest.fixture
def results(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "results" / "board.jsonl"
    yield path
    assert lock_file(path).exists()


def test_a_stopped_board_goes_on_where_it_was(tmp_path: Path, results: Path) -> None:
    told: list[Finished] = []
    with pytest.raises(KeyboardInterrupt):
        do_runs(RUNS, results, tmp_path / "work", stopped, told.append)
    assert [news.key for news in told] == [RUNS[0].key]
    assert not list((tmp_path / "work").iterdir())
    do_runs(RUNS, results, tmp_path / "work", fake, told.append)
    assert [news.key for news in told] == [run.key for run in RUNS]
    assert len(read_lines(results)) == 6
    assert {len(line["commit"].rstrip("+")) for line in read_lines(results)} == {40}


def test_a_failure_is_told_and_leaves_the_run_to_do(
    tmp_path: Path, results: Path
) -> None:
    told: list[Finished] = []
    do_runs(RUNS, results, tmp_path / "work", failing, told.append)
    assert "no such method" in (told[1].failure or "")
    assert [is_done(run, read_lines(results)) for run in RUNS] == [True, False, True]


def test_results_are_sorted_and_damage_is_told(tmp_path: Path, results: Path) -> None:
    backwards = RUNS[::-1]
    do_runs(backwards, results, tmp_path / "work", fake, lambda news: None)
    keys = [line["key"] for line in read_lines(results)]
    assert keys == sorted(keys)
    assert len(keys) == 6
    results.write_bytes(results.read_bytes()[:-9])
    with pytest.raises(FastFedULError, match="line 6: cannot be read"):
        read_lines(results)


def test_two_processes_never_do_the_same_run(results: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from paper.board.runs import all_runs; "
        "from paper.board.store import Results\n"
        "with Results(Path(sys.argv[1])) as s, s.claim(all_runs()[0]) as a, "
        "s.claim(all_runs()[1]) as b: print(a, b)"
    )
    root = Path(running.__file__).parents[2]
    with Results(results) as store, store.claim(RUNS[0]) as mine:
        assert mine
        other = subprocess.run(
            [sys.executable, "-c", code, str(results)],
            capture_output=True,
            text=True,
            check=True,
            cwd=root,
        )
    assert other.stdout.split() == ["False", "True"]


def test_results_of_another_list_are_refused(tmp_path: Path, results: Path) -> None:
    do_runs(RUNS[:1], results, tmp_path / "work", fake, lambda news: None)
    changed = replace(RUNS[0], clients=30)
    with pytest.raises(FastFedULError, match="another run under the name"):
        is_done(changed, read_lines(results))
    taken = replace(RUNS[0], seed=RUNS[0].seed - 1)
    assert is_done(taken, read_lines(results))


def test_rows_of_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = replace(
        next(run for run in RUNS if run.network == "CNN"),
        split="iid",
        attack="none",
        seed=100,
        rivals=False,
    )
    config = config_of(run, "").with_options(
        rounds=2, epochs=1, train_size=300, server_images=0
    )
    monkeypatch.setattr(rows, "config_of", lambda run, diamonds: config)
    cells = (rows.BEFORE, rows.SCALAR, rows.SCALAR_BEST, rows.KRONECKER_64)
    found = rows.measure(run, tmp_path, "", tmp_path / "no old software", cells)
    by_name = {row["method"]: row for row in found}
    assert list(by_name) == [
        *(rows.BEFORE, *rows.RETRAINED),
        *(rows.KRONECKER_64, rows.SCALAR, rows.SCALAR_BEST),
    ]
    assert all(row["refused"] is None and row["main_total"] == 360 for row in found)
    assert len({by_name[name]["distance"] for name in rows.RETRAINED}) == 3
    best = by_name[rows.SCALAR_BEST]
    assert best["damping"] in [damping for damping, _, _ in best["curve"]]
    assert all(0 < row["mia_auc"] < 1 for row in found)
    assert json.dumps(found)


def test_an_old_skew_is_computed_by_the_commit_that_has_it(tmp_path: Path) -> None:
    """With two clients that never differ nothing is pulled back, by no skew."""
    there = subprocess.run(["git", "cat-file", "-e", retired.COMMIT], check=False)
    if there.returncode != 0:
        pytest.skip("needs the history of the repository, and this clone is shallow")
    layout = Layout.of({"w": np.zeros((2, 3)), "b": np.zeros(2)})
    rng = np.random.default_rng(0)
    ledger = MemoryLedger.create(Model(Params.zeros(layout)))
    for index in range(3):
        of_a, of_others = rng.standard_normal((2, layout.size)).astype(np.float32)
        updates = {"a": of_a, "b": of_others, "c": of_others}
        ledger.append(
            Round(
                index,
                tuple(
                    ClientUpdate(name, 1 / 3, Params(layout, flat))
                    for name, flat in updates.items()
                ),
            )
        )
    software = retired.check_out(tmp_path / "old")

    found = retired.old_difference(ledger, ["a"], "direction", software, tmp_path)

    whole = FastFedUL(skew=NoSkew())(UnlearnRequest(ledger, frozenset({"a"})))
    np.testing.assert_allclose(found.vector, whole.delta.flat, rtol=1e-4, atol=1e-5)
