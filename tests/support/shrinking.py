"""Rounds that make a ledger grow, and the answer and size of the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fastfedul import ClientUpdate, DiskLedger, LedgerReader, Model, Params, Round
from fastfedul.methods.fast_fedul.tracing import leaving
from fastfedul.methods.fast_fedul.undamped import undamped
from fastfedul.params import Flat
from fastfedul.rng import stream

SIZE = 6_000
NAMES = ("anna", "bela", "carl", "dora")
LAYOUT = Params.of({"w": np.zeros(SIZE, np.float32)}).layout
START = Model(Params.zeros(LAYOUT), {"seen": np.arange(3)})


def round_of(index: int, names: Sequence[str] = NAMES, **changes: Any) -> Round:
    rng = stream(3, "shrinking", index)
    common = rng.normal(size=SIZE)
    deltas = {name: common + rng.normal(0, 1 + i, SIZE) for i, name in enumerate(NAMES)}
    updates = tuple(
        ClientUpdate(
            name, 1 / len(names), Params(LAYOUT, deltas[name].astype(np.float32))
        )
        for name in names
    )
    return replace(Round(index, updates), **changes)


def ledger_at(path: Path, num_rounds: int = 10, **options: Any) -> DiskLedger:
    ledger = DiskLedger.create(path, START, **options)
    for index in range(num_rounds):
        ledger.append(round_of(index))
    return ledger


def append_all(ledger: DiskLedger, rounds: Sequence[Round]) -> None:
    for round_ in rounds:
        ledger.append(round_)


def answer(ledger: LedgerReader, *names: str) -> Flat:
    """What forgetting takes if nobody reacted, from rounds or from sums."""
    rounds = ledger.rounds()
    removal = leaving(ledger, frozenset(names or ("bela",)), rounds)
    return undamped(ledger, removal, rounds, None).difference


def distance(found: Flat, expected: Flat) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def size_of(path: Path) -> int:
    # The lock holds the number of a process, which is no part of the ledger.
    files = [p for p in path.rglob("*") if p.is_file() and p.name != "lock"]
    return sum(p.stat().st_size for p in files)
