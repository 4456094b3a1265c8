"""One client's part of a round, in whichever process it is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fastfedul.data.dataset import ClientData, to_model_input
from fastfedul.errors import FastFedULError
from fastfedul.federation.trainer import (
    LocalTraining,
    Logits,
    Trainer,
    TrainingError,
)
from fastfedul.params import Array, Params
from fastfedul.records import Model
from fastfedul.rng import name_key, stream

USERS_OWN = (Exception, SystemExit)
"""Errors of a user's own code; a model may even try to end the program."""


@dataclass(frozen=True, slots=True)
class LocalResult:
    """A client's result of a round.

    Attributes:
        delta: The update: local minus global parameters.
        buffers: Buffers of the local model.
    """

    delta: Params
    buffers: Mapping[str, Array]


def train_client(
    trainer: Trainer,
    model: Model,
    data: ClientData,
    index: int,
    seed: int,
    local: LocalTraining | None = None,
) -> LocalResult:
    """Return a client's result of a round, a function of the arguments alone.

    Raises:
        TrainingError: If the training failed.
    """
    rng = stream(seed, "local training", index, name_key(data.client))
    try:
        inputs = to_model_input(data.images)
        trained = trainer.train(model, inputs, data.labels, rng, local)
    except FastFedULError:
        raise
    except USERS_OWN as error:
        raise TrainingError(
            f"the training of {data.client} failed in round {index}: {one_line(error)}"
        ) from error
    # Infinite values are for the server to find, as in a reply from anywhere else.
    with np.errstate(over="ignore", invalid="ignore"):
        delta = trained.params.flat - model.params.flat
    return LocalResult(Params(model.params.layout, delta), trained.buffers)


def predict_part(
    trainer: Trainer, model: Model, data: ClientData, begin: int, end: int
) -> Logits:
    """Return a model's logits for the images from `begin` to before `end`.

    Raises:
        TrainingError: If the model cannot be applied to them.
    """
    try:
        return trainer.predict(model, to_model_input(data.images[begin:end]))
    except FastFedULError:
        raise
    except USERS_OWN as error:
        raise TrainingError(
            f"the model could not be applied to {data.client}: {one_line(error)}"
        ) from error


def one_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
