"""Choosing rules and differential privacy in Flower's simulation, run as a program.

    python rules_app.py FOLDER scenarios

Each strategy runs twice from the same seed: once as Flower has it, once recorded. Then
a client is forgotten, and training goes on. One simulation holds all of it.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
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
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    FedMedian,
    Krum,
    MultiKrum,
    Strategy,
)

from fastfedul.errors import FastFedULError
from fastfedul.forgetting.requests import add_request
from fastfedul.integrations.flower import Recorded
from fastfedul.integrations.flower.client import identify
from fastfedul.rng import stream
from tests.integrations.flower_app import simulate

NUM_CLIENTS = 8
SIZES = (10, 20, 30, 40, 50, 60, 70, 80)
NUM_ROUNDS = 3
FORGOTTEN = "client-2"
ATTACKER = 5

Arrays = dict[str, np.ndarray[Any, Any]]


def clip_if_asked(message: Message, context: Context, call_next: Any) -> Message:
    """Clip at the client in the scenarios that ask for it."""
    clipping = message.content.config_records["config"].get("clipping", "")
    mods = {"fixed": fixedclipping_mod, "adaptive": adaptiveclipping_mod}
    if clipping not in mods:
        found: Message = call_next(message, context)
        return found
    return mods[str(clipping)](message, context, call_next)


client_app = identify(ClientApp())
server_app = ServerApp()


def initial_arrays() -> Arrays:
    """Return a model without buffers."""
    return {
        "w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3),
        "b": np.ones(3, np.float32),
    }


@client_app.train(mods=[clip_if_asked])
def train(message: Message, context: Context) -> Message:
    """Pull the model towards a target of the client's own; one client shouts."""
    number = int(context.node_config["partition-id"])
    config = message.content.config_records["config"]
    record = message.content.array_records["arrays"]
    server_round = config["server-round"]
    assert isinstance(server_round, int)
    rng = stream(0, "rules test", number, server_round)
    size = 3.0 if number == ATTACKER else 0.1
    trained = {
        name: (array.numpy() + size * rng.standard_normal(array.shape)).astype("f4")
        for name, array in record.items()
    }
    weight = 10 if config.get("equal") else SIZES[number]
    content = RecordDict(
        {
            "arrays": ArrayRecord({n: Array(a) for n, a in trained.items()}),
            "metrics": MetricRecord({"num-examples": weight}),
        }
    )
    return Message(content=content, reply_to=message)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Say that a model came."""
    del context
    metrics = MetricRecord({"num-examples": 1, "accuracy": 0.5})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=message)


def everybody(kind: Callable[..., Any] = FedAvg, **options: Any) -> Any:
    """Return a strategy that wants all clients in every round."""
    wanted = ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes")
    return kind(**dict.fromkeys(wanted, NUM_CLIENTS), **options)


def made(name: str) -> Strategy:
    """Return a strategy of Flower, new each time because some have a memory."""
    choosing: dict[str, Callable[[], Strategy]] = {
        "krum": lambda: everybody(Krum, num_malicious_nodes=1),
        "multi-krum": lambda: everybody(
            MultiKrum, num_malicious_nodes=1, num_nodes_to_select=4
        ),
        "bulyan": lambda: everybody(Bulyan, num_malicious_nodes=1),
        "server-fixed": lambda: DifferentialPrivacyServerSideFixedClipping(
            everybody(), 0.5, 0.4, NUM_CLIENTS
        ),
        "client-fixed": lambda: DifferentialPrivacyClientSideFixedClipping(
            everybody(), 0.5, 0.4, NUM_CLIENTS
        ),
        "server-adaptive": lambda: DifferentialPrivacyServerSideAdaptiveClipping(
            everybody(), 0.5, NUM_CLIENTS, clipped_count_stddev=1.0
        ),
        "client-adaptive": lambda: DifferentialPrivacyClientSideAdaptiveClipping(
            everybody(), 0.5, NUM_CLIENTS, clipped_count_stddev=1.0
        ),
        "private-median": lambda: DifferentialPrivacyServerSideFixedClipping(
            everybody(FedMedian), 0.5, 0.4, NUM_CLIENTS
        ),
    }
    return choosing[name]()


NAMES = (
    *("krum", "multi-krum", "bulyan"),
    *("server-fixed", "client-fixed", "server-adaptive", "client-adaptive"),
    "private-median",
)


def started(
    strategy: Strategy, grid: Grid, name: str, num_rounds: int
) -> dict[str, list[float]]:
    """Return the model after training; the noise of Flower has the same seed."""
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002 - Flower draws its noise from this generator.
    clipping = name.partition("-")[2] if name.startswith("client") else ""
    result = strategy.start(
        grid,
        ArrayRecord({n: Array(a) for n, a in initial_arrays().items()}),
        num_rounds=num_rounds,
        train_config=ConfigRecord({"clipping": clipping}),
    )
    return {n: a.numpy().ravel().tolist() for n, a in result.arrays.items()}


def scenarios(grid: Grid, folder: Path) -> dict[str, Any]:
    """Run every strategy; the models by its name."""
    found: dict[str, Any] = {}
    for name in NAMES:
        ledger = folder / name / "ledger"
        ledger.parent.mkdir()
        models = {"flower": started(made(name), grid, name, NUM_ROUNDS)}
        recorded = made(name)
        models["recorded"] = started(Recorded(recorded, ledger), grid, name, NUM_ROUNDS)
        add_request(ledger, FORGOTTEN, "withdrew")
        models["cleaned"] = started(
            Recorded(made(name), ledger), grid, name, NUM_ROUNDS
        )
        try:
            again = made(name)
            models["later"] = started(
                Recorded(again, ledger), grid, name, NUM_ROUNDS + 1
            )
        except FastFedULError as error:
            models["error"] = str(error)  # type: ignore[assignment]
        if hasattr(recorded, "clipping_norm"):
            models["norms"] = [recorded.clipping_norm]  # type: ignore[assignment]
        found[name] = models
    return found


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all scenarios, and write down what they found."""
    del context
    folder = Path(sys.argv[1])
    (folder / "found.json").write_text(json.dumps(scenarios(grid, folder)))


if __name__ == "__main__":
    simulate("tests.integrations.rules_app", NUM_CLIENTS)
