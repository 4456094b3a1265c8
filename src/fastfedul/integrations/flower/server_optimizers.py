"""Flower's strategies with a server optimizer: FedAvgM, FedAdam, FedYogi, FedAdagrad.

The ledger computes the step and keeps the state. A strategy gets the ledger's state
before each round, so that its own result can be compared, also after a forgetting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import (
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedYogi,
    Strategy,
)
from flwr.serverapp.strategy.fedopt import FedOpt

from fastfedul.federation.server_optimizers import ServerOptimizer
from fastfedul.params import Array, Flat, Params
from fastfedul.records import Model, ServerState

WITH_OPTIMIZER = (FedAvgM, FedOpt)
"""Flower's classes of strategies that have a server optimizer."""


def _momentum(strategy: FedAvgM) -> ServerOptimizer:
    lr, momentum = strategy.server_learning_rate, strategy.server_momentum
    return ServerOptimizer.make("momentum", lr=lr, momentum=momentum)


def _adaptive(name: str) -> Callable[[FedOpt], ServerOptimizer]:
    def make(strategy: FedOpt) -> ServerOptimizer:
        betas = {"beta1": strategy.beta_1, "beta2": strategy.beta_2}
        own = {} if name == "adagrad" else betas
        return ServerOptimizer.make(name, lr=strategy.eta, tau=strategy.tau, **own)

    return make


_MAKERS: Mapping[object, Callable[..., ServerOptimizer]] = {
    FedAvgM.aggregate_train: _momentum,
    FedAdam.aggregate_train: _adaptive("adam"),
    FedYogi.aggregate_train: _adaptive("yogi"),
    FedAdagrad.aggregate_train: _adaptive("adagrad"),
}
"""Makers of optimizers, by the function of Flower that aggregates."""


def optimizer_of(strategy: Strategy) -> ServerOptimizer | None:
    """Return the server optimizer of a strategy; None if it has none of Flower's.

    Raises:
        InvalidInputError: If a setting of the optimizer makes no sense.
    """
    if "aggregate_train" in vars(strategy):
        return None
    make = _MAKERS.get(type(strategy).aggregate_train)
    return None if make is None else make(strategy)


def server_step(mean: Flat, before: Model, optimizer: ServerOptimizer | None) -> Flat:
    """Return the step that the ledger's server will add to a model.

    Args:
        mean: Mean of the round's updates.
        before: The model before the round, with the server's state.
        optimizer: The server optimizer; None for a server that adds the mean.
    """
    if optimizer is None:
        return mean
    state = before.server or optimizer.start(len(mean))
    return optimizer.move(state.vectors, mean, state.steps)[1]


def give_state(strategy: Strategy, before: Model, arrays: ArrayRecord) -> int:
    """Give the ledger's state to a strategy; return the round as its optimizer counts.

    Args:
        strategy: A strategy with one of Flower's server optimizers.
        before: The model before the round, with the server's state.
        arrays: The same model as Flower's arrays.
    """
    state = before.server
    own = () if state is None else state.vectors
    vectors = [_named(vector, before, arrays) for vector in own]
    if isinstance(strategy, FedAvgM):
        strategy.current_arrays = ArrayRecord(dict(arrays))
        # Flower's pseudo-gradient has the opposite sign of an update.
        strategy.momentum_vector = (
            [-vector for vector in vectors[0].values()] if vectors else None
        )
    elif isinstance(strategy, FedOpt):
        strategy.m_t = vectors[0] if len(vectors) == 2 else None
        strategy.v_t = vectors[-1] if vectors else None
    return _steps(state) + 1


def _steps(state: ServerState | None) -> int:
    return 0 if state is None else state.steps


def _named(vector: Flat, model: Model, arrays: ArrayRecord) -> dict[str, Array]:
    """Return a vector of the state as arrays by name; zeros for buffers."""
    learned = dict(Params(model.params.layout, vector))
    return {
        name: learned[name].astype(np.float32)
        if name in learned
        else np.zeros(array.shape, np.float32)
        for name, array in arrays.items()
    }
