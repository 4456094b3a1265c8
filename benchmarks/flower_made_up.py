"""Rounds of a Flower strategy whose clients answer with made-up arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from benchmarks.flower_timing import Timed, timed_round
from benchmarks.measuring import client_name
from fastfedul.integrations.flower import Recorded
from fastfedul.params import Layout
from fastfedul.rng import stream


class NodesGrid(Grid):
    """Nodes numbered from 1 without a SuperLink; a subclass says how they answer."""

    def __init__(self, num_clients: int) -> None:
        self._nodes = range(1, num_clients + 1)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes."""
        return list(self._nodes)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return the facts about the nodes."""
        return [NodeInfo(node_id=node) for node in self._nodes]

    def set_run(self, run: Any) -> NoReturn:
        """Raise: there is no run."""
        raise NotImplementedError

    @property
    def run(self) -> NoReturn:
        """Raise: there is no run."""
        raise NotImplementedError

    def create_message(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise: strategies make their messages themselves."""
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> NoReturn:
        """Raise: messages are answered at once."""
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> NoReturn:
        """Raise: messages are answered at once."""
        raise NotImplementedError

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Raise: no message is answered at once."""
        raise NotImplementedError


class MadeUpGrid(NodesGrid):
    """Nodes that answer a model at once with the model plus a random vector."""

    def __init__(self, layout: Layout, num_clients: int) -> None:
        super().__init__(num_clients)
        self._layout = layout
        rng = stream(0, "made-up replies", layout.size)
        self._base = rng.standard_normal(layout.size, dtype=np.float32) * 1e-3

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return the answers."""
        given = list(messages)
        for message in given:
            # A grid numbers the messages that it sends.
            message.metadata.__dict__["_message_id"] = str(uuid4())
        return [self._answer(message) for message in given]

    def _answer(self, message: Message) -> Message:
        shift = 31 * message.metadata.dst_node_id
        moved = np.roll(self._base, shift)
        record = message.content.array_records["arrays"]
        arrays, start = {}, 0
        for slot in self._layout.slots:
            own = moved[start : start + slot.size].reshape(slot.shape)
            arrays[slot.name] = Array(record[slot.name].numpy() + own)
            start += slot.size
        metrics = MetricRecord({"num-examples": 100})
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
        return Message(content=content, reply_to=message)


def added_seconds(
    ledger: Path, layout: Layout, num_clients: int, num_rounds: int
) -> Iterator[float]:
    """Yield the seconds that `Recorded` adds to each round of FedAvg."""
    # Flower lets nobody make a message outside a run.
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    grid = MadeUpGrid(layout, num_clients)
    inner = Timed(
        fraction_evaluate=0.0,
        min_train_nodes=num_clients,
        min_available_nodes=num_clients,
    )
    zeros = {s.name: Array(np.zeros(s.shape, np.float32)) for s in layout.slots}
    arrays = ArrayRecord(zeros)
    with Recorded(
        inner,
        ledger,
        aggregation="mean",
        identify=lambda node: client_name(node.node_id),
    ) as recorded:
        for index in range(num_rounds):
            arrays, _, added = timed_round(recorded, inner, arrays, grid, index + 1)
            yield added
