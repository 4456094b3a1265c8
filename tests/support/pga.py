"""Workers and a tiny federation for which PGA can be followed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from fastfedul.data.dataset import ClientData
from fastfedul.federation.clients import Clients, Federation
from fastfedul.federation.local import LocalResult
from fastfedul.federation.rounds import Schedule, Weighting
from fastfedul.federation.trainer import LocalTraining, Logits
from fastfedul.ledger.memory import MemoryLedger
from fastfedul.methods.protocol import UnlearnRequest
from fastfedul.params import Array
from fastfedul.records import ClientUpdate, Model, Round
from tests.support.by_hand import Slope, model_at, params


@dataclass(frozen=True)
class Same:
    """Workers whose clients always send the same update and the same buffers."""

    delta: tuple[float, float]
    buffers: dict[str, Array] = field(default_factory=dict)
    asked: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def initial(self, seed: int) -> Model:
        return model_at(0, 0)

    def train(
        self,
        model: Model,
        index: int,
        clients: Sequence[str],
        local: LocalTraining | None = None,
    ) -> Sequence[LocalResult]:
        self.asked.append((index, tuple(clients)))
        update = params(*self.delta)
        return [LocalResult(update, self.buffers) for _ in clients]

    def predict(self, model: Model, name: str) -> Logits:
        raise AssertionError("nothing is scored")


def client(name: str, count: int) -> ClientData:
    images = np.zeros((count, 1, 1, 1), np.uint8)
    return ClientData(name, images, np.zeros(count, np.int64))


def tiny_request(
    ledger: Any,
    sizes: dict[str, int],
    *forget: str,
    weighting: Weighting = "equal",
    trainer: Any = None,
    workers: Same | None = None,
    scales: dict[str, float] | None = None,
) -> UnlearnRequest:
    data = {name: client(name, count) for name, count in sizes.items()}
    federation = Federation(
        clients=Clients(workers or Same((1, 0)), data),
        trainer=trainer or Slope(),
        schedule=Schedule(seed=0, weighting=weighting),
        local=LocalTraining(),
        scales=scales or {},
        server=np.zeros((0, 1, 1, 1), np.float32),
        seed=0,
    )
    return UnlearnRequest(ledger, frozenset(forget), federation)


def one_round(
    *updates: tuple[str, float, tuple[float, float]], kept: bool = True
) -> MemoryLedger:
    """Return a ledger whose one round starts from the origin."""
    ledger = MemoryLedger.create(model_at(0, 0))
    entries = [
        ClientUpdate(name, share, params(*delta), kept=kept)
        for name, share, delta in updates
    ]
    ledger.append(Round(0, tuple(entries)))
    return ledger
