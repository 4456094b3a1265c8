"""Forgetting under other server rules: cases, resuming, and the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastfedul.errors import FastFedULError
from paper import server_rules
from paper.leaving import run_missing
from paper.server_rules import FEDAVG, RULES, Case, all_cases, page_text


def line(rule: str, leaver: str, main: float, backdoor: float | None) -> dict[str, Any]:
    """Return a result whose retrained model has 90 % and a backdoor of 1 %."""
    wanted = None if backdoor is None else 0.01
    return {
        **{"key": f"{rule}/{leaver}", "data": "digits", "rule": rule},
        "main": {"before": 0.95, "forgotten": main, "retrained": 0.9},
        "backdoor": {"before": wanted, "forgotten": backdoor, "retrained": wanted},
    }


def test_every_case_has_a_name_of_its_own_and_the_options_of_its_rule() -> None:
    cases = all_cases()
    assert len({case.key for case in cases}) == len(cases) == 96
    for case in cases:
        optimizer = case.config.server.make_optimizer()
        assert (optimizer is None) == (case.rule in (FEDAVG, "Krum"))
        assert (case.config.aggregation == "mean") == (case.rule != "Krum")
        assert case.config.attack.kind == (
            "pixel" if case.leaver == "pixel" else "none"
        )


def test_the_page_has_mean_and_worst_gaps_and_compares_with_fedavg() -> None:
    lines = [
        line(FEDAVG, "pixel", 0.89, 0.02),
        line(FEDAVG, "honest", 0.92, None),
        line("FedAdam", "pixel", 0.88, 0.05),
        line("FedAdam", "honest", 0.87, None),
    ]
    rows = [r for r in page_text(lines).splitlines() if r.startswith("| Fed")]
    assert rows == [
        "| FedAvg | 2 | 95.0 % | 90.0 % | 1.50 | +2.00 "
        "| 1.0 % | 1.0 % | 1.00 | +1.00 |  |",
        "| FedAdam | 2 | 95.0 % | 90.0 % | 2.50 | -3.00 "
        "| 1.0 % | 1.0 % | 4.00 | +4.00 | main: yes, backdoor: no |",
    ]


def test_what_is_there_is_not_done_again(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    done: list[str] = []

    def measured(case: Case, folder: Path) -> dict[str, Any]:
        del folder
        done.append(case.key)
        return {"key": case.key}

    cases = all_cases(["digits"])[:3]
    next(run_missing(cases, path, measured))
    assert [*run_missing(cases, path, measured)]
    assert done == [case.key for case in cases]
    stored = [json.loads(text)["key"] for text in path.read_text().splitlines()]
    assert stored == sorted(done)
    path.write_text("{}\n")
    with pytest.raises(FastFedULError, match="line 1: cannot be read"):
        [*run_missing(cases, path, measured)]


@pytest.mark.slow
def test_a_case_trains_forgets_and_retrains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    small = {"data": "digits", "train_size": 200, "rounds": 2, "epochs": 1}
    monkeypatch.setattr(server_rules, "DATA", {"digits": small})
    assert "FedAdam" in RULES
    case = Case("digits", "FedAdam", "iid", "pixel", 0)
    found = server_rules.measure(case, tmp_path / "run")
    assert found["key"] == "digits/FedAdam/iid/pixel/0"
    for what in ("main", "backdoor"):
        assert set(found[what]) == {"before", "forgotten", "retrained"}
        assert all(0 <= value <= 1 for value in found[what].values())
