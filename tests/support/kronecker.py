"""Histories of layers of every shape, and what Fast-FedUL removes from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    FastFedUL,
    Kronecker,
    LocalSGD,
    MemoryLedger,
    Model,
    Params,
    Removal,
    Round,
    UnlearnRequest,
)
from fastfedul.ledger.protocol import Ledger, WritableLedger
from fastfedul.params import Layout, Slot

SHAPES: dict[str, tuple[int, ...]] = {
    "conv": (4, 3, 2, 2),
    "bias": (4,),
    "scale": (),
    "dense": (6, 5),
    "embedding": (9, 2),
}
LAYOUT = Layout(tuple(Slot(n, shape, "float32") for n, shape in SHAPES.items()))
NAMES = tuple(f"c{number}" for number in range(6))
TRAINED = LocalSGD(lr=0.1, momentum=0.5, batch_size=16, epochs=2)
ALL = Kronecker("all")
OLD = [[(1.0, 1.0)]]
"""One mark, of the time before the training."""
History = list[list[tuple[str, float, np.ndarray]]]


def params(flat: np.ndarray) -> Params:
    return Params(LAYOUT, flat.astype(np.float32))


def made_up(
    seed: int, *, per_round: int = 6, equal: bool = False, num_rounds: int = 8
) -> History:
    """Rounds with a common course, clients that differ, and any shares."""
    rng = np.random.default_rng(seed)
    own = {name: 0.03 * rng.standard_normal(LAYOUT.size) for name in NAMES}
    rounds: History = []
    for _ in range(num_rounds):
        names = sorted(rng.choice(NAMES, per_round, replace=False).tolist())
        weights = np.ones(per_round) if equal else rng.uniform(0.3, 1.0, per_round)
        course = 0.1 * rng.standard_normal(LAYOUT.size)
        rounds.append(
            [
                (
                    name,
                    float(weight / weights.sum()),
                    (
                        course + own[name] + 0.05 * rng.standard_normal(LAYOUT.size)
                    ).astype(np.float32),
                )
                for name, weight in zip(names, weights, strict=True)
            ]
        )
    return rounds


def rounds_of(
    history: History, local: Sequence[LocalSGD | None] | LocalSGD | None = TRAINED
) -> list[Round]:
    told = local if isinstance(local, Sequence) else [local] * len(history)
    return [
        Round(
            index,
            tuple(ClientUpdate(c, share, params(u)) for c, share, u in updates),
            local=told[index],
        )
        for index, updates in enumerate(history)
    ]


def filled(ledger: WritableLedger, rounds: Sequence[Round]) -> Any:
    for round_ in rounds:
        ledger.append(round_)
    return ledger


def in_memory(rounds: Sequence[Round]) -> MemoryLedger:
    start = Model(params(np.ones(LAYOUT.size)))
    found: MemoryLedger = filled(MemoryLedger.create(start), rounds)
    return found


def on_disk(path: Path, rounds: Sequence[Round], **options: Any) -> DiskLedger:
    start = Model(params(np.ones(LAYOUT.size)))
    found: DiskLedger = filled(DiskLedger.create(path, start, **options), rounds)
    return found


def removal(ledger: Ledger, *clients: str, skew: Any = ALL) -> Removal:
    return FastFedUL(skew=skew)(UnlearnRequest(ledger, frozenset(clients)))


def gap(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
