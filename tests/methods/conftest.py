"""A small poisoned federation on digits, trained once for all methods."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from fastfedul.data.dataset import to_model_input
from fastfedul.federation.clients import Clients, Federation
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


@dataclass(frozen=True)
class SmallRun:
    """A trained run: everything kept, the federation alive, one client poisoned."""

    prepared: Prepared
    ledger: MemoryLedger
    federation: Federation
    retrained: Model

    def request(self, *forget: ClientId) -> UnlearnRequest:
        """Return a request with a count of client calls of its own."""
        old = self.federation
        fresh = Clients(old.clients.workers, old.clients.data)
        federation = Federation(
            clients=fresh,
            trainer=old.trainer,
            schedule=old.schedule,
            local=old.local,
            scales=old.scales,
            select=old.select,
            server=old.server,
            seed=old.seed,
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


@pytest.fixture(scope="session")
def small_run() -> SmallRun:
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
    prepared = prepare(config)
    workers = start_workers(prepared)
    model = workers.initial(config.seed)
    ledger = MemoryLedger.create(model)
    for round_ in rounds_of(prepared, workers, model, 0, config.rounds, frozenset()):
        ledger.append(round_)
    retrained = retrain(prepared, workers, {TARGET})
    return SmallRun(prepared, ledger, federation_for(prepared, workers), retrained)
