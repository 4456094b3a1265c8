"""A trainer without a framework, as `package.module:function` names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fastfedul import Model, Params
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
