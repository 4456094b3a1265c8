"""A small federation in Flower's simulation, run as a program by the tests beside it.

    python flower_app.py FOLDER scenarios|NUM_ROUNDS

Starting Ray takes most of the time, so all scenarios share one simulation. Five clients
pull a small model towards a target of their own; what else they do is in the config.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
import urllib.request
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, FedMedian, FedProx, FedTrimmedAvg
from flwr.simulation import run_simulation
from safetensors.numpy import save_file

from fastfedul.errors import FastFedULError
from fastfedul.forgetting.requests import add_request
from fastfedul.integrations.flower import Recorded
from fastfedul.integrations.flower.client import identify
from fastfedul.integrations.flower.grid import AdmittedGrid
from fastfedul.rng import name_key, stream
from fastfedul.runs.training import Prepared, RunConfig, prepare
from tests.integrations.optimizer_scenarios import optimizer_scenarios

NUM_CLIENTS = 5
SIZES = (10, 20, 30, 40, 50)
TOLD = {"lr": 0.1, "momentum": 0.5, "batch-size": 16, "local-epochs": 2}
"""How the server tells clients to train, in one of the scenarios."""
CLAIMED = {"lr": 99.0, "momentum": 0.0, "batch-size": 1, "local-epochs": 99}
"""How clients say that they trained, in all of them; nobody should believe it."""
PROJECT = RunConfig.from_options(
    train_size=150, clients=5, rounds=2, epochs=1, seed=5, workers=1
)

Arrays = dict[str, np.ndarray[Any, Any]]

client_app = identify(ClientApp())
server_app = ServerApp()


def initial_arrays() -> Arrays:
    """Return a model with parameters and both kinds of buffers, mixed."""
    return {
        "norm.running_mean": np.zeros(2, np.float32),
        "w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2),
        "norm.num_batches_tracked": np.zeros((), np.int64),
        "b": np.ones(2, np.float32),
    }


def locally_trained(arrays: Arrays, number: int, server_round: int) -> Arrays:
    """Return a client's model, a function of the arguments alone."""
    rng = stream(0, "flower test", number, server_round)
    step = {n: rng.standard_normal(a.shape) * 0.1 for n, a in arrays.items()}
    trained = {n: (a + step[n]).astype(a.dtype) for n, a in arrays.items()}
    tracked = arrays["norm.num_batches_tracked"] + number
    trained["norm.num_batches_tracked"] = np.asarray(tracked, np.int64)
    return trained


def spoilt(arrays: Arrays, how: str) -> Arrays:
    """Return arrays as a broken client sends them."""
    changed: Arrays = dict(arrays)
    if how == "nan":
        changed["w"] = np.full_like(arrays["w"], np.nan)
    elif how == "shape":
        changed["w"] = np.zeros((2, 2), np.float32)
    elif how == "huge":
        changed["w"] = arrays["w"] + np.float32(1e6)
    elif how == "names":
        changed["other"] = changed.pop("b")
    elif how == "raise":
        raise ValueError("no data today")
    return changed


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train, and do what else the config asks of this client in this round."""
    number = int(context.node_config["partition-id"])
    config = message.content.config_records["config"]
    server_round = config["server-round"]
    assert isinstance(server_round, int)
    note(config, f"train {number} {server_round}")
    record = message.content.array_records["arrays"]
    arrays = {name: array.numpy() for name, array in record.items()}
    size = SIZES[number]
    if config["scenario"] == "project":
        arrays, size = project_trained(arrays, number, server_round - 1)
    else:
        arrays = locally_trained(arrays, number, server_round)
    faults = json.loads(str(config.get("faults", "{}")))
    arrays = spoilt(arrays, faults.get(f"{number}@{server_round}", ""))
    if once := faults.get(f"{number} once"):
        mark = Path(str(config["folder"])) / f"failed-{number}"
        if not mark.exists():
            mark.touch()
            spoilt(arrays, once)
    metrics: dict[str, Any] = {"num-examples": size, "loss": float(number)}
    return reply(message, {**metrics, **CLAIMED}, arrays)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Say that a model came."""
    number = int(context.node_config["partition-id"])
    config = message.content.config_records["config"]
    note(config, f"evaluate {number} {config['server-round']!r}")
    return reply(message, {"num-examples": SIZES[number], "accuracy": 0.5}, {})


def reply(message: Message, metrics: dict[str, Any], arrays: Arrays) -> Message:
    records: dict[str, Any] = {"metrics": MetricRecord(metrics)}
    if arrays:
        records["arrays"] = ArrayRecord({n: Array(a) for n, a in arrays.items()})
    return Message(content=RecordDict(records), reply_to=message)


def note(config: ConfigRecord, line: str) -> None:
    """Write down that a message arrived, as the client saw it."""
    with (Path(str(config["folder"])) / "seen.txt").open("a") as file:
        file.write(line + "\n")


@cache
def project() -> Prepared:
    """Return the project's own data and trainer, made once in each process."""
    return prepare(PROJECT)


def project_trained(arrays: Arrays, number: int, index: int) -> tuple[Arrays, int]:
    """Return what the project's own trainer makes of a model, and of how much data."""
    from fastfedul.data.dataset import to_model_input
    from fastfedul.params import Params
    from fastfedul.records import Model

    data, trainer = project().clients[number], project().trainer
    rng = stream(PROJECT.seed, "local training", index, name_key(data.client))
    inputs = to_model_input(data.images)
    trained = trainer.train(Model(Params.of(arrays)), inputs, data.labels, rng)
    return trained.params.exported(), data.num_examples


class Backwards(AdmittedGrid):
    """A grid whose replies are pulled in the opposite order."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return list(super().push_messages(messages))[::-1]


class Wrong(FedAvg):
    """Says that it is a mean and is not."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        assert arrays is not None
        arrays["b"] = Array(arrays["b"].numpy() + np.float32(0.01))
        return arrays, metrics


def run(
    grid: Grid,
    folder: Path,
    name: str,
    strategy: FedAvg | None = None,
    *,
    num_rounds: int = 3,
    faults: dict[str, str] | None = None,
    start: Arrays | None = None,
    told: dict[str, Any] | None = None,
    after: Callable[[int], None] = lambda number: None,
    **options: Any,
) -> dict[str, Any]:
    """Run a scenario on its ledger; return what its caller would see."""
    scenario = folder / name
    scenario.mkdir(exist_ok=True)
    config = {"scenario": name, "folder": str(scenario)}
    train_config = {**config, **(told or {}), "faults": json.dumps(faults or {})}
    asked: list[int] = []

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        asked.append(number)
        after(number)
        return MetricRecord({"sum": float(arrays["w"].numpy().sum())})

    strategy = strategy or everybody(FedAvg)
    recorded = Recorded(strategy, ledger=scenario / "ledger", **options)
    given = {n: Array(a) for n, a in (start or initial_arrays()).items()}
    try:
        result = recorded.start(
            grid,
            ArrayRecord(given),
            num_rounds=num_rounds,
            train_config=ConfigRecord(train_config),
            evaluate_config=ConfigRecord({**config}),
            evaluate_fn=evaluate if start is None else None,
        )
    except FastFedULError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    final = {name: array.numpy() for name, array in result.arrays.items()}
    save_file(final, scenario / f"result-{num_rounds}.safetensors")
    return {
        "order": list(result.arrays),
        "asked": asked,
        "losses": {n: m["loss"] for n, m in result.train_metrics_clientapp.items()},
        "evaluated": list(result.evaluate_metrics_clientapp),
        "min_available": strategy.min_available_nodes,
    }


def everybody(kind: Callable[..., FedAvg], **options: Any) -> FedAvg:
    """Return a strategy that wants all clients in every round."""
    wanted = ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes")
    return kind(**dict.fromkeys(wanted, NUM_CLIENTS), **options)


def forgetting(grid: Grid, folder: Path) -> dict[str, Any]:
    """Forget a client between two runs, and another one while training goes on."""
    ledger = folder / "forget" / "ledger"
    found = {"first": run(grid, folder, "forget", num_rounds=3)}
    shutil.copytree(ledger, folder / "forget" / "copy")
    add_request(ledger, "client-1", "withdrew")
    found["cleaned"] = run(grid, folder, "forget", num_rounds=3)

    def ask(number: int) -> None:
        if number == 4:
            add_request(ledger, "client-3")

    found["rest"] = run(grid, folder, "forget", num_rounds=6, after=ask)
    return found


def watched(grid: Grid, folder: Path) -> dict[str, Any]:
    """Scrape the metrics before the first round and after every round."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    pages: list[str] = []

    def scrape(number: int) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            pages.append(answer.read().decode())

    faults = {"1@2": "nan"}
    options: dict[str, Any] = {"faults": faults, "after": scrape, "metrics_port": port}
    return {**run(grid, folder, "watched", num_rounds=2, **options), "pages": pages}


def scenarios(grid: Grid, folder: Path) -> dict[str, Any]:
    """Run everything; the outcome of each scenario by name."""
    broken = {
        "1@2": "raise",
        "2@3": "nan",
        "3@4": "shape",
        "4@5": "huge",
        "0@6": "names",
    }
    whole = project().trainer.initial(PROJECT.seed).params.exported()
    median, trimmed = everybody(FedMedian), everybody(FedTrimmedAvg, beta=0.2)
    return {
        "plain": run(grid, folder, "plain", num_rounds=4),
        "backwards": run(
            Backwards(grid, lambda: dict.fromkeys(grid.get_node_ids(), "")),
            *(folder, "backwards"),
            num_rounds=4,
            identify="partition",
        ),
        "prox": run(grid, folder, "prox", everybody(FedProx, proximal_mu=0.1)),
        "median": run(grid, folder, "median", median),
        "trimmed": run(grid, folder, "trimmed", trimmed),
        "sampled": run(grid, folder, "sampled", keep="optimal:2", dtype="int8"),
        "sums": run(grid, folder, "sums", keep="sums", budget=10**8),
        "some": run(grid, folder, "some", FedAvg(fraction_train=0.4), num_rounds=4),
        "faults": run(grid, folder, "faults", faults=broken, num_rounds=6),
        "repeated": run(
            grid,
            folder,
            "repeated",
            num_rounds=1,
            min_clients=5,
            faults={"1 once": "raise", "2 once": "raise"},
        ),
        "hopeless": run(
            grid,
            folder,
            "hopeless",
            min_clients=4,
            max_discards=2,
            faults={"1@1": "nan", "2@1": "nan"},
        ),
        "wrong": run(grid, folder, "wrong", everybody(Wrong), aggregation="mean"),
        "told": run(grid, folder, "told", num_rounds=2, told=TOLD),
        "project": run(
            *(grid, folder, "project"),
            num_rounds=2,
            start=whole,
            local=PROJECT.local.training.sgd,
        ),
        "forget": forgetting(grid, folder),
        "watched": watched(grid, folder),
        "optimizers": optimizer_scenarios(
            grid, folder, initial_arrays(), everybody, run
        ),
    }


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Do what the command line says."""
    del context
    folder, what = Path(sys.argv[1]), sys.argv[2]
    if what == "scenarios":
        found = scenarios(grid, folder)
        (folder / "found.json").write_text(json.dumps(found))
    else:
        run(grid, folder, "killed", num_rounds=int(what))


def simulate(module: str, num_nodes: int) -> None:
    """Run the apps of a module in a simulation.

    By its name: what is in `__main__` cannot be found by Ray's processes.
    """
    named = import_module(module)
    run_simulation(
        named.server_app,
        named.client_app,
        num_supernodes=num_nodes,
        backend_config={
            "client_resources": {"num_cpus": 1},
            "init_args": {"num_cpus": 2, "address": "local"},
        },
    )


if __name__ == "__main__":
    simulate("flower_app", NUM_CLIENTS)
