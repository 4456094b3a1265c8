"""What a ledger costs under Flower: time of a round, disk, and from request to model.

MNIST, a network of 206,922 parameters, 10 clients with 600 images, one epoch, Flower's
simulation with two workers. Plain and recorded rounds take turns in one simulation; the
cost of recording is timed inside them, as rounds differ by more than that. Needs the
extra `flower` and takes about two minutes.

    python benchmarks/flower.py [--json] [--quick] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import machine, progress, work_folder, write_result
from benchmarks.train_setting import (
    leave_without_mnist,
    mnist_clients,
    save_clients,
)
from fastfedul.integrations.flower.engine import QUIET

ROOT = Path(__file__).resolve().parent.parent
NUM_PARAMETERS = 206_922


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured.

    Attributes:
        clients: Of the federation.
        images: Images of a client.
        rounds: Rounds of each kind; sums are written anew every eighth.
    """

    clients: int = 10
    images: int = 600
    rounds: int = 24


QUICK = Sizes(images=60, rounds=8)


def main() -> None:
    """Run the simulation and print what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="small sizes, seconds")
    parser.add_argument("--folder", type=Path, help="where the ledger is put")
    arguments = parser.parse_args()
    leave_without_mnist("flower")
    sizes, before = QUICK if arguments.quick else Sizes(), machine()
    with progress() as display, work_folder(arguments.folder) as folder:
        task = display.add_task("simulation", total=1)
        found = simulate(folder, sizes)
        display.advance(task)
    results, rows = figures(found, sizes)
    write_result(
        {
            **results,
            "seconds": {
                "plain round": round(median(found["plain"]), 4),
                "recorded round": round(median(found["recorded"]), 4),
                "added to a round, mean": round(mean(found["added"]), 4),
                "added to a round, median": round(median(found["added"]), 4),
                "the same bytes written plainly": round(found["written"], 4),
                "request to model": round(found["cleaned"], 4),
            },
            "sizes": asdict(sizes),
            "machine": before,
        },
        only_json=arguments.json,
        title="Flower with a ledger: MNIST, two workers"
        + (" (too small for the targets)" if arguments.quick else ""),
        columns=("measurement", "result", "target", "behind it"),
        rows=rows,
    )


def figures(
    found: dict[str, Any], sizes: Sizes
) -> tuple[dict[str, float], list[tuple[str, str, str, str]]]:
    """Return the results and a line for each."""
    plain, added = median(found["plain"]), mean(found["added"])
    allowed = max(0.05 * plain, 0.010)
    whole = sizes.clients * NUM_PARAMETERS * 4
    results = {
        "added_share": added / plain,
        "added_over_allowed": added / allowed,
        "added_over_plain_writes": added / found["written"],
        "bytes_per_round": found["bytes"],
        "bytes_over_updates": found["bytes"] / whole,
        "request_to_model_seconds": found["cleaned"],
    }
    behind = (
        f"{added * 1000:.0f} ms of {plain:.2f} s",
        f"{added * 1000:.0f} ms, allowed {allowed * 1000:.0f} ms",
        f"{added * 1000:.0f} ms against {found['written'] * 1000:.0f} ms",
        f"{found['bytes'] / 2**20:.2f} MiB",
        f"updates alone {whole / 2**20:.2f} MiB",
        f"{sizes.rounds + 1} rounds in the ledger",
    )
    targets = ("", "at most 1", "", "", "", "")
    rows = [
        (name, f"{value:.3g}", target, text)
        for (name, value), target, text in zip(
            results.items(), targets, behind, strict=True
        )
    ]
    return {name: round(value, 4) for name, value in results.items()}, rows


def simulate(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """Return what the simulation noted, run in a process of its own."""
    clients = folder / "clients.npz"
    save_clients(clients, mnist_clients(sizes.clients, sizes.images))
    environment = {
        **os.environ,
        **QUIET,
        "FLWR_HOME": str(folder / "flwr"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    numbers = (sizes.clients, sizes.rounds)
    command = ["-m", "benchmarks.flower_recorded", clients, *numbers, folder]
    finished = subprocess.run(
        [sys.executable, *map(str, command)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        sys.exit(f"the simulation failed:\n{finished.stderr[-2000:]}")
    found: dict[str, Any] = json.loads((folder / "found.json").read_text("utf-8"))
    return found


if __name__ == "__main__":
    main()
