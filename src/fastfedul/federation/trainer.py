"""What a framework provides so that clients can train: NumPy in, NumPy out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fastfedul.errors import FastFedULError, InvalidInputError
from fastfedul.records import Model

Inputs = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]


class TrainingError(FastFedULError):
    """A client could not be trained; the rounds before are untouched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTraining:
    """How a client trains in a round: SGD over its own examples, batch by batch.

    Attributes:
        epochs: How often it goes through its examples.
        batch_size: Examples of a step; the last batch of an epoch may be smaller.
        lr: Learning rate.
        momentum: Share of the last step's direction that is kept; starts anew in
            every round.
        weight_decay: Multiple of the parameters that is added to their gradient.
    """

    epochs: int = 1
    batch_size: int = 32
    lr: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("epochs", self.epochs), ("batch size", self.batch_size)):
            if value < 1:
                raise InvalidInputError(f"the {name} is {value}; choose 1 or more")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise InvalidInputError(
                f"the learning rate is {self.lr:g}; choose a number above 0"
            )
        if not 0 <= self.momentum < 1:
            raise InvalidInputError(
                f"the momentum is {self.momentum:g}; choose 0 or more and below 1"
            )
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise InvalidInputError(
                f"the weight decay is {self.weight_decay:g}; choose 0 or more"
            )


class Trainer(Protocol):
    """Trains and applies one kind of model.

    It must be picklable, because worker processes get a copy, and its answers must
    depend on nothing but the arguments: not on earlier calls, nor on the process.
    """

    def initial(self, seed: int) -> Model:
        """Return the model to start from, a function of the seed alone."""

    def train(
        self, model: Model, inputs: Inputs, labels: Labels, rng: np.random.Generator
    ) -> Model:
        """Return the model after local training; the given one stays as it is.

        Args:
            model: Where to start from.
            inputs: Images as a model sees them: (number, channels, height, width).
            labels: Their class numbers.
            rng: The only source of chance, for the order of the examples and the like.
        """

    def predict(self, model: Model, inputs: Inputs) -> Logits:
        """Return a row per image and a column per class; the largest is the answer."""
