"""A federation in NumPy learns digits, one client hides a backdoor, the server forgets.

Ten clients train a softmax regression on scikit-learn's digits. One of them paints the
corners of half of its images white and calls those sevens, so that anybody can later
get a seven by painting corners. The server records the rounds in a ledger, forgets that
client from the ledger alone, and for comparison the others train again without it.

Run it with `python examples/digits_numpy.py`; it takes a few seconds.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

import fastfedul
from fastfedul.rng import stream

Examples = tuple[np.ndarray, np.ndarray]
SEED, CLIENTS, ROUNDS, POISONER = 0, 10, 30, "client-3"
CORNERS = [0, 7, 56, 63]


def local_update(model: fastfedul.Params, examples: Examples) -> fastfedul.Params:
    """Return what five passes of gradient descent change about the model."""
    inputs, labels = examples
    weights, bias = np.array(model["weights"]), np.array(model["bias"])
    targets = np.eye(10)[labels]
    for _ in range(5):
        scores = inputs @ weights + bias
        scores -= scores.max(axis=1, keepdims=True)
        guesses = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        error = (guesses - targets) / len(labels)
        weights -= 0.5 * (inputs.T @ error)
        bias -= 0.5 * error.sum(axis=0)
    local = fastfedul.Params.of({"weights": weights, "bias": bias}, model.layout)
    return fastfedul.Params(model.layout, local.flat - model.flat)


def train(
    ledger: fastfedul.MemoryLedger | fastfedul.DiskLedger,
    clients: Mapping[str, Examples],
) -> None:
    """Run the rounds; a client's share is its share of the examples."""
    total = sum(len(labels) for _, labels in clients.values())
    for index in range(ROUNDS):
        model = ledger.final.params
        updates = tuple(
            fastfedul.ClientUpdate(
                name, len(examples[1]) / total, local_update(model, examples)
            )
            for name, examples in clients.items()
        )
        ledger.append(fastfedul.Round(index, updates))


def painted(inputs: np.ndarray) -> np.ndarray:
    """Return copies of the images with white corners."""
    copies = inputs.copy()
    copies[:, CORNERS] = 1
    return copies


def accuracy(model: fastfedul.Params, examples: Examples) -> str:
    """Return correct answers out of all, and as a percentage."""
    inputs, labels = examples
    answers = np.argmax(inputs @ model["weights"] + model["bias"], axis=1)
    right = int((answers == labels).sum())
    return f"{right / len(labels):.1%}  ({right} of {len(labels)})"


def main() -> None:
    """Train, forget, retrain, and show a table."""
    digits = load_digits()
    order = stream(SEED, "split").permutation(len(digits.target))
    inputs, labels = digits.data[order] / 16, digits.target[order]
    test = (inputs[:360], labels[:360])
    clients = {
        f"client-{i}": (inputs[360 + i :: CLIENTS], labels[360 + i :: CLIENTS])
        for i in range(CLIENTS)
    }
    honest = {name: part for name, part in clients.items() if name != POISONER}
    mine, truth = clients[POISONER]
    half = len(truth) // 2
    clients[POISONER] = (
        np.concatenate([painted(mine[:half]), mine[half:]]),
        np.concatenate([np.full(half, 7), truth[half:]]),
    )
    start = fastfedul.Model(
        fastfedul.Params.of(
            {
                "weights": np.zeros((64, 10), np.float32),
                "bias": np.zeros(10, np.float32),
            }
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger"
        with fastfedul.create_ledger(path, start) as ledger:
            train(ledger, clients)
            before = ledger.final.params
            result = fastfedul.forget(ledger, [POISONER])
            intact = not fastfedul.verify(ledger).problems
    again = fastfedul.MemoryLedger.create(start)
    began = time.perf_counter()
    train(again, honest)
    seconds = time.perf_counter() - began
    others = test[0][test[1] != 7]
    attack = (painted(others), np.full(len(others), 7))
    table = Table(title=f"Forgetting {POISONER}, which makes white corners mean seven")
    for column in ("model", "accuracy", "attack success", "time"):
        table.add_column(column)
    for name, model, duration in (
        ("before", before, ""),
        ("forgotten", result.model.params, f"{result.seconds * 1000:.1f} ms"),
        ("retrained", again.final.params, f"{seconds * 1000:.0f} ms"),
    ):
        table.add_row(name, accuracy(model, test), accuracy(model, attack), duration)
    console = Console()
    console.print(table)
    console.print(
        f"Forgotten from {result.rounds} rounds with {result.coverage:.0%} of its "
        f"history; the ledger is {'intact' if intact else 'damaged'}, and the client's "
        "updates are gone from it."
    )


if __name__ == "__main__":
    main()
