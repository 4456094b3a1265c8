"""Arithmetic by hand on three made-up runs, and the page made from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paper.board.page import page_text, write_page
from paper.board.rows import WHOLE_RUN
from paper.board.runs import all_runs
from paper.board.summary import (
    AUC,
    BACKDOOR,
    MAIN,
    farthest,
    gaps,
    judged_runs,
    lost_strata,
    mean_distances,
    strata,
    wishes,
)
from tests.paper.board_lines import made_up


def test_gaps_and_floors_of_a_run() -> None:
    first, second, honest = judged_runs(made_up())
    assert first.wanted(MAIN) == pytest.approx(91)
    assert first.gap("kronecker-64", MAIN) == pytest.approx(0.2)
    assert first.gap("kronecker-64", BACKDOOR) == pytest.approx(1)
    # 90 from 91.5, 91 from 91, 92 from 90.5.
    assert first.floor(MAIN) == pytest.approx(1)
    # 0 from 4.5, 3 from 3, 6 from 1.5.
    assert first.floor(BACKDOOR) == pytest.approx(3)
    assert second.floor(MAIN) == pytest.approx(0)
    assert honest.gap("kronecker-64", BACKDOOR) is None
    assert honest.distance("kronecker-64") == pytest.approx(0.3)
    assert honest.gap("kronecker-64", AUC) == pytest.approx(0.3)


def test_means_over_runs() -> None:
    runs = judged_runs(made_up())
    main, backdoor = (gaps(runs, "kronecker-64", m) for m in (MAIN, BACKDOOR))
    assert main is not None
    assert backdoor is not None
    # Gaps 0.2, -1.0, 0.3; floors 1, 0 and (1.5 + 1.5 + 3) / 3 = 2.
    assert main.signed.value == pytest.approx(-0.5 / 3)
    assert main.absolute == pytest.approx(0.5)
    assert main.worst == pytest.approx(-1)
    assert main.floor == pytest.approx(1)
    assert main.times_floor == pytest.approx(0.5)
    assert main.floor_worst == pytest.approx(2)
    # Gaps 1 and -2; floors 3 and 0.
    assert backdoor.num_runs == 2
    assert backdoor.signed.value == pytest.approx(-0.5)
    assert backdoor.times_floor == pytest.approx(1)


def test_wanted_beside_found() -> None:
    runs = judged_runs(made_up())
    found = wishes(runs, "kronecker-64")
    assert [wish.met for wish in found] == [*[True] * 7, None, None]
    assert [wish.met for wish in wishes(runs, "auto")][:3] == [False] * 3
    assert [wish.num_runs for wish in found] == [3, 3, 3, 2, 2, 2, 3, 0, 0]


def test_runs_that_are_farthest_and_strata_that_are_lost() -> None:
    runs = judged_runs(made_up())
    assert farthest(runs, "kronecker-64", 2) == [runs[1], runs[0]]
    assert not lost_strata(runs, "kronecker-64")
    assert mean_distances(runs, "kronecker-64", "kd") == ([], 0)
    # 1.2 + 3 + 0.3, and 3 + 30 + 6 with a backdoor at 3 and 30 where 3 and 10 is right.
    means, number = mean_distances(runs, "kronecker-64", "auto")
    assert number == 3
    assert means == pytest.approx([1.5, (3 + 30 + 6) / 3])
    assert sum(len(s.runs) for s in strata(runs) if s.factor == "data") == 3


def test_page_of_a_few_runs_says_so(tmp_path: Path) -> None:
    lines = made_up()
    run = all_runs()[-1]
    refused = {
        **run.facts,
        "run": run.key,
        "key": f"{run.key}/{WHOLE_RUN}",
        "method": WHOLE_RUN,
        "commit": "0" * 40,
        "refused": "client-0 has no image",
    }
    results = tmp_path / "board.jsonl"
    texts = [json.dumps(line) + "\n" for line in [*lines, refused]]
    results.write_text("".join(texts))
    page, figure = write_page(results, tmp_path / "out")
    text = page.read_text()
    total = len(all_runs())
    assert f"So far 4 of {total} runs are done, of which 1 could not be made." in text
    assert "`kronecker-64` is -0.17 points from retraining in main accuracy" in text
    assert "client-0 has no image" in text
    assert "backdoor 1.50 (worst 3.00, n = 2)" in text
    assert figure.read_text().startswith("<?xml")
    assert "kronecker-64" in figure.read_text()


def test_page_without_results() -> None:
    assert "So far 0 of 7 runs are done" in page_text([], 7)
