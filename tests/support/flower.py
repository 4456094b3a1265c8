"""Flower without a SuperLink: nodes of a deployment, and a ledger made by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from fastfedul import ClientUpdate, DiskLedger, Model, Params, Round
from fastfedul.federation.rounds import advance, average_buffers, shares_of
from fastfedul.integrations.flower.arrays import is_buffer
from fastfedul.integrations.flower.client import answer

Arrays = dict[str, np.ndarray[Any, Any]]


class Nodes(Grid):
    """Nodes with names and keys, as in a deployment; the client's side is real."""

    def __init__(self, *nodes: NodeInfo, **configs: dict[str, Any]) -> None:
        self.nodes = list(nodes)
        self.configs = {int(key[1:]): config for key, config in configs.items()}
        self.replies: dict[str, Message] = {}
        self.num_asked = 0

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [node.node_id for node in self.nodes]

    def get_nodes(self) -> Iterable[NodeInfo]:
        return self.nodes

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        for message in messages:
            self.num_asked += 1
            message.metadata.__dict__["_message_id"] = str(uuid4())
            node_id = message.metadata.dst_node_id
            if node_id in self.configs:
                config = self.configs[node_id]
                context = Context(1, node_id, config, RecordDict(), {})
                reply = answer(message, context)
                self.replies[message.metadata.message_id] = reply
            yield message.metadata.message_id

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies[i] for i in message_ids if i in self.replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        raise NotImplementedError


def node(number: int, name: str = "", key: bytes = b"") -> NodeInfo:
    return NodeInfo(node_id=number, name=name, public_key=key)


def chain_by_hand(
    path: Path,
    num_rounds: int,
    start: Arrays,
    train: Callable[[Arrays, int, int], Arrays],
    sizes: Sequence[int],
) -> bytes:
    """Return the chain of a ledger of the same training without Flower.

    Args:
        path: Folder for the ledger.
        num_rounds: How many rounds to train.
        start: The model to start from.
        train: Trains a model at a client of a number in a round, counted from 1.
        sizes: How many examples each client has.
    """

    def model_of(arrays: Arrays) -> Model:
        learned = {n: a for n, a in arrays.items() if not is_buffer(n, a)}
        buffers = {n: a for n, a in arrays.items() if is_buffer(n, a)}
        return Model(Params.of(learned), buffers)

    model, shares = model_of(start), shares_of(sizes, "size")
    with DiskLedger.create(path, model) as ledger:
        for index in range(num_rounds):
            arrays = {**model.params.exported(), **model.buffers}
            ordered = {name: arrays[name] for name in start}
            local = [
                model_of(train(ordered, number, index + 1))
                for number in range(len(sizes))
            ]
            layout = model.params.layout
            updates = tuple(
                ClientUpdate(
                    f"client-{number}",
                    share,
                    Params(layout, own.params.flat - model.params.flat),
                )
                for number, (share, own) in enumerate(zip(shares, local, strict=True))
            )
            buffers = average_buffers([m.buffers for m in local], shares, model.buffers)
            round_ = Round(index, updates, buffers=buffers)
            ledger.append(round_)
            model = advance(model, round_)
        return ledger.chain
