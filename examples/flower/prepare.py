"""Write one file of examples per client, and one for the server's test.

    python prepare.py DATA --clients 3 --split dirichlet:1

Clients then read plain arrays and need neither scikit-learn nor each other's data.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from fastfedul.data.partition import Partition, split
from fastfedul.data.sources import load


def prepare(folder: Path, *, num_clients: int, partition: str, seed: int) -> None:
    """Write `part-0.npz`, `part-1.npz` and so on, and `test.npz`."""
    dataset = load("digits")
    clients = split(dataset, num_clients, Partition.parse(partition), seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number, own in enumerate(clients):
        file = folder / f"part-{number}.npz"
        np.savez(file, images=own.images, labels=own.labels)
    test = dataset.test
    np.savez(folder / "test.npz", images=test.images, labels=test.labels)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the files go")
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--split", default="iid", help="iid, dirichlet:1 or level:3")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    prepare(
        chosen.folder,
        num_clients=chosen.clients,
        partition=chosen.split,
        seed=chosen.seed,
    )
    print(f"{chosen.clients} clients and a test set in {chosen.folder}")


if __name__ == "__main__":
    main()
