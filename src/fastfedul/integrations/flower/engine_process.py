"""The process in which Flower's simulation runs; `engine.py` starts it.

python -m fastfedul.integrations.flower.engine_process DESCRIPTOR

Orders come over the socket of that descriptor. The process ends when its standard input
ends, which carries nothing else.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ray
from flwr.app import Context, Message, MessageType
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fastfedul.errors import FastFedULError
from fastfedul.federation.local import LocalResult, one_line
from fastfedul.integrations.flower.client import PARTITION
from fastfedul.integrations.flower.engine import (
    EngineFailure,
    SimulationOrder,
    TrainOrder,
)
from fastfedul.integrations.flower.engine_client import app, to_content, to_result
from fastfedul.integrations.flower.identity import ask_nodes

_START_SECONDS = 600.0


def serve(connection: Connection, order: SimulationOrder, grid: Grid) -> None:
    """Answer orders until the connection is closed."""
    try:
        nodes = _nodes_by_partition(grid, order.num_clients)
        connection.send(None)
        while True:
            task = connection.recv()
            answer: Any
            try:
                answer = _train(grid, nodes, order, task)
            except FastFedULError as error:
                answer = EngineFailure(str(error))
            except Exception as error:
                answer = EngineFailure(one_line(error))
            connection.send(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _nodes_by_partition(grid: Grid, num_clients: int) -> dict[int, int]:
    # Flower registers its nodes while the ServerApp is running already.
    while len(node_ids := list(grid.get_node_ids())) < num_clients:
        time.sleep(0.02)
    answers = ask_nodes(grid, node_ids, _START_SECONDS)
    nodes: dict[int, int] = {}
    for node_id, who in answers.items():
        if isinstance(who, FastFedULError):
            raise who
        number = who[PARTITION]
        assert isinstance(number, int)
        nodes[number] = node_id
    return nodes


def _train(
    grid: Grid, nodes: dict[int, int], order: SimulationOrder, task: TrainOrder
) -> list[LocalResult]:
    content = to_content(order.config, task.model, task.index, task.local)
    messages = [
        Message(
            content=content,
            message_type=MessageType.TRAIN,
            dst_node_id=nodes[number],
            group_id=str(task.index),
        )
        for number in task.clients
    ]
    replies = grid.send_and_receive(messages)
    answered = {reply.metadata.reply_to_message_id: reply for reply in replies}
    layout = task.model.params.layout
    return [to_result(answered[m.metadata.message_id], layout) for m in messages]


def _leave_with_parent(folder: Path) -> None:
    """Wait for the end of standard input; then end everything and tidy up."""
    sys.stdin.buffer.read()
    try:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        # Ray's processes are in the group, this one too.
        os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Run the simulation until the parent has no more orders."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    order = connection.recv()
    threading.Thread(
        target=_leave_with_parent, args=(order.config.parent,), daemon=True
    ).start()
    server = ServerApp()

    @server.main()
    def _(grid: Grid, context: Context) -> None:
        del context
        serve(connection, order, grid)

    init_args: dict[str, Any] = {
        "address": "local",
        "num_cpus": order.num_workers,
        "log_to_driver": False,
    }
    if order.ray is not None:
        init_args["_temp_dir"] = str(order.ray)
    run_simulation(
        server,
        app,
        num_supernodes=order.num_clients,
        backend_config={
            "client_resources": {"num_cpus": 1},
            "init_args": init_args,
        },
    )
    ray.shutdown()


if __name__ == "__main__":
    main()
