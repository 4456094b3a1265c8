"""The federation that is measured: MNIST, one network, and where clients are kept.

Nothing here loads a framework, so that a process can be timed from its start.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from fastfedul.data.dataset import ClientData, subset
from fastfedul.data.partition import Partition, split
from fastfedul.data.sources import find_source, load, require
from fastfedul.errors import InvalidInputError
from fastfedul.federation.trainer import LocalTraining
from fastfedul.integrations.torch import TorchTrainer

MODEL = "mnist-cnn"
SHAPE = (28, 28, 1)
NUM_CLASSES = 10
LOCAL = LocalTraining(epochs=1, batch_size=32, lr=0.05)


def leave_without_mnist(name: str) -> None:
    """End the program with one line if MNIST is not on this machine.

    The exit code is 0, so that `make bench` goes on with the other benchmarks.
    """
    try:
        require(find_source("mnist"))
    except InvalidInputError as error:
        print(f"benchmarks/{name}.py is left out: {error}", file=sys.stderr)
        raise SystemExit(0) from None


def mnist_clients(num_clients: int, num_images: int) -> tuple[ClientData, ...]:
    """Return clients with so many MNIST images each."""
    dataset = subset(load("mnist"), num_clients * num_images, seed=0)
    return split(dataset, num_clients, Partition(), seed=0)


def trainer() -> TorchTrainer:
    """Return the package's own trainer for the same work."""
    return TorchTrainer(shape=SHAPE, num_classes=NUM_CLASSES, model=MODEL, local=LOCAL)


def save_clients(path: Path, clients: tuple[ClientData, ...]) -> None:
    """Write the examples of clients of one size to a file, for another process."""
    images = np.stack([data.images for data in clients])
    np.savez(path, images=images, labels=np.stack([data.labels for data in clients]))


def load_client(path: Path, number: int) -> ClientData:
    """Return one client's examples from that file."""
    with np.load(path, allow_pickle=False) as archive:
        images, labels = archive["images"][number], archive["labels"][number]
    return ClientData(f"client-{number}", images, labels)
