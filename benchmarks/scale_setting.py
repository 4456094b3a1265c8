"""Sizes of the benchmark of scale, its models and its made-up rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.measuring import client_name
from fastfedul import ClientUpdate, LocalSGD, Params, Round
from fastfedul.params import Flat, Layout, Slot
from fastfedul.rng import stream

LOCAL = LocalSGD(lr=0.05, momentum=0.0, batch_size=32, epochs=1)
TARGET = client_name(0)

Figures = dict[str, float]
"""Figures by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much of everything.

    Attributes:
        parameters: Sizes of the models from whose ledgers a client is forgotten.
        rounds_of: Rounds of each of these ledgers.
        written: Models that a round of ten clients is appended for.
        rounds: Rounds of the long ledger, of 256 parameters.
        early: Rounds after which the first appends of the long ledger are timed.
        clients: Clients of the ledger of many.
        drawn: Participants of each of its rounds.
        wide_clients: Participants of the one wide round.
        wide_values: Parameters of the model of the wide round.
        phones: Clients, participants, rounds and parameters of a phone federation.
        recorded: Model of the rounds that are recorded through Flower.
        sampled: Updates from which the algebra at the largest model is timed.
        repetitions: How often short things are timed.
    """

    parameters: tuple[str, ...] = ("1e6", "1e7", "1e8")
    rounds_of: Mapping[str, int]
    written: tuple[str, ...] = ("1e6", "1e7", "1e8")
    rounds: int = 50_000
    early: int = 100
    clients: int = 10_000
    client_rounds: int = 1_000
    drawn: int = 100
    wide_clients: int = 10_000
    wide_values: int = 100_000
    phones: tuple[int, int, int, int] = (10_000, 100, 300, 100_000)
    recorded: str = "1e7"
    sampled: int = 32
    repetitions: int = 5


FULL = Sizes(rounds_of={"1e6": 10, "1e7": 5, "1e8": 2})
QUICK = Sizes(
    parameters=("1e6",),
    rounds_of={"1e6": 2},
    written=("1e6",),
    rounds=600,
    clients=300,
    client_rounds=20,
    drawn=30,
    wide_clients=200,
    wide_values=1_000,
    phones=(300, 30, 10, 2_000),
    recorded="1e6",
    sampled=8,
    repetitions=2,
)

_LAYERS: dict[str, tuple[tuple[int, ...], ...]] = {
    "1e6": ((512, 1024), (512, 896), (512,), (100, 170)),
    "1e7": ((512, 512, 3, 3), (2048, 2048), (2048, 1600), (2048,), (100, 500)),
    "1e8": (
        (50_000, 768),
        (4096, 4096),
        (4096, 4096),
        (512, 512, 3, 3),
        (4096, 4096),
        (4096,),
        (2048, 4096),
    ),
}
"""Layers as networks have them: wide, convolutional, an embedding, biases."""


def layout_of(name: str) -> Layout:
    """Return the layout of a model of about so many parameters."""
    shapes = _LAYERS[name]
    return Layout(
        tuple(Slot(f"layer{i}", shape, "float32") for i, shape in enumerate(shapes))
    )


def made_up(
    layout: Layout, num_clients: int, index: int, bases: Sequence[Flat]
) -> Round:
    """Return a round of equal shares, each update a shifted copy of a base."""
    updates = []
    for client in range(num_clients):
        number = index * num_clients + client
        base = bases[number % len(bases)]
        delta = Params(layout, np.roll(base, 1 + 31 * number))
        updates.append(ClientUpdate(client_name(client), 1 / num_clients, delta))
    return Round(index, tuple(updates), local=LOCAL)


def random_bases(layout: Layout) -> list[Flat]:
    """Return a few random vectors of the size of a model."""
    rng = stream(0, "scale", layout.size)
    return [
        rng.standard_normal(layout.size, dtype=np.float32) * np.float32(1e-3)
        for _ in range(2)
    ]
