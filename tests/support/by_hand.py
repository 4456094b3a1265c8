"""Models of two parameters, ledgers in memory, and a trainer to follow by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fastfedul.federation.trainer import Inputs, Labels, LocalTraining, Logits
from fastfedul.ledger.memory import MemoryLedger
from fastfedul.params import Array, Flat, Params
from fastfedul.records import ClientUpdate, Model, Round

LAYOUT = Params.of({"w": np.zeros(2, np.float32)}).layout
Updates = Mapping[str, tuple[float, tuple[float, ...]]]
"""A round: the share and the update of each client."""


def flat(*values: float) -> Flat:
    return np.array(values, np.float32)


def params(*values: float) -> Params:
    return Params(LAYOUT, flat(*values))


def model_at(*values: float) -> Model:
    return Model(params(*values))


def ledger_from(
    start: Params, *rounds: Updates, aggregation: str = "mean"
) -> MemoryLedger:
    """Return a ledger of rounds that starts from these parameters."""
    ledger = MemoryLedger.create(Model(start), aggregation=aggregation)
    for index, updates in enumerate(rounds):
        ledger.append(
            Round(
                index,
                tuple(
                    ClientUpdate(name, share, Params(start.layout, flat(*values)))
                    for name, (share, values) in updates.items()
                ),
            )
        )
    return ledger


@dataclass(frozen=True)
class Slope:
    """A trainer whose loss rises the same way everywhere.

    Attributes:
        rise: Its gradient.
        temperatures: The temperature of each gradient that was asked for.
    """

    rise: tuple[float, float] = (0.0, 0.0)
    temperatures: list[float] = field(default_factory=list)

    def initial(self, seed: int) -> Model:
        return model_at(100, 0)

    def train(
        self,
        model: Model,
        inputs: Inputs,
        labels: Labels,
        rng: np.random.Generator,
        local: LocalTraining | None = None,
    ) -> Model:
        return model

    def predict(self, model: Model, inputs: Inputs) -> Logits:
        return np.zeros((len(inputs), 2), np.float32)

    def gradient(
        self, model: Model, inputs: Inputs, targets: Array, temperature: float = 1.0
    ) -> tuple[float, Flat]:
        self.temperatures.append(temperature)
        return 0.0, flat(*self.rise)


class WithoutGradient:
    """A trainer that gives no gradient."""

    initial = Slope.initial
    train = Slope.train
    predict = Slope.predict
