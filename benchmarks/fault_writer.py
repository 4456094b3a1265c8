"""The writer that gets killed, and the rounds it writes; they follow from a seed."""

from __future__ import annotations

import argparse
import os
import sys
import time
from itertools import count, islice
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import client_name
from fastfedul import ClientUpdate, DiskLedger, FastFedUL, Model, Params, Round, forget
from fastfedul.rng import stream

NUM_CLIENTS = 5
TARGET = client_name(1)
METHOD = FastFedUL(minimum_coverage=0)
KILL_SIZE = 100_000
ROUNDS_AT_ONCE = 8
JOURNAL = "index.sqlite-journal"
SHOWN = 20
"""How many violations a result lists."""

Problems = list[str]


def initial(size: int) -> Model:
    """Return the model that every ledger here starts from."""
    weights, bias = np.ones(size - 10, np.float32), np.zeros(10, np.float32)
    params = Params.of({"weights": weights, "bias": bias})
    return Model(params, {"count": np.array(0)})


def sent(
    seed: int, index: int, size: int = KILL_SIZE, absent: frozenset[str] = frozenset()
) -> Round:
    """Return a round: some of the clients, unequal shares, one update in five dropped.

    Args:
        seed: Of the ledger.
        index: Of the round.
        size: Number of parameters.
        absent: Clients that no longer take part.
    """
    rng = stream(seed, "faults", index)
    names = [client_name(number) for number in range(NUM_CLIENTS)]
    names = [name for name in names if name not in absent]
    wanted = min(len(names), int(rng.integers(3, NUM_CLIENTS + 1)))
    chosen = sorted(rng.choice(names, wanted, replace=False).tolist())
    shares = rng.random(len(chosen)) + 0.1
    shares /= shares.sum()
    layout = initial(size).params.layout
    updates = []
    for name, share in zip(chosen, shares.tolist(), strict=True):
        delta = rng.standard_normal(size, dtype=np.float32) * np.float32(1e-3)
        kept = bool(rng.random() < 0.8)
        updates.append(ClientUpdate(name, share, Params(layout, delta), 0.8, kept))
    return Round(index, tuple(updates), buffers={"count": np.array(index + 1)})


def main() -> None:
    """Write to a ledger as the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=("append", "erase"))
    parser.add_argument("path", type=Path)
    parser.add_argument("seed", type=int)
    parser.add_argument("--rounds", type=int, help="stop after so many")
    arguments = parser.parse_args()
    work(arguments.kind, arguments.path, arguments.seed, arguments.rounds)


def work_into(
    output: Connection, kind: str, path: Path, seed: int, rounds: int | None
) -> None:
    """Write to a ledger in a process of its own, whose standard output is a pipe."""
    os.dup2(output.fileno(), 1)
    output.close()
    work(kind, path, seed, rounds)


def work(kind: str, path: Path, seed: int, rounds: int | None) -> None:
    """Write to a ledger and say so line by line; this is what gets killed."""
    say("opening")
    started = time.perf_counter()
    with DiskLedger(path) as ledger:
        say(f"ready {time.perf_counter() - started}")
        for index in islice(count(ledger.num_rounds), rounds):
            round_ = sent(seed, index) if kind == "append" else None
            say(f"start {index}")
            started = time.perf_counter()
            if round_ is None:
                forget(ledger, [TARGET], METHOD, erase=True)
            else:
                ledger.append(round_)
            say(f"done {time.perf_counter() - started}")


def say(line: str) -> None:
    """Print a line at once and in one piece."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def worker_command(kind: str, path: Path, seed: int, rounds: int | None) -> list[str]:
    """Return the command that starts a worker."""
    command = [sys.executable, __file__, kind, str(path), str(seed)]
    return command if rounds is None else [*command, "--rounds", str(rounds)]


if __name__ == "__main__":
    main()
