"""The board of tracing: draws, counts, resuming, the page, and worth by retraining."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfedul.data.dataset import to_model_input
from fastfedul.errors import FastFedULError
from fastfedul.runs.config import RunConfig
from fastfedul.runs.given import Given
from fastfedul.runs.preparation import prepare, retrain, start_workers
from fastfedul.testing import small_federation
from paper.board.store import is_done, read_lines
from paper.tracing import scoring, training, worth
from paper.tracing.__main__ import do_missing
from paper.tracing.page import TRACES, WORTH, page_lines
from paper.tracing.runs import PLAIN, Run, all_runs, in_order
from paper.tracing.scoring import ATTACK, MISTAKES, RIGHT, RIVALS, Pool, judged

RESULTS = Path(__file__).resolve().parents[2] / "results"


def test_numbers_of_clients_take_turns_and_no_run_is_lost() -> None:
    runs = all_runs()
    ordered = in_order(runs)
    assert {run.key for run in ordered} == {run.key for run in runs}
    digits = [run.clients for run in ordered if run.data == "digits"]
    assert digits == [10, 20, 50] * 32
    assert [run.data for run in ordered] == [run.data for run in runs]


def test_committed_results_belong_to_the_lists() -> None:
    traces, worths = (read_lines(RESULTS / name) for name in (TRACES, WORTH))
    done = {run.key for run in all_runs() if is_done(run, traces)}
    assert done == {line["run"] for line in traces}
    valued = {run.key for run in worth.RUNS if is_done(run, worths)}
    assert valued == {line["run"] for line in worths}
    for lines in (traces, worths):
        keys = [line["key"] for line in lines]
        assert keys == sorted(set(keys))


def test_a_drawn_right_answer_is_not_compared_with_itself() -> None:
    _, federation = small_federation()
    images = federation.clients.data["ann"].images[:5]
    clean = Given(images, np.arange(5), federation.trainer, "five")
    right = np.array([1, 3, 4])
    some = Given(images[right], right, federation.trainer, "three")
    rng = np.random.default_rng(0)
    drawn, rest = Pool(some, right).draw(2, clean, rng)
    assert drawn.labels is not None
    assert rest.labels is not None
    assert sorted([*drawn.labels, *rest.labels]) == [0, 1, 2, 3, 4]
    assert set(drawn.labels) < {1, 3, 4}
    _, everything = Pool(some, None).draw(2, clean, rng)
    assert len(everything.examples) == 5


def said(first: list[str], accused: list[str], rival: str | None) -> dict[str, Any]:
    return {
        **{"first": first, "accused": accused, "score": 1.23456, "left": 0.05},
        **dict.fromkeys(RIVALS, rival),
    }


def test_a_row_counts_firsts_groups_and_false_accusations() -> None:
    row = {
        "case": ATTACK,
        "said": [
            said(["a", "b", "c", "d"], ["a", "b"], "a"),
            said(["b", "c", "a", "d"], ["b"], "c"),
            said(["c", "a", "b", "d"], ["a", "b", "c"], None),
        ],
    }
    found = judged(row, frozenset("ab"))
    assert "said" not in found
    counts = {name: found[name] for name in ("draws", "top1", "topk", "group", "false")}
    assert counts == {"draws": 3, "top1": 2, "topk": 1, "group": 1, "false": 1}
    assert found["norm"] == [1, 2]
    assert found["score"] == [1.235] * 3
    assert found["undone"] == 3
    quiet = judged({**row, "case": MISTAKES}, frozenset())
    assert (quiet["false"], "top1" in quiet) == (3, False)


def line(run: str, case: str, inputs: int, **counts: Any) -> dict[str, Any]:
    """Return a result of one attacker among ten whose attack works."""
    rivals = {rival: [1, counts["draws"]] for rival in RIVALS}
    return {
        **{"run": run, "data": "digits", "clients": 10, "attackers": 1},
        **{"attack": "pixel", "split": "iid", "keep": "all", "behaviour": PLAIN},
        **{"method": f"{case}/{inputs}", "case": case, "inputs": inputs},
        **{"attack_works": 0.9, "accuracy": 0.9, "false": 0, "undone": 0},
        **{**rivals, **counts},
    }


def test_the_page_counts_draws_aims_and_losses() -> None:
    lines = [
        line("digits-068", ATTACK, 1, draws=10, top1=9, topk=9, group=8),
        line("digits-088", ATTACK, 1, draws=10, top1=10, topk=10, group=10),
        {
            **line("digits-092", ATTACK, 1, draws=10, top1=0, topk=0, group=0),
            "attack_works": 0.29,
        },
        line("digits-068", MISTAKES, 10, draws=5),
        line("digits-088", RIGHT, 1, draws=10, false=1),
    ]
    page = [*page_lines(lines, [])]
    first = next(row for row in page if row.startswith("| attacker first"))
    assert "95.0% (19 of 20;" in first
    assert first.endswith("| not settled |")
    group = next(row for row in page if row.startswith("| group accused"))
    assert group.endswith("| - | not known |")
    false = next(row for row in page if row.startswith("| honest client accused"))
    assert "6.7% (1 of 15;" in false
    assert false.endswith("| no |")
    assert "The attack works in 2 of 3 runs with an attack." in page
    done = next(row for row in page if row.startswith("| digits | 10 |"))
    assert done.endswith("| 3 |")
    losses = [row for row in page if row.startswith("| digits-")]
    assert len(losses) == 2
    assert losses[0].endswith(f"| {ATTACK}/1 | 10 | 1 | 2 | 0 |")
    assert losses[1].endswith(f"| {RIGHT}/1 | 10 |  |  | 1 |")
    assert "OMP_NUM_THREADS=1 python -m paper.tracing run" in page
    assert sum("| not run |" in row for row in page) == len(worth.SPLITS)
    trace = next(row for row in page if row.startswith("| trace |"))
    norm = next(row for row in page if row.startswith("| norm |"))
    assert "(19 of 20;" in trace
    assert "(2 of 20;" in norm
    assert not any("more often than" in row for row in page)
    beaten = {**lines[0], "norm": [10, 10], "trajectory": [0, 0]}
    [said_so] = [row for row in page_lines([beaten], []) if "more often than" in row]
    assert said_so.endswith("`fastfedul trace`: norm.")


@pytest.mark.parametrize(
    ("top1", "false", "verdicts"),
    [(1000, 0, ["yes", "yes"]), (995, 5, ["not settled"] * 2), (900, 50, ["no"] * 2)],
)
def test_an_aim_is_reached_or_missed_only_if_the_interval_says_so(
    top1: int, false: int, verdicts: list[str]
) -> None:
    attack = line("digits-068", ATTACK, 1, draws=1000, top1=top1, topk=0, group=0)
    quiet = line("digits-068", RIGHT, 1, draws=1000, false=false)
    page = [*page_lines([attack, quiet], [])]
    rows = [row for row in page if row.startswith(("| attacker first:", "| honest cl"))]
    assert [row.split(" | ")[-1].removesuffix(" |") for row in rows] == verdicts


def test_worth_compares_ranks_and_gaps() -> None:
    assert worth.rank_correlation([1, 2, 2, 3], [4, 3, 3, 1]) == -1
    assert worth.rank_correlation([1, 2], [5, 5]) is None
    values = [(0.1, 0.2), (0.3, 0.1), (0.5, 0.6)]
    lines = [
        {
            "run": worth.RUNS[0].key,
            "loss": {"forgotten": told, "retrained": true, "again": true + 0.1},
            "accuracy": {"forgotten": 0.0, "retrained": true},
        }
        for told, true in values
    ]
    rows = [row for row in worth.worth_section(lines) if "| dirichlet" in row]
    assert rows == [
        "| dirichlet:0.2 | loss, nats | 1 of 5 | 0.50 | 1.00 | 0.133 | 0.100 "
        "| +0.200 |",
        "| dirichlet:0.2 | accuracy, points | 1 of 5 | - | - | 30.000 | - | -60.000 |",
    ]
    second = [{**line, "run": worth.RUNS[2].key} for line in lines]
    second[0]["loss"] = {"forgotten": 0.9, "retrained": 0.2, "again": 0.2}
    row = next(
        row for row in worth.worth_section([*lines, *second]) if "| dirichlet" in row
    )
    assert "| 2 of 5 | 0.50 (0.50 to 0.50) | 0.93" in row


def test_what_is_there_is_not_done_again_and_a_failure_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = in_order(all_runs())[:4]
    path = tmp_path / "tracing.jsonl"
    done: list[str] = []

    def measured(run: Run, folder: Path) -> list[dict[str, Any]]:
        assert folder.is_dir()
        done.append(run.key)
        if run == runs[2] and done.count(run.key) == 1:
            raise FastFedULError("no luck")
        return [{**run.facts, "method": "attack/1"}]

    assert do_missing(runs, path, measured, limit=1) == 0
    assert do_missing(runs, path, measured) == 1
    assert f"{runs[2].key} FAILED: no luck" in capsys.readouterr().err
    assert do_missing(runs, path, measured) == 0
    assert done == [*(run.key for run in runs), runs[2].key]
    stored = read_lines(path)
    assert {found["run"] for found in stored} == {run.key for run in runs}
    changed = replace(runs[0], clients=11)
    with pytest.raises(FastFedULError, match="list was changed"):
        do_missing([changed], path, measured)


@pytest.mark.slow
def test_a_run_trains_draws_and_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")

    def small(run: Run, seed: int) -> RunConfig:
        return RunConfig.from_options(
            **{"data": "digits", "train_size": 300, "rounds": 4, "epochs": 1},
            **{"attack": "pixel", "attackers": "1", "attack_scale": 4.0},
            **{"clients": 4, "poison_ratio": 0.5, "seed": seed, "workers": 1},
        )

    monkeypatch.setattr(training, "config_of", small)
    monkeypatch.setattr(scoring, "DRAWS", {1: 2})
    run = next(own for own in all_runs() if own.attackers == 1)
    rows = scoring.measure(run, tmp_path)
    by_case = {row["case"]: row for row in rows}
    assert set(by_case) == {ATTACK, MISTAKES, RIGHT}
    for row in rows:
        assert row["draws"] == len(row["score"]) == 2
        assert row["names"] == ["client-0"]
        assert 0 <= row["attack_works"] <= 1
    attack = by_case[ATTACK]
    assert attack["norm"] == [2, 2]
    assert attack["trajectory"][1] == 2
    assert 0 <= attack["group"] <= attack["topk"] <= attack["top1"] <= 2


@pytest.mark.slow
def test_worth_by_retraining_is_the_model_without_the_client(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    run = worth.WorthRun(0, "iid", 20_000, clients=3, rounds=2)
    lines = worth.compare(run, tmp_path)
    assert {own["method"] for own in lines} == {"client-0", "client-1", "client-2"}
    prepared = prepare(run.config)
    with start_workers(prepared) as workers:
        models = [
            retrain(prepared, workers, frozenset(without))
            for without in ((), ("client-1",))
        ]
    inputs = to_model_input(prepared.dataset.test_images)
    everybody, without = (
        np.mean(
            prepared.trainer.predict(model, inputs).argmax(axis=1)
            == prepared.dataset.test_labels
        )
        for model in models
    )
    [own] = [own for own in lines if own["method"] == "client-1"]
    assert own["accuracy"]["retrained"] == pytest.approx(everybody - without)
