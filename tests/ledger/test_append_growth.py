"""The work of an append does not grow with the rounds that the ledger has."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfedul import DiskLedger, Model, Params
from fastfedul.rng import stream
from tests.support.rounds import random_round

NAMES = tuple(f"c{i}" for i in range(20))
START = Params.of({"w": np.zeros(4, np.float32)})
COUNTED = ("rchar", "wchar", "syscw")


def work_of(ledger: DiskLedger, first: int, statements: list[str]) -> dict[str, float]:
    """Return the mean work of the next appends: statements, bytes, writes."""
    many = 50
    statements.clear()
    before = counters()
    for index in range(first, first + many):
        rng = stream(5, "growth", index)
        ledger.append(random_round(index, NAMES, START.layout, rng))
    after = counters()
    found = {name: (after[name] - before[name]) / many for name in COUNTED}
    return {"statements": len(statements) / many, **found}


def counters() -> dict[str, int]:
    """Return what this process has read and written so far, by the system's count."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux")
def test_an_append_after_a_thousand_rounds_does_what_it_does_after_a_hundred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statements: list[str] = []
    connect = sqlite3.connect

    def traced(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        connection.set_trace_callback(statements.append)
        return connection

    monkeypatch.setattr(sqlite3, "connect", traced)
    with DiskLedger.create(tmp_path / "ledger", Model(START)) as ledger:
        for index in range(1000):
            if index == 100:
                early = work_of(ledger, index, statements)
            if not 100 <= index < 150:
                rng = stream(5, "growth", index)
                ledger.append(random_round(index, NAMES, START.layout, rng))
        late = work_of(ledger, 1000, statements)
    assert early["statements"] == late["statements"] > 0
    for name in COUNTED:
        assert late[name] < 1.3 * early[name], (name, early, late)
