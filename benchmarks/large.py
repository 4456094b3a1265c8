"""What the default skew costs for a large model and for a long history.

The first table forgets a client of a ledger on disk with 100 million parameters, 10
clients and 4 rounds, in a process of its own: time, linear algebra apart from reading,
whole blocks read over the values asked for, and the most memory. The second forgets
a client from 50,000 rounds of 256 parameters in memory. The ledger takes 18 GB of the
folder for temporary files, and is deleted afterwards.

    python benchmarks/large.py [--json] [--quick]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.kronecker import LOCAL, low_rank
from benchmarks.measuring import client_name, machine, write_result
from fastfedul import (
    ClientUpdate,
    DiskLedger,
    LedgerReader,
    MemoryLedger,
    Model,
    Params,
    Round,
    preview,
)
from fastfedul.ledger.protocol import Stack
from fastfedul.ledger.store.arrays import BLOCK_VALUES
from fastfedul.ledger.views import LedgerView
from fastfedul.params import Array, Layout, Slot
from fastfedul.records import RoundEntry, VectorRef
from fastfedul.rng import stream

LARGE = (
    ("embedding", (50_000, 768)),
    *((f"dense{n}", (4096, 4096)) for n in range(3)),
    *((f"dense_bias{n}", (4096,)) for n in range(3)),
    *((f"conv{n}", (512, 512, 3, 3)) for n in range(4)),
    *((f"conv_bias{n}", (512,)) for n in range(4)),
    ("head", (1000, 768)),
)
QUICK = (("embedding", (2000, 48)), ("dense", (300, 300)), ("bias", (300,)))
TARGET = client_name(0)


@dataclass(slots=True)
class Watched(LedgerView):
    """A ledger that remembers what was read of its stacks.

    Attributes:
        reads: Stack, first column and end of every read.
        blocks: Stored blocks that these reads touched.
        values: Values that were asked for.
    """

    reads: list[tuple[Stack, int, int]] = field(default_factory=list)
    blocks: int = 0
    values: int = 1

    def stack(self, vectors: Sequence[VectorRef]) -> Stack:
        """Return stored vectors one under the other, to be read by columns."""
        return _WatchedStack(self, len(vectors), self.ledger.stack(vectors))


@dataclass(slots=True)
class _WatchedStack:
    watched: Watched
    count: int
    inner: Stack

    def read(self, start: int, stop: int) -> Array:
        """Return values from `start` to before `stop` of each vector, a row each."""
        blocks = -(-stop // BLOCK_VALUES) - start // BLOCK_VALUES
        self.watched.blocks += self.count * blocks
        self.watched.values += self.count * (stop - start)
        self.watched.reads.append((self.inner, start, stop))
        return self.inner.read(start, stop)


@dataclass(slots=True)
class WithCounts(LedgerView):
    """A ledger that kept every update, and says so of each round."""

    def rounds(self) -> Sequence[RoundEntry]:
        """Return every round, without its arrays."""
        entries = self.ledger.rounds()
        return tuple(replace(entry, num_kept=entry.num_updates) for entry in entries)


def main() -> None:
    """Run both measurements and print what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="small sizes, seconds")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    before = machine()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger"
        record(path, QUICK if arguments.quick else LARGE)
        command = [sys.executable, __file__, "--measure", str(path)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    large = json.loads(done.stdout)
    seconds = forget_from_many(1_000 if arguments.quick else 50_000)
    write_result(
        {"large": large, "many_rounds_seconds": seconds, "machine": before},
        only_json=arguments.json,
        title="skew kronecker: a large model, and many rounds",
        columns=("measurement", "result", "wanted"),
        rows=[
            (f"parameters, {large['updates']} updates", f"{large['size']:,}", ""),
            ("seconds in all", f"{large['seconds']:.0f} s", ""),
            ("linear algebra", f"{large['linear_algebra']:.0f} s", "< 180 s"),
            (
                "whole blocks over the values asked for",
                f"{large['over_asked']:.3f}",
                "<= 1.1",
            ),
            ("most memory", f"{large['peak_bytes'] / 1e9:.2f} GB", "< 2 GB"),
            ("50,000 rounds of 256, in memory", f"{seconds:.2f} s", "< 5 s"),
        ],
    )


def record(path: Path, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> None:
    """Write a ledger of 10 clients and 4 rounds."""
    layout = Layout(tuple(Slot(name, shape, "float32") for name, shape in shapes))
    rng = stream(0, "benchmark large")
    with DiskLedger.create(path, Model(Params.zeros(layout))) as ledger:
        for index in range(4):
            updates = tuple(
                ClientUpdate(
                    client_name(client), 0.1, Params(layout, low_rank(layout, rng))
                )
                for client in range(10)
            )
            ledger.append(Round(index, updates, local=LOCAL))


def measure(path: Path) -> dict[str, float]:
    """Return what forgetting a client took, and what reading alone takes."""
    with LedgerReader(path) as reader:
        size = reader.settings.layout.size
        watched = Watched(reader)
        started = time.perf_counter()
        found = preview(WithCounts(watched), [TARGET])
        seconds = time.perf_counter() - started
        peak = most_memory()
        started = time.perf_counter()
        for stack, start, stop in watched.reads:
            stack.read(start, stop)
        reading = time.perf_counter() - started
    reaction = getattr(found.result, "reaction", None)
    return {
        "size": size,
        "updates": reaction.num_updates if reaction else 0,
        "seconds": seconds,
        "reading": reading,
        "linear_algebra": seconds - reading,
        "over_asked": watched.blocks * BLOCK_VALUES / watched.values,
        "bytes_read": 4 * watched.blocks * BLOCK_VALUES,
        "peak_bytes": peak,
    }


def most_memory() -> int:
    """Return the most bytes that this process held at once.

    `getrusage` would also count what the parent held when it started this one.
    """
    status = Path("/proc/self/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


def forget_from_many(num_rounds: int) -> float:
    """Return the seconds that forgetting takes after so many rounds."""
    layout = Layout(
        (Slot("dense", (15, 16), "float32"), Slot("bias", (16,), "float32"))
    )
    rng = stream(0, "benchmark many rounds")
    ledger = MemoryLedger.create(Model(Params.zeros(layout)))
    for index in range(num_rounds):
        names = sorted(rng.choice(10, 3, replace=False).tolist())
        deltas = 0.01 * rng.standard_normal((3, layout.size))
        updates = tuple(
            ClientUpdate(client_name(name), 1 / 3, Params(layout, delta.astype("f4")))
            for name, delta in zip(names, deltas, strict=True)
        )
        ledger.append(Round(index, updates, local=LOCAL))
    started = time.perf_counter()
    preview(WithCounts(ledger), [TARGET])
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
