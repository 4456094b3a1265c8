"""Forgetting a client that the options of a run name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    FastFedUL,
    Model,
    Params,
    Round,
    UnlearnRefusedError,
    forget,
)
from fastfedul.records import History
from fastfedul.runs.training import forget_as_planned

START = Params.of({"w": np.zeros(4, np.float32)})


def record(path: Path, history: History, *, kept: bool = True) -> DiskLedger:
    """One round of `ann` and `bob`; `kept` says whether the ledger has bob's update."""
    ledger = DiskLedger.create(path, Model(START), history=history)
    moved = Params(START.layout, np.ones(4, np.float32))
    updates = (
        ClientUpdate("ann", 0.5, moved),
        ClientUpdate("bob", 0.5, moved, 1.0 if kept else 0.0, kept),
    )
    ledger.append(Round(0, updates))
    return ledger


def refusal(ledger: DiskLedger) -> str:
    with ledger, pytest.raises(UnlearnRefusedError) as caught:
        forget_as_planned(ledger, "bob", FastFedUL())
    return str(caught.value)


def test_too_little_kept_is_refused_with_advice_about_coverage(tmp_path: Path) -> None:
    said = refusal(record(tmp_path / "ledger", "rounds", kept=False))
    assert "only 0% of what client 'bob'" in said
    assert "--minimum-coverage 0" in said
    assert "--resume" in said


def test_another_refusal_says_its_own_reason_only(tmp_path: Path) -> None:
    ledger = record(tmp_path / "ledger", "sums")
    forget(ledger, ["ann"], erase=False)
    said = refusal(ledger)
    assert "nobody but the clients to forget took part in round 0" in said
    assert said.endswith("the rounds so far are recorded")
    assert "coverage" not in said
