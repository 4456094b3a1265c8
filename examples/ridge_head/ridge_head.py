"""A frozen backbone with a ridge head: forgetting is exact.

    python ridge_head.py

Clients send sums over their examples: features times features, features times labels.
The head is a function of the sums of all clients, and sums can be subtracted. So the
head without a client equals the head that was never trained with it, to rounding.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

import fastfedul as ff
from fastfedul.data.dataset import to_model_input
from fastfedul.data.sources import load
from fastfedul.methods import NoSkew

Matrix = npt.NDArray[np.float64]

NUM_FEATURES = 128
RIDGE = 1e-2
"""Weight decay of the head, per example."""

CLINICS = ("Aarhus", "Bergen", "Chania", "Delft", "Evora")


def features(images: npt.NDArray[np.uint8]) -> Matrix:
    """Return the output of the frozen backbone, a row for each image.

    Here it is a layer of fixed random weights. With a network of yours, return the
    values before its last layer. Every client must have the same weights.
    """
    rows = to_model_input(images).reshape(len(images), -1).astype(np.float64)
    weights = np.random.default_rng(0).normal(size=(rows.shape[1], NUM_FEATURES - 1))
    hidden = np.maximum(rows @ weights / np.sqrt(rows.shape[1]), 0)
    return np.column_stack([hidden, np.ones(len(rows))])


def statistics(inputs: Matrix, labels: npt.NDArray[np.integer]) -> dict[str, Matrix]:
    """Return what a client sends: means over its examples, and no example."""
    targets = np.eye(10)[labels]
    count = len(inputs)
    return {
        "features": inputs.T @ inputs / count,
        "targets": inputs.T @ targets / count,
    }


def head(means: Mapping[str, npt.NDArray[np.floating]]) -> Matrix:
    """Return the weights of the ridge head, given means over all examples."""
    gram = np.asarray(means["features"], np.float64)
    targets = np.asarray(means["targets"], np.float64)
    solved = np.linalg.solve(gram + RIDGE * np.eye(len(gram)), targets)
    return np.asarray(solved, np.float64)


def record(
    path: Path | str, clients: Mapping[str, tuple[Matrix, npt.NDArray[np.integer]]]
) -> ff.DiskLedger:
    """Return a ledger whose model is the mean of all clients' statistics."""
    total = sum(len(labels) for _, labels in clients.values())
    sent = {name: statistics(*own) for name, own in clients.items()}
    shapes = next(iter(sent.values()))
    nothing = {name: np.zeros(a.shape, np.float32) for name, a in shapes.items()}
    ledger = ff.create_ledger(path, ff.Model(ff.Params.of(nothing)))
    updates = tuple(
        ff.ClientUpdate(
            name,
            len(clients[name][1]) / total,
            ff.Params.of({n: a.astype(np.float32) for n, a in own.items()}),
        )
        for name, own in sent.items()
    )
    ledger.append(ff.Round(0, updates))
    return ledger


def main() -> None:
    """Forget a clinic, and compare with a head that never saw it."""
    data = load("digits")
    inputs = features(data.train_images)
    deal = data.train_labels // 2  # Two digits each: nobody else knows Bergen's.
    clients = {
        name: (inputs[deal == number], data.train_labels[deal == number])
        for number, name in enumerate(CLINICS)
    }
    tests = features(data.test_images)

    def accuracy(weights: Matrix) -> float:
        return float(np.mean((tests @ weights).argmax(axis=1) == data.test_labels))

    with tempfile.TemporaryDirectory() as folder:
        with record(Path(folder) / "ledger", clients) as ledger:
            before = head(ledger.final.params)
            # Sums do not react to each other, so no skew is to be held back.
            ff.forget(ledger, ["Bergen"], method=ff.FastFedUL(skew=NoSkew()))
            forgotten = head(ledger.final.params)
        rest = {name: own for name, own in clients.items() if name != "Bergen"}
        with record(Path(folder) / "rest", rest) as ledger:
            retrained = head(ledger.final.params)
    for name, weights in (
        ("before", before),
        ("forgotten", forgotten),
        ("retrained", retrained),
    ):
        gap = np.abs(weights - retrained).max() / np.abs(retrained).max()
        print(f"{name:10} accuracy {accuracy(weights):.2%}  gap to retrained {gap:.1e}")


if __name__ == "__main__":
    main()
