"""A trainer of one's own in NumPy: rows of features, a weighted loss, Nesterov's SGD.

    fastfedul train run --data tumours.npz --trainer tumour_trainer:make_trainer

`make_trainer` is called once. A trainer is a description: it is sent to other
processes, and each of its answers depends on nothing but the arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fastfedul import InvalidInputError, Model, Params
from fastfedul.federation.trainer import AUTO, LocalTraining
from fastfedul.rng import stream

Array = npt.NDArray[Any]
Weights = dict[str, Array]

MISSED_TUMOUR = 2.0
"""How much a malignant row (label 0) counts in the loss, beside a benign one."""


@dataclass(frozen=True, kw_only=True)
class TumourTrainer:
    """Trains a network with one hidden layer.

    Attributes:
        num_features: Values of a row.
        num_classes: How many scores the network gives.
        num_hidden: Width of the hidden layer.
        local: How a client trains.
    """

    num_features: int
    num_classes: int
    num_hidden: int = 16
    local: LocalTraining = field(default_factory=LocalTraining)

    def initial(self, seed: int) -> Model:
        """Return the model to start from, a function of the seed alone."""
        rng = stream(seed, "initial model")
        sides = (self.num_features, self.num_hidden, self.num_classes)
        weights = {
            name: rng.normal(0, before**-0.5, (before, after))
            for name, before, after in zip(
                ("hidden", "out"), sides[:-1], sides[1:], strict=True
            )
        }
        return Model(Params.of({**weights, "bias": np.zeros(self.num_hidden)}))

    def train(
        self,
        model: Model,
        inputs: Array,
        labels: Array,
        rng: np.random.Generator,
        local: LocalTraining | None = None,
    ) -> Model:
        """Return the model after local training; the given one stays as it is."""
        how = local or self.local
        weights = {name: np.array(value) for name, value in model.params.items()}
        speed = {name: np.zeros_like(value) for name, value in weights.items()}
        per_epoch = -(-len(labels) // how.batch_size)
        order: list[int] = []
        for _ in range(max(1, round(how.epochs * per_epoch))):
            order = order or rng.permutation(len(labels)).tolist()
            batch, order = order[: how.batch_size], order[how.batch_size :]
            slope = self._slope(weights, inputs[batch], labels[batch])
            for name, value in weights.items():
                step = slope[name] + how.weight_decay * value
                speed[name] = how.momentum * speed[name] + step
                value -= how.lr * (step + how.momentum * speed[name])
        return Model(Params.of(weights, model.params.layout))

    def predict(self, model: Model, inputs: Array) -> npt.NDArray[np.float32]:
        """Return a row per example and a column per class."""
        scores, _ = _apply(dict(model.params), inputs)
        return scores.astype(np.float32)

    def _slope(self, weights: Weights, inputs: Array, labels: Array) -> Weights:
        """Return the gradient of the weighted cross-entropy."""
        scores, hidden = _apply(weights, inputs)
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        counts = np.where(labels == 0, MISSED_TUMOUR, 1.0)[:, None]
        error = counts * (chances - np.eye(self.num_classes)[labels]) / counts.sum()
        back = (error @ weights["out"].T) * (1 - hidden**2)
        return {
            "hidden": inputs.T @ back,
            "bias": back.sum(axis=0),
            "out": hidden.T @ error,
        }


def make_trainer(
    *, shape: tuple[int, ...], num_classes: int, model: str, local: LocalTraining
) -> TumourTrainer:
    """Return the trainer of a run.

    Args:
        shape: Shape of an example; of a table, the number of columns.
        num_classes: How many classes the labels have.
        model: What `--model` says; here the width of the hidden layer.
        local: How a client trains, from the options.
    """
    if len(shape) != 1:
        raise InvalidInputError(f"this trainer takes rows of a table, not {shape}")
    if model != AUTO and not model.isdecimal():
        raise InvalidInputError(f"--model is {model!r}; give a width, such as 16")
    return TumourTrainer(
        num_features=shape[0],
        num_classes=num_classes,
        num_hidden=16 if model == AUTO else int(model),
        local=local,
    )


def _apply(weights: Weights, inputs: Array) -> tuple[Array, Array]:
    """Return the scores and the hidden layer."""
    hidden = np.tanh(inputs @ weights["hidden"] + weights["bias"])
    return hidden @ weights["out"], hidden
