"""What the benchmarks share: made-up rounds, baselines, clocks, progress, output."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fastfedul import ClientUpdate, Model, Params, Round
from fastfedul.params import Array, Flat
from fastfedul.rng import stream

_NUM_BASES = 3
_BLOCK_VALUES = 65_536
_ROW_WORDS = 4_096

History = Sequence[Sequence[Flat]]
"""Updates by round and client."""


@dataclass(frozen=True, slots=True)
class MadeUpRounds:
    """Rounds of equal shares, each update a shifted copy of one of a few vectors.

    Attributes:
        num_clients: Participants of every round.
        initial: The model to start from.
        bases: The vectors, random normal.
    """

    num_clients: int
    initial: Model
    bases: tuple[Flat, ...]

    @classmethod
    def of(cls, size: int, num_clients: int) -> MadeUpRounds:
        """Return rounds for a model of this size, the same ones every time."""
        rng = stream(0, "benchmark", size)
        bases = tuple(
            rng.standard_normal(size, dtype=np.float32) * np.float32(1e-3)
            for _ in range(_NUM_BASES)
        )
        initial = Model(Params.of({"weights": np.zeros(size, np.float32)}))
        return cls(num_clients, initial, bases)

    def round(self, index: int) -> Round:
        """Return one round; no two updates of the same history are equal."""
        layout = self.initial.params.layout
        updates = []
        for client in range(self.num_clients):
            number = index * self.num_clients + client
            base = self.bases[number % _NUM_BASES]
            delta = Params(layout, np.roll(base, 1 + number // _NUM_BASES))
            share = 1 / self.num_clients
            updates.append(ClientUpdate(client_name(client), share, delta))
        return Round(index, tuple(updates))


def client_name(number: int) -> str:
    """Return the name of a made-up client."""
    return f"client-{number}"


def algorithm_2_in_place(history: History, damping: float) -> Flat:
    """Return the difference by the paper's Algorithm 2, for the first client.

    Every round reads every client's update. Nothing is allocated on the way, and a
    client that stays costs one addition: the factor comes once, after the sum.
    """
    delta = np.zeros_like(history[0][0])
    scratch = np.empty_like(delta)
    num_clients = len(history[0])
    of_others = np.float32(1 / (num_clients * (num_clients - 1)))
    of_target = np.float32(1 / num_clients)
    for target, first, *others in history:
        delta *= np.float32(1 - damping)
        np.copyto(scratch, first)
        for update in others:
            scratch += update
        scratch *= of_others
        delta += scratch
        np.multiply(target, of_target, out=scratch)
        delta -= scratch
    return delta


def algorithm_2(history: History, damping: float) -> Flat:
    """Return the same as the algorithm is printed: a loop over rounds and clients."""
    delta = np.zeros_like(history[0][0])
    num = len(history[0])
    for target, *others in history:
        total = np.zeros_like(delta)
        for update in others:
            total = total + update
        delta = (1 - damping) * delta + 1 / (num * (num - 1)) * total - 1 / num * target
    return delta


def algorithm_2_in_blocks(history: History, damping: float) -> Flat:
    """Return the same, with one more loop: over blocks that fit the cache."""
    delta = np.zeros_like(history[0][0])
    scratch = np.empty(_BLOCK_VALUES, np.float32)
    num_clients = len(history[0])
    for start in range(0, delta.size, _BLOCK_VALUES):
        part = slice(start, start + _BLOCK_VALUES)
        block = delta[part]
        total = scratch[: block.size]
        for target, first, *others in history:
            np.copyto(total, first[part])
            for update in others:
                np.add(total, update[part], out=total)
            total *= np.float32(1 / (num_clients - 1))
            total -= target[part]
            total *= np.float32(1 / num_clients)
            block *= np.float32(1 - damping)
            block += total
    return delta


def read_memory(words: Array, pool: ThreadPoolExecutor) -> None:
    """Read an array of 64-bit words once, with two threads.

    Of the reductions tried (or, sum, largest, product with ones; in one piece, by
    rows, by columns) this is the fastest.
    """
    rows = words[: words.size // _ROW_WORDS * _ROW_WORDS].reshape(-1, _ROW_WORDS)
    half = len(rows) // 2
    parts = (rows[:half], rows[half:])
    list(pool.map(lambda part: np.bitwise_or.reduce(part, axis=1), parts))


def write_plainly(path: Path, payload: memoryview, num_bytes: int) -> None:
    """Write so many bytes to a new file, in large pieces, and sync it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        while num_bytes:
            num_bytes -= os.write(descriptor, payload[: min(num_bytes, len(payload))])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def peak_of(code: str, *arguments: Path) -> int:
    """Return the most bytes that were resident in a fresh interpreter.

    It is the process's own high-water mark: `ru_maxrss` would begin with the
    mark of the large process which starts it.
    """
    report = (
        "status = open('/proc/self/status').read()\n"
        "print(status.split('VmHWM:')[1].split()[0])"
    )
    finished = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}", *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return int(finished.stdout) * 1024


def seconds_of(function: Callable[[], object]) -> float:
    """Return how long one call takes."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    repetitions: int,
    tick: Callable[[], object],
) -> dict[str, float]:
    """Return the median seconds of each function.

    They take turns, so that what disturbs the machine for a while disturbs them all;
    the first turn only warms up.
    """
    found: dict[str, list[float]] = {name: [] for name in functions}
    for repetition in range(repetitions + 1):
        for name, function in functions.items():
            seconds = seconds_of(function)
            if repetition:
                found[name].append(seconds)
        tick()
    return {name: median(values) for name, values in found.items()}


@contextmanager
def work_folder(parent: Path | None) -> Iterator[Path]:
    """Give a temporary folder that is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="fastfedul-", dir=parent) as name:
        yield Path(name)


def progress() -> Progress:
    """Return a progress display on standard error."""
    return Progress(
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def machine() -> dict[str, object]:
    """Return what the figures were taken on."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "fastfedul": version("fastfedul"),
        "system": platform.platform(),
    }


def write_result(
    result: Mapping[str, object],
    *,
    only_json: bool,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> None:
    """Print the table, unless only JSON is wanted, and then the result as JSON."""
    if not only_json:
        table = Table(title=title)
        for position, column in enumerate(columns):
            table.add_column(column, justify="right" if position else "left")
        for row in rows:
            table.add_row(*row)
        Console(width=None if sys.stdout.isatty() else 100).print(table)
    print(json.dumps(result, indent=2))
