"""The estimate of disk agrees with ledgers that are really written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfedul import ClientUpdate, DiskLedger, Model, Params, Round
from fastfedul.errors import InvalidInputError
from fastfedul.ledger.estimate import FederationSize, estimate
from fastfedul.ledger.keeping import Keep
from fastfedul.ledger.store.codec import STORAGE_DTYPES
from fastfedul.records import History, StorageDtype
from fastfedul.rng import stream

SIZE = 50_000


def bytes_on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in (path / "arrays").iterdir())


@pytest.mark.parametrize("store", STORAGE_DTYPES)
@pytest.mark.parametrize("kept", [None, 2])
def test_the_estimate_is_what_a_ledger_takes(
    tmp_path: Path, store: StorageDtype, kept: int | None
) -> None:
    num_clients, num_rounds = 4, 16
    keep = Keep.parse("all" if kept is None else f"uniform:{kept}", seed=0)
    largest = 0
    start = Model(Params.of({"weights": np.zeros(SIZE, np.float32)}))
    with DiskLedger.create(tmp_path / "it", start, update_dtype=store) as ledger:
        for index in range(num_rounds):
            rng = stream(0, "budget test", index)
            updates = tuple(
                ClientUpdate(
                    f"client-{number}",
                    1 / num_clients,
                    Params.of({"weights": rng.normal(size=SIZE).astype(np.float32)}),
                )
                for number in range(num_clients)
            )
            ledger.append(keep(Round(index, updates)))
            largest = max(largest, bytes_on_disk(tmp_path / "it"))
    federation = FederationSize(
        parameters=SIZE,
        clients=num_clients,
        rounds=num_rounds,
        keep="all" if kept is None else f"uniform:{kept}",
    )
    needed = estimate(federation, store)
    arrays = needed.total - needed.index
    assert bytes_on_disk(tmp_path / "it") == pytest.approx(arrays, rel=0.02)
    assert largest <= 1.01 * (needed.total + needed.headroom)


@pytest.mark.parametrize(
    "wrong",
    [
        {"parameters": 0},
        {"clients": -1},
        {"rounds": 0},
        {"per_round": 9},
        {"keep": "some"},
    ],
)
def test_impossible_federations_are_refused(wrong: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"parameters": 10, "clients": 5, "rounds": 3} | wrong
    with pytest.raises(InvalidInputError):
        FederationSize(**sizes)


@pytest.mark.parametrize(
    ("size", "clients", "rounds"), [(300_000, 5, 12), (10_000, 20, 20), (10, 3, 100)]
)
@pytest.mark.parametrize("keep", ["all", "sums"])
def test_no_ledger_takes_much_more_than_was_estimated(
    size: int, clients: int, rounds: int, keep: str, tmp_path: Path
) -> None:
    history: History = "sums" if keep == "sums" else "rounds"
    start = Model(Params.of({"weights": np.zeros(size, np.float32)}))
    path, most = tmp_path / "it", 0
    rng = stream(0, "estimate test", size)
    with DiskLedger.create(path, start, history=history) as ledger:
        for index in range(rounds):
            updates = tuple(
                ClientUpdate(
                    f"client-{number}",
                    1 / clients,
                    Params.of({"weights": rng.normal(size=size).astype(np.float32)}),
                )
                for number in range(clients)
            )
            ledger.append(Round(index, updates))
            files = (p for p in path.rglob("*") if p.is_file())
            most = max(most, sum(file.stat().st_size for file in files))
    federation = FederationSize(
        parameters=size, clients=clients, rounds=rounds, keep=keep
    )
    assert most <= 1.1 * estimate(federation, "float32").total
