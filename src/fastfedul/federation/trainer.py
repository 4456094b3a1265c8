"""The interface of trainers, one per framework: NumPy in, NumPy out.

A function that makes a user's own trainer is called with the keywords `shape`,
`num_classes`, `model` and `local`; see `TrainerMaker`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from fastfedul.errors import FastFedULError, InvalidInputError
from fastfedul.params import Array, Flat, Layout
from fastfedul.records import LocalSGD, Model

Inputs = npt.NDArray[Any]
"""Input of a model: float32 images or features, or int64 tokens."""

Labels = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]


class TrainingError(FastFedULError):
    """A client could not be trained; the rounds before are untouched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTraining:
    """How a client trains in a round: SGD over its own examples, batch by batch.

    Attributes:
        epochs: How often it goes through its examples; 0.5 for half of the batches.
        batch_size: Examples of a step; the last batch of an epoch may be smaller, and a
            single example that is left over joins the batch before.
        lr: Learning rate.
        momentum: Share of the last step's direction that is kept; starts again in
            every round.
        weight_decay: Multiple of the parameters that is added to their gradient.
    """

    epochs: float = 1
    batch_size: int = 32
    lr: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epochs) and self.epochs > 0):
            raise InvalidInputError(
                f"the number of epochs is {self.epochs:g}; choose 1 or more"
            )
        if self.batch_size < 1:
            raise InvalidInputError(
                f"the batch size is {self.batch_size}; choose 1 or more"
            )
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

    @property
    def sgd(self) -> LocalSGD:
        """The settings that the ledger records."""
        return LocalSGD(
            lr=self.lr,
            momentum=self.momentum,
            batch_size=self.batch_size,
            epochs=self.epochs,
        )


AUTO = "auto"
"""The name of whichever network suits the images."""


class Trainer(Protocol):
    """Trains and applies one kind of model.

    It must be picklable, because worker processes get a copy, and its answers must
    depend on nothing but the arguments: not on earlier calls, nor on the process.
    """

    def initial(self, seed: int) -> Model:
        """Return the model to start from, a function of the seed alone."""

    def train(
        self,
        model: Model,
        inputs: Inputs,
        labels: Labels,
        rng: np.random.Generator,
        local: LocalTraining | None = None,
    ) -> Model:
        """Return the model after local training; the given one stays as it is.

        Args:
            model: Where to start from.
            inputs: Images as a model sees them, (number, channels, height, width); or
                the rows of data that are no images, (number, values).
            labels: Their class numbers.
            rng: The only source of chance, for the order of the examples and the like.
            local: How to train; None for the way of the federation.
        """

    def predict(self, model: Model, inputs: Inputs) -> Logits:
        """Return a row per example, a column per class; the largest is the answer."""


class TrainerMaker(Protocol):
    """A function that makes a trainer: an entry point, or a user's own."""

    def __call__(
        self,
        *,
        shape: tuple[int, ...],
        num_classes: int,
        model: str = AUTO,
        local: LocalTraining = ...,
    ) -> Trainer:
        """Return the trainer of a run.

        Args:
            shape: Shape of one example: height, width and channels of an image, or the
                number of values of a row.
            num_classes: How many classes the labels have.
            model: Value of the option `--model`.
            local: How a client trains, from the options.
        """


class ImageTrainer(Trainer, Protocol):
    """A trainer of a network for images of one shape."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Height, width and channels of the images."""

    @property
    def layout(self) -> Layout:
        """Names and shapes of the network's parameters."""


@runtime_checkable
class GradientTrainer(Trainer, Protocol):
    """A trainer that gives gradients, for methods that take steps of their own."""

    def gradient(
        self, model: Model, inputs: Inputs, targets: Array, temperature: float = 1.0
    ) -> tuple[float, Flat]:
        """Return the mean cross-entropy and its gradient in the parameters.

        Args:
            model: Where.
            inputs: Images as a model sees them.
            targets: Class numbers, or a row of class probabilities for each image.
            temperature: Divisor of the logits before the softmax.
        """


@runtime_checkable
class ChannelTrainer(Trainer, Protocol):
    """A trainer whose model has convolutions that can be looked into."""

    def channels(self, model: Model, inputs: Inputs) -> dict[str, Array]:
        """Return how active each channel of each convolution is on each image.

        The activation is rectified and averaged over the image: a row per image, a
        column per channel, under the name that the layer's parameters begin with.
        """
