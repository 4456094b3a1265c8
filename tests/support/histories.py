"""Histories of weighted clients, and what they amount to in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    LedgerReader,
    LocalSGD,
    MemoryLedger,
    Model,
    Params,
    Round,
)
from fastfedul.ledger.protocol import vector
from fastfedul.params import Flat, Layout
from fastfedul.records import VectorRef
from fastfedul.rng import stream

Floats = npt.NDArray[np.float64]
WritableLedger = MemoryLedger | DiskLedger
Maker = Callable[..., WritableLedger]
LAYOUT = Layout.of({"weight": np.zeros((5, 6)), "bias": np.zeros(7)})
CLIENTS = ("anna", "bela", "carl", "dora", "emil")
TARGET = "bela"
LOCAL = LocalSGD(lr=0.1, momentum=0.9, batch_size=32, epochs=2)


def normal(*key: int, size: int = LAYOUT.size) -> Flat:
    return stream(8, "erasure", *key).normal(size=size).astype(np.float32)


def initial(layout: Layout = LAYOUT) -> Model:
    return Model(Params(layout, normal(0, size=layout.size)), {"n": np.array([1, 2])})


def history(
    num_rounds: int = 8,
    *,
    layout: Layout = LAYOUT,
    partial: bool = True,
    drop: bool = False,
    seed: int = 0,
) -> list[Round]:
    """Rounds of weighted clients; some stay away, some updates are dropped."""
    rng = stream(seed, "history")
    rounds = []
    for index in range(num_rounds):
        present = rng.random(len(CLIENTS)) < (0.7 if partial else 2)
        present[index % len(CLIENTS)] = present[(index + 2) % len(CLIENTS)] = True
        weights = rng.uniform(0.5, 3, len(CLIENTS)) * present
        shares = weights / weights.sum()
        dropped = drop * (rng.random(len(CLIENTS)) < 0.3)
        updates = tuple(
            ClientUpdate(
                name,
                float(shares[i]),
                Params(layout, normal(seed + 1, index, i, size=layout.size)),
                keep_probability=0.7 if drop else 1.0,
                kept=not dropped[i],
            )
            for i, name in enumerate(CLIENTS)
            if present[i]
        )
        rounds.append(Round(index, updates))
    return rounds


def flat_of(update: ClientUpdate) -> Floats:
    assert update.delta is not None
    return update.delta.flat.astype(np.float64)


def mean_without(round_: Round, gone: frozenset[str]) -> Floats:
    """What the server would have added without some clients, all updates known."""
    rest = [update for update in round_.updates if update.client not in gone]
    total = np.zeros(len(flat_of(round_.updates[0])))
    shares = sum(update.share for update in rest)
    for update in rest:
        total += update.share / shares * flat_of(update)
    return total


def difference(rounds: Sequence[Round], gone: frozenset[str], damping: float) -> Floats:
    """The recursion of METHOD.md 2 for histories in which everything was kept."""
    delta = np.zeros(len(flat_of(rounds[0].updates[0])))
    for round_ in rounds:
        gamma = mean_without(round_, gone) - mean_without(round_, frozenset())
        delta = (1 - damping) * delta + gamma
    return delta


def recorded(ledger: WritableLedger, rounds: Sequence[Round]) -> list[Flat]:
    """Append rounds; return the model before each of them and after the last."""
    found = [ledger.final.params.flat.copy()]
    for round_ in rounds:
        ledger.append(round_)
        found.append(ledger.final.params.flat.copy())
    return found


def steps_of(ledger: WritableLedger | LedgerReader) -> list[Flat]:
    return [vector(ledger, VectorRef(i)) for i in range(ledger.num_rounds)]


def close_to(found: Any, expected: Any, scale: float = 1) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5 * scale)


def assert_adds_up(ledger: WritableLedger) -> None:
    """The initial model, all steps and all adjustments give the model now."""
    total = ledger.initial.params.flat.astype(np.float64)
    for step in steps_of(ledger):
        total += step
    for adjustment in ledger.adjustments().values():
        total += adjustment
    close_to(ledger.final.params.flat, total, scale=10)


def without(round_: Round, gone: set[str]) -> Round:
    """The round as it is when some clients stay away from the start."""
    rest = [u for u in round_.updates if u.client not in gone]
    total = sum(update.share for update in rest)
    return replace(
        round_, updates=tuple(replace(u, share=u.share / total) for u in rest)
    )


def alone(index: int, *names: str) -> Round:
    share = 1 / len(names)
    return Round(
        index,
        tuple(
            ClientUpdate(name, share, Params(LAYOUT, normal(60, index, i)))
            for i, name in enumerate(names)
        ),
    )
