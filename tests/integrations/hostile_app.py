"""Federations with hostile clients in Flower's simulation, run as a program.

    python hostile_app.py FOLDER scenarios

The first clients are honest, the others hostile. In every round each hostile client
takes the next replies of the generator's lists, one to train and one to evaluate. Two
nodes more lie about who they are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from safetensors.numpy import save_file

from benchmarks.hostile_replies import (
    Hostile,
    evaluate_replies,
    honest,
    initial_arrays,
    train_replies,
)
from fastfedul.errors import FastFedULError
from fastfedul.integrations.flower import Recorded
from fastfedul.integrations.flower.client import ACTION, PARTITION, WHO, answer
from tests.integrations.flower_app import locally_trained, simulate

NUM_HONEST, NUM_HOSTILE = 10, 10
NUM_CLIENTS = NUM_HONEST + NUM_HOSTILE
NUM_NODES = NUM_CLIENTS + 2
NUM_ROUNDS = -(-len(train_replies()) // NUM_HOSTILE)
SIZES = tuple(10 * (number + 1) for number in range(NUM_HONEST))
GREEDY = 1e10
"""Examples that one client claims to have."""

Arrays = dict[str, np.ndarray[Any, Any]]

client_app = ClientApp()
server_app = ServerApp()


def honestly_trained(arrays: Arrays, number: int, server_round: int) -> Arrays:
    """Return an honest client's model; its variances stay above zero."""
    trained: Arrays = locally_trained(arrays, number, server_round)
    trained["norm.running_var"] = np.abs(trained["norm.running_var"])
    return trained


@client_app.query(ACTION)
def who(message: Message, context: Context) -> Message:
    """Say who this is; the last two nodes lie."""
    number = int(context.node_config[PARTITION])
    lies = {
        NUM_CLIENTS: ConfigRecord({PARTITION: NUM_CLIENTS - 1}),
        NUM_CLIENTS + 1: ConfigRecord({PARTITION: "../0\u202e"}),
    }
    if number not in lies:
        return answer(message, context)
    return Message(content=RecordDict({WHO: lies[number]}), reply_to=message)


def answered(
    message: Message, context: Context, replies: tuple[Hostile, ...], training: bool
) -> Message:
    """Return the reply of a client: honest, hostile or greedy."""
    number = min(int(context.node_config[PARTITION]), NUM_CLIENTS - 1)
    config = message.content.config_records["config"]
    server_round, scenario = config["server-round"], str(config["scenario"])
    assert isinstance(server_round, int)
    arrays: Arrays = {}
    if training:
        record = message.content.array_records["arrays"]
        sent = {name: array.numpy() for name, array in record.items()}
        arrays = honestly_trained(sent, number, server_round)
    size = SIZES[number % NUM_HONEST]
    metrics: dict[str, Any] = {"num-examples": size, "score": number / 10}
    if scenario == "greedy" and number == NUM_CLIENTS - 1:
        metrics["num-examples"] = GREEDY
    if not is_hostile(scenario, number, training, Path(str(config["folder"]))):
        return honest(message, arrays, metrics)
    place = (server_round - 1) * NUM_HOSTILE + number - NUM_HONEST
    reply = replies[place % len(replies)].answer(message, arrays, metrics)
    assert isinstance(reply, Message)
    return reply


def is_hostile(scenario: str, number: int, training: bool, folder: Path) -> bool:
    """Return whether a client sends a hostile reply."""
    if scenario == "hostile":
        return number >= NUM_HONEST
    if scenario == "majority":
        return training and number >= NUM_HONEST - 1
    if scenario == "once" and training and number >= NUM_HONEST - 1:
        mark = folder / f"hostile-{number}"
        if not mark.exists():
            mark.touch()
            return True
    return False


@client_app.train()
def train(message: Message, context: Context) -> Message:
    return answered(message, context, train_replies(), training=True)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    return answered(message, context, evaluate_replies(), training=False)


def run(grid: Grid, folder: Path, name: str, num_rounds: int) -> Any:
    """Run a federation on its ledger; return its outcome."""
    scenario = folder / name
    scenario.mkdir()
    limits = ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes")
    strategy = FedAvg(**dict.fromkeys(limits, NUM_CLIENTS))  # type: ignore[arg-type]
    config = {"scenario": name, "folder": str(scenario)}
    try:
        result = Recorded(strategy, scenario / "ledger").start(
            grid,
            ArrayRecord({n: Array(a) for n, a in initial_arrays().items()}),
            num_rounds=num_rounds,
            timeout=120,
            train_config=ConfigRecord({**config}),
            evaluate_config=ConfigRecord({**config}),
        )
    except FastFedULError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    final = {name: array.numpy() for name, array in result.arrays.items()}
    save_file(final, scenario / "result.safetensors")
    return {
        "trained": [m["score"] for m in result.train_metrics_clientapp.values()],
        "evaluated": [m["score"] for m in result.evaluate_metrics_clientapp.values()],
    }


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all scenarios."""
    del context
    folder = Path(sys.argv[1])
    found = {
        "hostile": run(grid, folder, "hostile", NUM_ROUNDS),
        "majority": run(grid, folder, "majority", 2),
        "once": run(grid, folder, "once", 2),
        "greedy": run(grid, folder, "greedy", 1),
    }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    simulate("tests.integrations.hostile_app", NUM_NODES)
