"""The evidence for our dampings: the draw, the verdicts and the pages."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from pathlib import Path

import pytest
from tests.reproduction.conftest import Fill

from fastfedul.history.schema import digest_of
from fastfedul.reproduction.cells import CellStore
from fastfedul.reproduction.experiments import lines_of
from fastfedul.reproduction.skew_cells import (
    ATTACKS,
    AUTO,
    CLIENTS,
    DIRECTED,
    SPLITS,
    VALIDATED,
    combinations,
)
from fastfedul.reproduction.skew_page import skew_csv, skew_json, skew_markdown
from fastfedul.reproduction.skew_summary import (
    BY_HAND,
    PAPER,
    Judged,
    Score,
    impossible,
    judge,
    verdicts,
)
from fastfedul.reproduction.writing import write

DRAWN = "8765a97d25d525b2"
"""Of the names of all settings; they were fixed before any was scored."""


def test_the_draw_is_the_one_that_was_committed() -> None:
    names = [f"{one.data}, {one.name}" for one in combinations("standard")]
    assert digest_of(*names).hex()[:16] == DRAWN
    assert len(set(names)) == len(names)


def test_every_attack_and_split_is_there_on_digits() -> None:
    drawn = combinations("standard")
    digits = {(one.attack, one.split) for one in drawn if one.data == "digits"}
    assert digits == {(attack, split) for attack in ATTACKS for split in SPLITS}
    assert Counter(one.data for one in drawn) == {
        "digits": 16,
        "mnist": 5,
        "cifar10": 3,
        "oct": 3,
    }
    assert {one.half for one in drawn} == {True, False}
    assert {one.leavers for one in drawn} == {1, 4}


@pytest.mark.parametrize("name", ["skew", "direction"])
def test_runs_are_what_a_setting_says_and_have_no_seed_of_the_development(
    name: str,
) -> None:
    for line in lines_of(name, "standard", 5):
        for cell in line.cells:
            run = cell.run
            assert run.clients == CLIENTS
            # On digits the first five were used up by skew per coordinate.
            fresh = name == "direction" and line.data == "digits"
            assert run.seed in (range(5, 10) if fresh else range(5))
            leavers = len(run.poisoning.attackers) or cell.leavers
            assert f"{leavers} of {CLIENTS}" in line.partition
            drawn = run.per_round or CLIENTS
            assert ("half a round" in line.partition) == (drawn == CLIENTS // 2)


def test_the_verdicts_are_those_of_the_numbers(fill: Fill) -> None:
    lines = lines_of("skew", "smoke", 2)
    runs = judge(lines, fill(lines))
    assert len(runs) == 2 * len(combinations("smoke"))
    by_label = {verdict.label: verdict for verdict in verdicts(runs)}
    auto = by_label[AUTO]
    gaps = [
        100 * (run.scores["retrained"].main - run.scores[AUTO].main) for run in runs
    ]
    assert auto.main_mean == pytest.approx(sum(gaps) / len(gaps))
    assert auto.main_worst == pytest.approx(max(gaps))
    assert auto.num_won == sum(run.won for run in runs)
    best = by_label[BY_HAND["scalar"]]
    assert best.num_won == best.num_runs == len(runs)
    for run in runs:
        for _, main, backdoor in run.curves["scalar"]:
            again = run.scores["retrained"]
            apart = 100 * abs(main - again.main)
            if backdoor is not None and again.backdoor is not None:
                apart += 100 * abs(backdoor - again.backdoor)
            assert run.distance(BY_HAND["scalar"]) <= apart + 1e-9


def test_a_run_with_a_missing_or_impossible_cell_is_not_judged(fill: Fill) -> None:
    lines = lines_of("skew", "smoke", 2)
    store = fill(lines)
    store.path(lines[0].cells[0]).unlink()
    store.write(lines[1].cells[1], {"refused": "nothing to poison"})
    runs = judge(lines, store)
    assert len(runs) == 2 * len(combinations("smoke")) - 2
    [said] = impossible(lines, store)
    assert said.endswith("seed 1: nothing to poison")
    assert said in skew_markdown("skew", "smoke", 2, runs, [said], ())


@pytest.mark.parametrize(("name", "lead"), [("skew", AUTO), ("direction", DIRECTED)])
def test_the_page_lists_every_loss_and_the_files_say_the_same(
    fill: Fill, tmp_path: Path, name: str, lead: str
) -> None:
    lines = lines_of(name, "smoke", 2)
    store = fill(lines)
    written = write(name, "smoke", lines, store, tmp_path / "out")
    assert [path.suffix for path in written] == [".md", ".csv", ".json", ".svg"]
    runs = judge(lines, store)
    page = written[0].read_text("utf-8")
    losses = page.partition("## Where it loses")[2]
    assert losses.count("\n- ") == sum(not run.won for run in runs)
    assert "Honest leavers (2 runs, 1 setting; mean of the settings' means)" in page
    rows = list(csv.DictReader(io.StringIO(skew_csv(runs))))
    assert {row["model"] for row in rows} >= {"before", "retrained", lead}
    facts = json.loads(skew_json(name, "smoke", 2, runs))
    assert len(facts["runs"]) == len(runs)
    assert facts["verdicts"][0]["label"] == lead
    assert all(run.lead == lead for run in runs)


def honest(setting: str, seed: int, gap: float) -> Judged:
    """Return a run in which every way to forget costs so many points."""
    mia_auc = 0.5 + gap / 100
    own = Score(0.9 - gap / 100, None, mia_auc)
    labels = (AUTO, VALIDATED, PAPER, BY_HAND["scalar"])
    scores = {
        **dict.fromkeys(labels, own),
        "before": Score(0.9, None, 0.5),
        "retrained": Score(0.9, None, 0.5),
    }
    return Judged("digits", setting, "none", seed, scores, {}, None)


def test_the_interval_of_honest_leavers_is_over_settings_and_not_over_seeds() -> None:
    # Two settings, each the same with every seed: five seeds are no five witnesses.
    runs = [honest("one", seed, 0.0) for seed in range(5)]
    runs += [honest("two", seed, 2.0) for seed in range(3)]
    page = skew_markdown("skew", "smoke", 5, runs, (), ())
    assert "Honest leavers (8 runs, 2 settings; mean of the settings' means" in page
    # Mean 1, standard error 1, and Student's t of one degree of freedom.
    assert "`auto`: main accuracy 1.00 [-11.71 to 13.71] points below" in page
    assert "membership inference 1.00 [-11.71 to 13.71] points above" in page


def test_without_results_the_page_says_so(store: CellStore, tmp_path: Path) -> None:
    lines = lines_of("skew", "smoke", 1)
    page, *_ = write("skew", "smoke", lines, store, tmp_path / "out")
    assert "No run has all its results yet" in page.read_text("utf-8")
