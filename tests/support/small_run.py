"""A small poisoned federation on digits, and others that are trained in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fastfedul.data.dataset import to_model_input
from fastfedul.federation.clients import Clients, Federation
from fastfedul.federation.workers.pool import Workers
from fastfedul.ledger.memory import MemoryLedger
from fastfedul.methods.protocol import UnlearnRequest
from fastfedul.records import ClientId, Model
from fastfedul.runs.config import RunConfig
from fastfedul.runs.preparation import (
    Prepared,
    federation_for,
    prepare,
    retrain,
    rounds_of,
    start_workers,
)

TARGET: ClientId = "client-0"
NORMALISED = """
from torch import nn


def build(image_shape, num_classes):
    height, width, channels = image_shape
    size = height * width * channels
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(size), nn.Linear(size, 10))
"""
"""The code of a network with buffers."""


@dataclass(frozen=True)
class TrainedRun:
    """A trained run: everything kept, the federation alive."""

    prepared: Prepared
    ledger: MemoryLedger
    federation: Federation

    @property
    def workers(self) -> Workers:
        """The clients, who train when they are asked."""
        return self.federation.clients.workers

    def request(self, *forget: ClientId) -> UnlearnRequest:
        """Return a request with a count of client calls of its own."""
        clients = self.federation.clients
        federation = replace(
            self.federation, clients=Clients(clients.workers, clients.data)
        )
        return UnlearnRequest(self.ledger, frozenset(forget or {TARGET}), federation)

    def main(self, model: Model) -> float:
        """Return the accuracy on clean test images."""
        data = self.prepared.dataset
        return self._accuracy(model, data.test_images, data.test_labels)

    def backdoor(self, model: Model) -> float:
        """Return the success rate of the attack."""
        data = self.prepared.backdoor
        return self._accuracy(model, data.images, data.labels)

    def _accuracy(self, model: Model, images: np.ndarray, labels: np.ndarray) -> float:
        logits = self.prepared.trainer.predict(model, to_model_input(images))
        return float(np.mean(logits.argmax(axis=1) == labels))


@dataclass(frozen=True)
class SmallRun(TrainedRun):
    """A run in which one client is poisoned, and the model retrained without it."""

    retrained: Model


def trained_in_memory(config: RunConfig) -> TrainedRun:
    """Return a run after all rounds of its configuration."""
    prepared = prepare(config)
    workers = start_workers(prepared)
    model = workers.initial(config.seed)
    ledger = MemoryLedger.create(model)
    for one in rounds_of(prepared, workers, model, 0, config.rounds, frozenset()):
        ledger.append(one.round)
    return TrainedRun(prepared, ledger, federation_for(prepared, workers))


def poisoned_digits() -> SmallRun:
    """Return a run of six clients on digits, of which the target is poisoned."""
    config = RunConfig.from_options(
        clients=6,
        rounds=8,
        epochs=2,
        attack="pixel",
        poison_ratio=0.5,
        server_images=150,
        workers=1,
        seed=11,
    )
    run = trained_in_memory(config)
    retrained = retrain(run.prepared, run.workers, {TARGET})
    return SmallRun(run.prepared, run.ledger, run.federation, retrained)
