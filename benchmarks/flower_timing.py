"""The time that a wrapping strategy adds to a round of Flower's own strategy."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fastfedul.integrations.flower import Recorded


class Timed(FedAvg):
    """FedAvg that notes the seconds of its own part."""

    seconds = 0.0

    def configure_train(self, *arguments: Any) -> Iterable[Message]:
        """Configure as FedAvg does."""
        started = time.perf_counter()
        messages = super().configure_train(*arguments)
        self.seconds += time.perf_counter() - started
        return messages

    def aggregate_train(self, *arguments: Any) -> Any:
        """Aggregate as FedAvg does."""
        started = time.perf_counter()
        result = super().aggregate_train(*arguments)
        self.seconds += time.perf_counter() - started
        return result


def timed_round(
    strategy: Timed | Recorded,
    inner: Timed,
    arrays: ArrayRecord,
    grid: Grid,
    index: int,
) -> tuple[ArrayRecord, float, float]:
    """Return the next model, the seconds of the round, and what wrapping added."""
    inner.seconds = 0.0
    started = time.perf_counter()
    config = ConfigRecord()
    messages = list(strategy.configure_train(index, arrays, config, grid))
    configured = time.perf_counter()
    replies = list(grid.send_and_receive(messages, timeout=3600))
    received = time.perf_counter()
    result, _ = strategy.aggregate_train(index, replies)
    ended = time.perf_counter()
    assert result is not None
    own = (configured - started) + (ended - received) - inner.seconds
    return result, ended - started, own
