"""Training that a method does itself: SGD with momentum, and further rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from fastfedul.data.dataset import Indices
from fastfedul.errors import UnlearnRefusedError
from fastfedul.federation.clients import Federation
from fastfedul.federation.rounds import LocalWork, model_after, run_rounds
from fastfedul.federation.trainer import GradientTrainer, TrainingError
from fastfedul.methods.protocol import Method, UnlearnRequest, rule_of
from fastfedul.params import Flat, Params
from fastfedul.records import Model


def gradient_trainer(federation: Federation, method: Method) -> GradientTrainer:
    """Return the federation's trainer for a method that needs gradients.

    Raises:
        UnlearnRefusedError: If the trainer gives none.
    """
    trainer = federation.trainer
    if not isinstance(trainer, GradientTrainer):
        raise UnlearnRefusedError(
            f"{method.name} needs gradients, and {type(trainer).__name__} gives none"
        )
    return trainer


def momentum_steps(
    model: Model,
    direction: Callable[[Model, Indices], Flat],
    num_examples: int,
    *,
    rate: float,
    momentum: float,
    batch_size: int,
    epochs: int,
    rng: np.random.Generator,
    project: Callable[[Flat], Flat] | None = None,
) -> Iterator[Model]:
    """Yield the model after each step of SGD; its buffers stay as they are.

    All batches of an epoch have nearly the same size, because batch normalisation
    cannot use a single example.

    Args:
        model: Model to start from.
        direction: Returns the way to go at a model, from the examples at some places.
        num_examples: Number of examples.
        rate: Learning rate.
        momentum: Share of the last step's direction that the next step keeps.
        batch_size: Largest number of examples of a step.
        epochs: Number of passes over the examples.
        rng: Decides the order of the examples.
        project: Returns the nearest parameters that are allowed.

    Raises:
        TrainingError: If the parameters become infinite.
    """
    velocity = np.zeros_like(model.params.flat)
    num_batches = math.ceil(num_examples / batch_size)
    for _ in range(int(epochs)):
        for batch in np.array_split(rng.permutation(num_examples), num_batches):
            velocity = velocity * np.float32(momentum) + direction(model, batch)
            flat = model.params.flat + velocity * np.float32(rate)
            if project is not None:
                flat = project(flat)
            if not np.isfinite(flat).all():
                raise TrainingError(
                    "the method's own training ran away to infinite values; use a "
                    "smaller learning rate"
                )
            model = Model(Params(model.params.layout, flat), model.buffers)
            yield model


def train_on(
    request: UnlearnRequest,
    federation: Federation,
    model: Model,
    num_rounds: int,
    work: LocalWork,
) -> Model:
    """Return the model after further rounds by the clients that stay.

    A server optimizer starts anew: its state still has the clients to forget in it.

    Args:
        request: The request; its clients are absent.
        federation: The federation.
        model: Model to start from.
        num_rounds: Number of rounds, counted on from the ledger's last one.
        work: Trains the clients.
    """
    start = request.ledger.num_rounds
    rounds = run_rounds(
        work,
        federation.clients.sizes,
        federation.schedule,
        model=Model(model.params, model.buffers),
        start=start,
        stop=start + num_rounds,
        absent=request.gone,
        scales=federation.scales,
        rule=rule_of(request.ledger),
        optimizer=request.ledger.settings.optimizer,
    )
    return model_after(rounds, model)
