"""Small ledgers on disk that are the same in every process, and what they answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    FastFedUL,
    FastFedULError,
    Kronecker,
    LedgerError,
    LedgerReader,
    LocalSGD,
    Model,
    Params,
    Round,
    Scalar,
    UnlearnRequest,
    verify,
)
from fastfedul.federation.rounds import average_buffers
from fastfedul.ledger.store.array_files import SET_ASIDE
from fastfedul.params import Array, Flat, Layout
from fastfedul.records import History
from fastfedul.rng import stream

LAYOUT = Layout.of({"weight": np.zeros((5, 6)), "bias": np.zeros(7)})
CLIENTS = ("a", "b", "c", "d")
LOCAL = LocalSGD(lr=0.1, momentum=0.9, batch_size=32, epochs=2)


def vector(*key: int, size: int = LAYOUT.size) -> Flat:
    return stream(5, "disk", *key).normal(size=size).astype(np.float32)


def initial_model(layout: Layout = LAYOUT) -> Model:
    return Model(Params(layout, vector(0, size=layout.size)), {"seen": np.arange(3)})


def round_of(
    index: int,
    *,
    layout: Layout = LAYOUT,
    clients: tuple[str, ...] = CLIENTS,
    dropped: frozenset[str] = frozenset(),
) -> Round:
    """The round with this number: always the same, in every process.

    How the clients trained is known of every other round.
    """
    updates = tuple(
        ClientUpdate(
            name,
            1 / len(clients),
            Params(layout, vector(1, index, i, size=layout.size)),
            keep_probability=0.5 if name in dropped else 1.0,
            kept=name not in dropped,
        )
        for i, name in enumerate(clients)
    )
    return Round(index, updates, local=None if index % 2 else LOCAL)


def with_buffers() -> Model:
    """The initial model with a statistic and a counter."""
    buffers: dict[str, Array] = {
        "norm.mean": np.zeros((2, 3), np.float32),
        "norm.count": np.array(0),
    }
    return Model(initial_model().params, buffers)


def buffers_of(index: int, client: str) -> dict[str, Array]:
    """The buffers that a client sends in a round."""
    number = 10 * index + CLIENTS.index(client)
    return {
        "norm.mean": np.full((2, 3), number, np.float32),
        "norm.count": np.array(number),
    }


def round_with_buffers(index: int, clients: tuple[str, ...] = CLIENTS) -> Round:
    """The round with this number, in which every client sends its buffers."""
    plain = round_of(index, clients=clients)
    updates = tuple(
        replace(update, buffers=buffers_of(index, update.client))
        for update in plain.updates
    )
    sent = [buffers_of(index, name) for name in clients]
    weights = [update.share for update in updates]
    after = average_buffers(sent, weights, with_buffers().buffers)
    return replace(plain, updates=updates, buffers=after)


def record(path: Path, num_rounds: int, *, history: History = "rounds") -> Path:
    """Return a closed ledger with the first rounds of `round_of`."""
    with DiskLedger.create(path, initial_model(), history=history) as ledger:
        for index in range(num_rounds):
            ledger.append(round_of(index))
    return path


def assert_refused(path: Path, *named: str) -> list[LedgerError]:
    """The ledger opens neither for reading nor for writing, and stays as it is."""
    before, errors = snapshot_of(path), []
    for open_ledger in (LedgerReader, DiskLedger):
        with pytest.raises(LedgerError) as caught:
            open_ledger(path)
        assert_one_line(caught, *named)
        errors.append(caught.value)
    assert snapshot_of(path) == before
    return errors


def answer(ledger: LedgerReader, *clients: str) -> tuple[object, ...]:
    """What forgetting says, to the bit.

    From rounds by the paper's method, which reads nobody else's updates.
    """
    of_sums = ledger.settings.history == "sums"
    return details_of(
        ledger, FastFedUL(skew=Kronecker() if of_sums else Scalar(0.07)), *clients
    )


def details_of(
    ledger: LedgerReader, method: FastFedUL, *clients: str
) -> tuple[object, ...]:
    result = method(UnlearnRequest(ledger, frozenset(clients or ("a",))))
    return (
        result.params.flat.tobytes(),
        result.delta.flat.tobytes(),
        result.coverage,
        result.gamma_norms,
        result.standard_error,
        result.bound,
        result.rounds,
    )


def assert_one_line(caught: pytest.ExceptionInfo[FastFedULError], *named: str) -> None:
    message = str(caught.value)
    assert "\n" not in message
    for word in named:
        assert word in message, message


def snapshot_of(folder: Path) -> dict[str, bytes]:
    """Every file of a ledger nobody has open, but for files that were set aside."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock" and path.parent.name != SET_ASIDE
    }


def models_by_hand() -> Iterator[Array]:
    """The model after 0, 1, 2... rounds."""
    flat = vector(0)
    for index in itertools.count():
        yield flat
        step = np.zeros(LAYOUT.size, np.float32)
        for i in range(len(CLIENTS)):
            step += vector(1, index, i) * np.float32(1 / len(CLIENTS))
        flat = flat + step


def own_by_hand(client: int, num_rounds: int) -> Array:
    """What forgetting one client alone takes after so many rounds, nobody reacting."""
    own = np.zeros(LAYOUT.size)
    for index in range(num_rounds):
        deltas = [vector(1, index, i) for i in range(len(CLIENTS))]
        own += (np.mean(deltas, axis=0) - deltas[client]) / (len(CLIENTS) - 1)
    return own


def problems_of(path: Path) -> tuple[str, ...]:
    """What verify says, or what the ledger says when it does not even open."""
    try:
        with LedgerReader(path) as reader:
            return verify(reader).problems
    except LedgerError as error:
        return (str(error),)
