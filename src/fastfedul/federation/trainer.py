"""The interface of trainers, one per framework: NumPy in, NumPy out.

A function that makes a user's own trainer is called with the keywords `shape`,
`num_classes`, `model` and `local`; see `TrainerMaker`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from fastfedul.errors import FastFedULError
from fastfedul.limits import require_number
from fastfedul.params import Array, Flat
from fastfedul.records import LocalSGD, Model

Inputs = npt.NDArray[Any]
"""Input of a model: float32 images or features, or int64 tokens."""

Labels = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]


class TrainingError(FastFedULError):
    """A client's training failed; the ledger keeps the rounds before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTraining:
    """A client's training in a round: SGD over its own examples, batch by batch.

    Attributes:
        epochs: Passes of a client over its examples; 0.5 for half of the batches.
        batch_size: Examples of one SGD step. The last batch of an epoch may be smaller;
            a single example that is left over joins the batch before.
        lr: Learning rate of SGD.
        momentum: Share of the last step's direction that SGD keeps, 0 to below 1. The
            direction starts at zero in every round.
        weight_decay: Multiple of the parameters that SGD adds to their gradient.
    """

    epochs: float = 1
    batch_size: int = 32
    lr: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _ = self.sgd
        require_number("weight decay", self.weight_decay, least=0)

    @property
    def sgd(self) -> LocalSGD:
        """The settings that the ledger records, checked."""
        return LocalSGD(
            lr=self.lr,
            momentum=self.momentum,
            batch_size=self.batch_size,
            epochs=self.epochs,
        )


AUTO = "auto"
"""Value of `--model` that lets the trainer choose a network for the images."""


class Trainer(Protocol):
    """Trains and applies one kind of model.

    It must be picklable, because every worker process gets a copy. Its answers must
    depend on the arguments alone: not on earlier calls, nor on the process.
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
            model: Model to start from.
            inputs: Images as a model sees them, (number, channels, height, width); or
                rows of other data, (number, values).
            labels: Class number of each example.
            rng: The only source of chance, for the order of the examples and the like.
            local: Settings of the training; None for the federation's own.
        """

    def predict(self, model: Model, inputs: Inputs) -> Logits:
        """Return a row per example, a column per class; the largest value wins."""


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
            num_classes: Number of classes.
            model: Value of the option `--model`.
            local: Settings of the clients' training, from the options.
        """


@runtime_checkable
class GradientTrainer(Trainer, Protocol):
    """A trainer that gives gradients, for methods that take steps of their own."""

    def gradient(
        self, model: Model, inputs: Inputs, targets: Array, temperature: float = 1.0
    ) -> tuple[float, Flat]:
        """Return the mean cross-entropy and its gradient in the parameters.

        Args:
            model: The model.
            inputs: Images as a model sees them.
            targets: Class numbers, or a row of class probabilities for each image.
            temperature: Divisor of the logits before the softmax.
        """


@runtime_checkable
class ChannelTrainer(Trainer, Protocol):
    """A trainer whose model has convolutions that can be looked into."""

    def channels(self, model: Model, inputs: Inputs) -> dict[str, Array]:
        """Return the activity of each channel of each convolution on each image.

        The activity is the rectified activation, averaged over the image. Each layer
        has a row per image and a column per channel, under the name that the layer's
        parameters begin with.
        """
