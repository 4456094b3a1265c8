"""Totals of each client, which are kept with it so that nobody has to add them up."""

from __future__ import annotations

import math
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    FastFedUL,
    LedgerReader,
    Params,
    Round,
    Scalar,
    erase,
    forget,
    verify,
)
from fastfedul.ledger.keeping import Keep
from fastfedul.records import History
from tests.support import shrinking
from tests.support.damage import resign
from tests.support.disk_ledgers import (
    CLIENTS,
    LAYOUT,
    initial_model,
    problems_of,
    round_of,
    vector,
)


def assert_totals_agree(ledger: LedgerReader) -> None:
    """Every client's totals are those of its rows."""
    for name, entry in ledger.clients().items():
        own = ledger.updates_of(name)
        assert entry == ledger.client(name)
        assert entry.num_updates == len(own), name
        assert entry.num_kept == sum(update.kept for update in own), name
        assert entry.num_summed == sum(update.summed for update in own), name
        assert_mean(entry.mean_share, [update.share for update in own])
        norms = [update.norm for update in own if not math.isnan(update.norm)]
        assert_mean(entry.mean_norm, norms)
    assert verify(ledger).problems == ()


def assert_mean(found: float | None, values: list[float]) -> None:
    if not values:
        assert found is None
        return
    assert found == pytest.approx(math.fsum(values) / len(values), rel=1e-9)


def uneven(index: int) -> Round:
    """A round of unequal shares; one client's update is not kept, another's unknown."""
    present = [name for i, name in enumerate(CLIENTS) if (index + i) % 3]
    weights = [1.0 + (index * 7 + i * 3) % 5 for i in range(len(present))]
    updates = []
    step = np.zeros(LAYOUT.size)
    for i, name in enumerate(present):
        share = weights[i] / sum(weights)
        sent = vector(2, index, i)
        step += share * sent
        unknown = name == "d" and index % 4 == 1
        delta = None if unknown else Params(LAYOUT, sent)
        kept = not unknown and (index + i) % 4 != 0
        updates.append(ClientUpdate(name, share, delta, 1.0 if kept else 0.5, kept))
    return Round(index, tuple(updates), step=Params(LAYOUT, step.astype(np.float32)))


def test_totals_agree_after_every_append(tmp_path: Path) -> None:
    with DiskLedger.create(tmp_path / "ledger", initial_model()) as ledger:
        for index in range(12):
            ledger.append(uneven(index))
            assert_totals_agree(ledger)
        entries = ledger.clients()
    assert any(0 < e.num_kept < e.num_updates for e in entries.values())
    assert len({e.mean_share for e in entries.values()}) > 1
    rows = sqlite3.connect(tmp_path / "ledger" / "index.sqlite")
    [(num_unknown,)] = rows.execute("SELECT count(*) FROM updates WHERE norm IS NULL")
    rows.close()
    assert num_unknown


def test_totals_agree_after_forgetting_and_erasing(tmp_path: Path) -> None:
    method = FastFedUL(minimum_coverage=0, skew=Scalar(0.1))
    with DiskLedger.create(tmp_path / "ledger", initial_model()) as ledger:
        for index in range(8):
            ledger.append(round_of(index, dropped=frozenset({CLIENTS[index % 4]})))
        forget(ledger, ["a"], method, erase=False)
        assert_totals_agree(ledger)
        erase(ledger, ["a"])
        assert_totals_agree(ledger)
        forget(ledger, ["c"], method, erase=True)
        assert_totals_agree(ledger)
        gone = ledger.clients()["a"]
        assert (gone.num_updates, gone.num_kept, gone.num_summed) == (0, 0, 0)
        assert (gone.mean_share, gone.mean_norm) == (None, None)
        ledger.append(round_of(8, clients=("b", "d", "new")))
        assert_totals_agree(ledger)


def test_totals_agree_after_drops_for_a_budget(tmp_path: Path) -> None:
    with DiskLedger.create(
        tmp_path / "ledger", shrinking.START, budget=700_000
    ) as ledger:
        for index in range(10):
            ledger.append(shrinking.round_of(index))
            assert_totals_agree(ledger)
        assert [event.kind for event in ledger.events()] == ["drop"]
        entries = ledger.clients().values()
        assert all(entry.num_updates == 10 for entry in entries)
        assert sum(entry.num_kept for entry in entries) < 40


@pytest.mark.parametrize("budget", [None, 1_000_000])
def test_totals_agree_after_compacting(budget: int | None, tmp_path: Path) -> None:
    keep = Keep.parse("uniform:3", seed=2)
    with DiskLedger.create(
        tmp_path / "ledger", shrinking.START, budget=budget
    ) as ledger:
        for index in range(10):
            ledger.append(keep(shrinking.round_of(index)))
        kept = {name: entry.num_kept for name, entry in ledger.clients().items()}
        ledger.set_budget(None)
        ledger.compact()
        assert_totals_agree(ledger)
        for name, entry in ledger.clients().items():
            assert (entry.num_kept, entry.num_summed) == (0, kept[name])
        ledger.append(shrinking.round_of(10))
        assert_totals_agree(ledger)
        forget(ledger, ["bela"], FastFedUL(minimum_coverage=0), erase=True)
        assert_totals_agree(ledger)


@pytest.mark.parametrize("history", ["rounds", "sums"])
@pytest.mark.parametrize(
    "column",
    ["num_kept", "num_summed", "num_norms", "shares", "norms", "contribution"],
)
def test_a_wrong_total_is_found(column: str, history: History, tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with DiskLedger.create(path, initial_model(), history=history) as ledger:
        for index in range(4):
            ledger.append(round_of(index))
    rows = sqlite3.connect(path / "index.sqlite")
    rows.execute(f"UPDATE clients SET {column} = {column} + 1 WHERE name = 'c'")
    resign(rows, "clients")
    rows.commit()
    rows.close()
    assert problems_of(path) == ("client 'c' has totals that its rounds do not have",)


def test_a_total_is_right_to_the_last_digits_after_many_rounds(tmp_path: Path) -> None:
    with DiskLedger.create(tmp_path / "ledger", initial_model()) as ledger:
        for index in range(200):
            round_ = uneven(index % 12)
            ledger.append(replace(round_, index=index))
        assert_totals_agree(ledger)
