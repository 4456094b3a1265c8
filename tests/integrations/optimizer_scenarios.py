"""Federations with a server optimizer in Flower's simulation: plain, and recorded.

The clients' updates depend on the client and the round alone. So forgetting without a
skew must give the model of the same strategy that never got the client's replies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi
from safetensors.numpy import save_file

from fastfedul import FastFedUL, NoSkew
from fastfedul.forgetting.requests import add_request

ROUNDS, FORGOTTEN_AFTER = 3, 2
LEAVER = 1
KINDS: dict[str, tuple[type[FedAvg], dict[str, float]]] = {
    "momentum": (FedAvgM, {"server_learning_rate": 0.7, "server_momentum": 0.9}),
    "adam": (FedAdam, {"eta": 0.05, "tau": 0.01}),
    "yogi": (FedYogi, {"eta": 0.05}),
    "adagrad": (FedAdagrad, {"eta": 0.05}),
}


def without_leaver(kind: type[FedAvg]) -> type[FedAvg]:
    """Return a strategy of Flower's that drops the replies of one client."""

    class Without(kind):  # type: ignore[misc, valid-type]
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            kept = [m for m in replies if m.content["metrics"]["loss"] != LEAVER]
            return super().aggregate_train(server_round, kept)

    return Without


def optimizer_scenarios(
    grid: Grid,
    folder: Path,
    start: dict[str, np.ndarray[Any, Any]],
    make: Callable[..., FedAvg],
    run: Callable[..., dict[str, Any]],
) -> dict[str, Any]:
    """Run every optimizer of Flower, plain and recorded; return outcomes by name.

    Args:
        grid: Flower's grid.
        folder: Folder for the results.
        start: The model to start from.
        make: Makes a strategy that wants all clients, of its class and its options.
        run: Runs a recorded strategy.
    """
    found = {}
    for name, (kind, options) in KINDS.items():
        for label, own in (("plain", kind), ("without", without_leaver(kind))):
            scenario = folder / f"{name}-{label}"
            scenario.mkdir()
            config = {"scenario": name, "folder": str(scenario)}
            result = make(own, **options).start(
                grid,
                ArrayRecord({n: Array(a) for n, a in start.items()}),
                num_rounds=ROUNDS,
                train_config=ConfigRecord({**config}),
                evaluate_config=ConfigRecord({**config}),
            )
            final = {n: np.asarray(a.numpy()) for n, a in result.arrays.items()}
            save_file(final, scenario / f"result-{ROUNDS}.safetensors")
        recorded = f"{name}-recorded"
        found[recorded] = run(grid, folder, recorded, make(kind, **options))
        forgetting = f"{name}-forgetting"
        method = FastFedUL(skew=NoSkew())
        run(
            *(grid, folder, forgetting, make(kind, **options)),
            num_rounds=FORGOTTEN_AFTER,
            method=method,
        )
        add_request(folder / forgetting / "ledger", f"client-{LEAVER}")
        found[forgetting] = run(
            *(grid, folder, forgetting, make(kind, **options)),
            num_rounds=ROUNDS,
            method=method,
        )
    found["other"] = run(grid, folder, "adam-recorded", num_rounds=ROUNDS + 1)
    return found
