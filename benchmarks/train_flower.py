"""The same federation in Flower's simulation engine; run by `train.py` on its own.

    python -m benchmarks.train_flower CLIENTS.npz NUM_CLIENTS NUM_ROUNDS LOOP [SOCKET]

LOOP is `plain`, `channels-last`, or `fastfedul` for the package's own trainer inside
Flower's clients. With a socket, every round waits for a byte from there and answers
with the seconds it took, so that rounds can take turns with something else.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.train_loops import new_network, tensors_of, train_plainly
from benchmarks.train_setting import load_client, trainer
from fastfedul.integrations.torch import TorchTrainer
from fastfedul.params import Params
from fastfedul.records import Model
from fastfedul.rng import stream

# Loaded by name: the types are checked also where Flower is not installed.
flower: Any = import_module("flwr.app")
strategies: Any = import_module("flwr.serverapp.strategy")

client_app: Any = import_module("flwr.clientapp").ClientApp()
server_app: Any = import_module("flwr.serverapp").ServerApp()


def loop_name() -> str:
    """Return how clients train; the environment reaches all of Ray's processes."""
    return os.environ["FASTFEDUL_BENCHMARK_LOOP"]


@cache
def examples_of(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a client's examples, loaded once in each process."""
    data = load_client(Path(os.environ["FASTFEDUL_BENCHMARK_DATA"]), number)
    return tensors_of(data, channels_last=loop_name() == "channels-last")


@cache
def own_trainer() -> TorchTrainer:
    """Return the package's own trainer, which keeps its network."""
    return trainer()


@cache
def network() -> torch.nn.Module:
    """Return the network of this process."""
    torch.set_num_threads(1)
    return new_network(channels_last=loop_name() == "channels-last")


def train(message: Any, context: Any) -> Any:
    """Train one client from the model in the message."""
    number = int(context.node_config["partition-id"])
    images, labels = examples_of(number)
    record = message.content["arrays"]
    if loop_name() == "fastfedul":
        arrays = {name: array.numpy() for name, array in record.items()}
        own, rng = own_trainer(), stream(0, "flower", number)
        local = own.train(Model(Params.of(arrays)), images.numpy(), labels.numpy(), rng)
        reply = flower.ArrayRecord(
            {n: torch.tensor(a) for n, a in local.params.items()}
        )
    else:
        network().load_state_dict(record.to_torch_state_dict())
        train_plainly(network(), images, labels)
        reply = flower.ArrayRecord(network().state_dict())
    metrics = flower.MetricRecord({"num-examples": len(labels)})
    content = flower.RecordDict({"arrays": reply, "metrics": metrics})
    return flower.Message(content=content, reply_to=message)


def serve(grid: Any, context: Any) -> None:
    """Run all rounds and write down how long each took."""
    num_clients, num_rounds = map(int, os.environ["FASTFEDUL_BENCHMARK_SIZE"].split())
    strategy = strategies.FedAvg(
        fraction_train=1.0,
        fraction_evaluate=0.0,
        min_train_nodes=num_clients,
        min_available_nodes=num_clients,
    )
    if address := os.environ.get("FASTFEDUL_BENCHMARK_SOCKET"):
        take_turns(strategy, address)
    start = new_network(channels_last=False).state_dict()
    strategy.start(grid, flower.ArrayRecord(start), num_rounds=num_rounds)


def take_turns(strategy: Any, address: str) -> None:
    """Let every round of a strategy wait for its turn and report its seconds."""
    other = socket.socket(socket.AF_UNIX)
    other.connect(address)
    configure, aggregate = strategy.configure_train, strategy.aggregate_train
    began: list[float] = []

    def wait_and_configure(*arguments: Any) -> Any:
        other.recv(1)
        began.append(time.perf_counter())
        return configure(*arguments)

    def aggregate_and_report(*arguments: Any) -> Any:
        result = aggregate(*arguments)
        other.send(f"{time.perf_counter() - began[-1]}\n".encode())
        return result

    strategy.configure_train = wait_and_configure
    strategy.aggregate_train = aggregate_and_report


client_app.train()(train)
server_app.main()(serve)


def main() -> None:
    """Simulate with two actors of one core each."""
    data, num_clients, num_rounds, loop, *address = sys.argv[1:]
    os.environ |= {
        "FASTFEDUL_BENCHMARK_DATA": data,
        "FASTFEDUL_BENCHMARK_SIZE": f"{num_clients} {num_rounds}",
        "FASTFEDUL_BENCHMARK_LOOP": loop,
    }
    if address:
        os.environ["FASTFEDUL_BENCHMARK_SOCKET"] = address[0]
    from benchmarks import train_flower

    import_module("flwr.simulation").run_simulation(
        train_flower.server_app,
        train_flower.client_app,
        num_supernodes=int(num_clients),
        backend_config={
            "client_resources": {"num_cpus": 1},
            "init_args": {"num_cpus": 2},
        },
    )


if __name__ == "__main__":
    main()
