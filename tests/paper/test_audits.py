"""The board of audits: its lines, its page, and a small audit of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastfedul.runs.config import RunConfig
from paper import audits
from paper.audits import Board, boards, main, page_lines
from paper.leaving import read_results

RESULTS = Path(__file__).resolve().parents[2] / "results" / "audit.jsonl"


def test_committed_results_belong_to_the_boards() -> None:
    lines = read_results(RESULTS)
    names = ("before", "retrained", *audits.METHODS)
    known = {f"{board.data}/{name}" for board in boards() for name in names}
    keys = [line["key"] for line in lines]
    assert keys == sorted(set(keys))
    assert set(keys) <= known


def test_a_page_without_results_says_what_is_missing() -> None:
    page = [*page_lines([])]
    assert "0 of 64 shadow federations are done." in page
    assert "OMP_NUM_THREADS=1 python -m paper.audits run --only mnist" in page


@pytest.mark.slow
def test_a_board_is_audited_goes_on_and_has_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    config = RunConfig.from_options(
        **{"clients": 4, "train_size": 240, "rounds": 2, "epochs": 1, "workers": 1},
        **{"attack": "pixel", "poison_ratio": 0.5, "lr": 0.1},
    )
    small = Board("digits", config, 8, {"kd": {"epochs": 1}})
    monkeypatch.setattr(audits, "boards", lambda: (small,))
    monkeypatch.setattr(audits, "METHODS", ("fast-fedul", "kd"))
    results = tmp_path / "audit.jsonl"
    words = ["run", "--results", str(results), "--runs", str(tmp_path / "runs")]
    assert main([*words, "--budget", "0.0001"]) == 0
    assert "0 of 8 shadow federations are done." in [*page_lines(read_results(results))]
    assert main(words) == 0
    lines = read_results(results)
    assert [line["row"]["name"] for line in lines] == [
        *("before", "fast-fedul", "kd", "retrained")
    ]
    assert main(["page", "--results", str(results), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "audit.md").read_text()
    assert "8 shadow federations, 60 examples of the client" in page
    assert "| kd | refused: " in page
    assert page.count("| fast-fedul |") == 3
    assert "shadow federations are done" not in page
