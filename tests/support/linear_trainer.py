"""A trainer without a framework, and a ledger outside a run that it evaluates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    EvaluationSource,
    LocalSGD,
    Model,
    Params,
    Round,
)
from fastfedul.params import Array
from fastfedul.rng import stream


@dataclass(frozen=True)
class Linear:
    """Logits that are linear in a row."""

    values: int
    num_classes: int

    def initial(self, seed: int) -> Model:
        return Model(Params.of({"w": np.zeros((self.values, self.num_classes))}))

    def train(self, model: Model, *arguments: Any) -> Model:
        raise NotImplementedError

    def predict(self, model: Model, inputs: Array) -> Array:
        found: Array = inputs @ model.params.exported()["w"]
        return found


def make(*, shape: tuple[int, ...], num_classes: int, **_: Any) -> Linear:
    [values] = shape
    return Linear(values, num_classes)


def examples(count: int = 60) -> tuple[Array, Array]:
    """Rows of two classes that the sign of the first value tells apart."""
    rows = stream(3, "linear examples").normal(size=(count, 4)).astype(np.float32)
    return rows, (rows[:, 0] > 0).astype(np.int64)


def mistaken() -> list[int]:
    return [1, 2, 3]


SOURCE = EvaluationSource(
    model="any", trainer=f"{__name__}:make", test=f"{__name__}:examples"
)
LOCAL = LocalSGD(lr=0.1, momentum=0.0, batch_size=8, epochs=1)


def trained(path: Path) -> Path:
    """Return a ledger of three clients; `eve` teaches the opposite."""
    right = np.zeros((4, 2))
    right[0] = -1, 1
    with DiskLedger.create(path, Model(Params.of({"w": np.zeros((4, 2))}))) as ledger:
        for index in range(6):
            noise = np.random.default_rng(index).normal(size=(3, 4, 2)) * 0.1
            pulls = {"ann": right, "bob": right, "eve": -3 * right}
            updates = tuple(
                ClientUpdate(name, 1 / 3, Params.of({"w": pull + own}))
                for (name, pull), own in zip(pulls.items(), noise, strict=True)
            )
            ledger.append(Round(index, updates, local=LOCAL))
    return path
