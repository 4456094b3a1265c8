"""Rounds of a Flower simulation with and without a ledger; run by `flower.py`.

    python -m benchmarks.flower_recorded CLIENTS.npz NUM_CLIENTS NUM_ROUNDS FOLDER

Plain and recorded rounds take turns on one grid. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from benchmarks import train_flower
from benchmarks.flower_timing import Timed, timed_round
from benchmarks.measuring import write_plainly
from benchmarks.train_loops import new_network
from fastfedul.forgetting.requests import add_request
from fastfedul.integrations.flower import Recorded
from fastfedul.integrations.flower.client import identify

server_app = ServerApp()


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Let plain and recorded rounds take turns, then forget a client."""
    del context
    num_clients, num_rounds, folder = json.loads(os.environ["FASTFEDUL_BENCHMARK_RUN"])
    limits = dict.fromkeys(("min_train_nodes", "min_available_nodes"), num_clients)
    plain, inner = (Timed(fraction_evaluate=0.0, **limits) for _ in range(2))
    start = ArrayRecord(new_network(channels_last=False).state_dict())
    ledger = Path(folder) / "ledger"
    arrays, other = start, start
    rounds: dict[str, list[float]] = {"plain": [], "recorded": [], "added": []}
    with Recorded(inner, ledger, aggregation="mean") as recorded:
        for index in range(num_rounds + 1):
            other, seconds, _ = timed_round(plain, plain, other, grid, index + 1)
            arrays, own, added = timed_round(recorded, inner, arrays, grid, index + 1)
            if index:  # The first turn starts the workers and asks who is who.
                rounds["plain"].append(seconds)
                rounds["recorded"].append(own)
                rounds["added"].append(added)
    num_bytes = sum(f.stat().st_size for f in ledger.rglob("*") if f.is_file())
    began = time.perf_counter()
    add_request(ledger, "client-0")
    Recorded(inner, ledger, aggregation="mean").start(grid, start, num_rounds=0)
    cleaned = time.perf_counter() - began
    found = {
        **rounds,
        "bytes": num_bytes / (num_rounds + 1),
        "cleaned": cleaned,
        "written": plain_writes(Path(folder), num_clients, start),
    }
    (Path(folder) / "found.json").write_text(json.dumps(found))


def plain_writes(folder: Path, num_clients: int, arrays: ArrayRecord) -> float:
    """Return the seconds for writing a round's bytes and syncing them, a file each."""
    size = sum(array.numpy().nbytes for array in arrays.values())
    payload = memoryview(os.urandom(size))
    started = time.perf_counter()
    for number in range(num_clients + 2):
        write_plainly(folder / f"plain-{number}", payload, size)
    return time.perf_counter() - started


def main() -> None:
    """Simulate with two actors of one core each."""
    data, num_clients, num_rounds, folder = sys.argv[1:]
    os.environ |= {
        "FASTFEDUL_BENCHMARK_DATA": data,
        "FASTFEDUL_BENCHMARK_LOOP": "plain",
        "FASTFEDUL_BENCHMARK_RUN": json.dumps(
            [int(num_clients), int(num_rounds), folder]
        ),
    }
    named = import_module("benchmarks.flower_recorded")
    run_simulation(
        named.server_app,
        identify(train_flower.client_app),
        num_supernodes=int(num_clients),
        backend_config={
            "client_resources": {"num_cpus": 1},
            "init_args": {"num_cpus": 2, "address": "local"},
        },
    )


if __name__ == "__main__":
    main()
