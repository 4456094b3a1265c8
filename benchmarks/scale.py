"""How the ledger and forgetting grow: parameters, rounds, clients, a wide round.

Every figure is a ratio to a limit measured in the same minute, a growth, a count or a
time that a person waits. A part that is done is kept in the work folder, so that an
interrupted run goes on where it was. Whole it takes about 40 minutes and 20 GB of disk;
`--quick` takes about a minute and tries every part.

    python benchmarks/scale.py [--json] [--quick] [--work FOLDER] [--only PART ...]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import (
    client_name,
    machine,
    seconds_of,
    write_plainly,
    write_result,
)
from fastfedul import (
    ClientUpdate,
    DiskLedger,
    FastFedUL,
    Keep,
    LedgerReader,
    LocalSGD,
    Model,
    Params,
    Round,
    UnlearnRequest,
    forget,
    preview,
    verify,
)
from fastfedul.ledger.protocol import Ledger, Stack
from fastfedul.ledger.views import LedgerView
from fastfedul.params import Array, Flat, Layout, Slot
from fastfedul.records import Combination, VectorRef
from fastfedul.rng import stream

LOCAL = LocalSGD(lr=0.05, momentum=0.0, batch_size=32, epochs=1)
TARGET = client_name(0)

Figures = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much of everything.

    Attributes:
        parameters: Sizes of the models from whose ledgers a client is forgotten.
        rounds_of: Rounds of each of these ledgers.
        written: Models that a round of ten clients is appended for.
        rounds: Rounds of the long ledger, of 256 parameters.
        early: Rounds after which the first appends of the long ledger are timed.
        clients: Clients of the ledger of many.
        drawn: Participants of each of its rounds.
        wide_clients: Participants of the one wide round.
        wide_values: Parameters of the model of the wide round.
        phones: Clients, participants, rounds and parameters of a phone federation.
        repetitions: How often short things are timed.
    """

    parameters: tuple[str, ...] = ("1e6", "1e7", "1e8")
    rounds_of: Mapping[str, int]
    written: tuple[str, ...] = ("1e6", "1e7", "1e8")
    rounds: int = 50_000
    early: int = 100
    clients: int = 10_000
    client_rounds: int = 1_000
    drawn: int = 100
    wide_clients: int = 10_000
    wide_values: int = 100_000
    phones: tuple[int, int, int, int] = (10_000, 100, 300, 100_000)
    repetitions: int = 5


FULL = Sizes(rounds_of={"1e6": 10, "1e7": 5, "1e8": 2})
QUICK = Sizes(
    parameters=("1e6",),
    rounds_of={"1e6": 2},
    written=("1e6",),
    rounds=600,
    clients=300,
    client_rounds=20,
    drawn=30,
    wide_clients=200,
    wide_values=1_000,
    phones=(300, 30, 10, 2_000),
    repetitions=2,
)

_LAYERS: dict[str, tuple[tuple[int, ...], ...]] = {
    "1e6": ((512, 1024), (512, 896), (512,), (100, 170)),
    "1e7": ((512, 512, 3, 3), (2048, 2048), (2048, 1600), (2048,), (100, 500)),
    "1e8": (
        (50_000, 768),
        (4096, 4096),
        (4096, 4096),
        (512, 512, 3, 3),
        (4096, 4096),
        (4096,),
        (2048, 4096),
    ),
}
"""Layers as networks have them: wide, convolutional, an embedding, biases."""


def layout_of(name: str) -> Layout:
    """Return the layout of a model of about so many parameters."""
    shapes = _LAYERS[name]
    return Layout(
        tuple(Slot(f"layer{i}", shape, "float32") for i, shape in enumerate(shapes))
    )


def made_up(
    layout: Layout, num_clients: int, index: int, bases: Sequence[Flat]
) -> Round:
    """Return a round of equal shares, each update a shifted copy of a base."""
    updates = []
    for client in range(num_clients):
        number = index * num_clients + client
        base = bases[number % len(bases)]
        delta = Params(layout, np.roll(base, 1 + 31 * number))
        updates.append(ClientUpdate(client_name(client), 1 / num_clients, delta))
    return Round(index, tuple(updates), local=LOCAL)


def random_bases(layout: Layout) -> list[Flat]:
    """Return a few random vectors of the size of a model."""
    rng = stream(0, "scale", layout.size)
    return [
        rng.standard_normal(layout.size, dtype=np.float32) * np.float32(1e-3)
        for _ in range(2)
    ]


def read_plainly(path: Path, num_bytes: int) -> float:
    """Return the seconds to read so many bytes of a ledger, with two threads."""
    files = sorted((path / "arrays").iterdir(), key=lambda p: -p.stat().st_size)
    left, jobs = num_bytes, []
    while left > 0:
        for file in files:
            count = min(left, file.stat().st_size)
            jobs.append((file, count))
            left -= count
            if left <= 0:
                break

    def read(job: tuple[Path, int]) -> None:
        file, count = job
        buffer = bytearray(1 << 22)
        with file.open("rb", buffering=0) as opened:
            while count > 0:
                got = opened.readinto(memoryview(buffer)[: min(count, len(buffer))])
                if not got:
                    break
                count -= got

    with ThreadPoolExecutor(2) as pool:
        return seconds_of(lambda: list(pool.map(read, jobs)))


_PREVIEW = """
import json, sys, time
from benchmarks.scale import TimedLedger, peak
from fastfedul import FastFedUL, LedgerReader, UnlearnRequest
with LedgerReader(sys.argv[1]) as reader:
    found = []
    for _ in range(int(sys.argv[2])):
        ledger = TimedLedger(reader)
        began = time.perf_counter()
        FastFedUL()(UnlearnRequest(ledger, frozenset(["client-0"])))
        total = time.perf_counter() - began
        found.append((total, ledger.seconds, ledger.bytes_read))
print(json.dumps({"runs": found, "peak": peak()}))
"""

_FORGET = """
import json, sys, time
from benchmarks.scale import peak
from fastfedul import DiskLedger, forget
with DiskLedger(sys.argv[1]) as ledger:
    began = time.perf_counter()
    forget(ledger, ["client-0"], erase=sys.argv[2] == "erase")
    seconds = time.perf_counter() - began
print(json.dumps({"seconds": seconds, "peak": peak()}))
"""


def peak() -> int:
    """Return the most bytes that were resident in this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


class _TimedStack:
    """Stored vectors whose reading is timed."""

    def __init__(self, stack: Stack, ledger: TimedLedger, rows: int) -> None:
        self._stack = stack
        self._ledger = ledger
        self._rows = rows

    def read(self, start: int, stop: int) -> Array:
        """Return columns, and count the time and bytes."""
        began = time.perf_counter()
        found = self._stack.read(start, stop)
        self._ledger.add(time.perf_counter() - began, found.nbytes)
        return found


class TimedLedger(LedgerView):
    """A ledger that sums up how long its vectors take to be read.

    Where threads read at the same time each counts, so that the sum is at most too
    large.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self.seconds = 0.0
        self.bytes_read = 0
        self._lock = threading.Lock()

    def add(self, seconds: float, num_bytes: int) -> None:
        """Count one reading."""
        with self._lock:
            self.seconds += seconds
            self.bytes_read += num_bytes

    def combine(
        self,
        vectors: Sequence[VectorRef],
        coefficients: npt.ArrayLike,
        pairs: Sequence[tuple[int, int]] = (),
    ) -> Combination:
        """Return linear combinations, and count the time and bytes."""
        began = time.perf_counter()
        found = self.ledger.combine(vectors, coefficients, pairs)
        self.add(time.perf_counter() - began, found.bytes_read)
        return found

    def stack(self, vectors: Sequence[VectorRef]) -> Stack:
        """Return vectors whose reading is counted."""
        return _TimedStack(self.ledger.stack(vectors), self, len(vectors))


def run_apart(code: str, *arguments: object) -> dict[str, Any]:
    """Return what a fresh interpreter prints as JSON."""
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def forget_from(name: str, folder: Path, sizes: Sizes) -> Figures:
    """Return what forgetting costs at one size of the model."""
    path = folder / f"forget-{name}"
    shutil.rmtree(path, ignore_errors=True)
    layout, num_rounds = layout_of(name), sizes.rounds_of[name]
    bases = random_bases(layout)
    with DiskLedger.create(path, Model(Params.zeros(layout))) as ledger:
        for index in range(num_rounds):
            ledger.append(made_up(layout, 10, index, bases))
    del bases
    large = layout.size > 5e7
    found = run_apart(_PREVIEW, path, 1 if large else sizes.repetitions + 1)
    runs = found["runs"] if large else found["runs"][1:]
    total, reading, num_bytes = (median(column) for column in zip(*runs, strict=True))
    with LedgerReader(path) as reader:
        needed = bytes_needed(reader)
    plain = median(read_plainly(path, int(num_bytes)) for _ in range(1 if large else 3))
    erased = run_apart(_FORGET, path, "erase")
    shutil.rmtree(path)
    return {
        f"forget_over_read_{name}": reading / plain,
        f"bytes_read_over_needed_{name}": num_bytes / needed,
        f"algebra_seconds_{name}": total - reading,
        f"forget_seconds_{name}": total,
        f"erase_seconds_{name}": erased["seconds"],
        f"peak_gb_{name}": found["peak"] / 1e9,
        f"peak_erasing_gb_{name}": erased["peak"] / 1e9,
    }


def bytes_needed(ledger: LedgerReader) -> int:
    """Return the bytes that forgetting must read.

    These are the steps of the client's rounds and its updates once, and the sampled
    updates three times.
    """
    result = FastFedUL()(UnlearnRequest(ledger, frozenset({TARGET})))
    vector = 4 * ledger.settings.layout.size
    own = sum(update.kept for update in ledger.updates_of(TARGET))
    assert result.reaction is not None
    return vector * (2 * own + 3 * result.reaction.num_updates)


def append_at(name: str, folder: Path, sizes: Sizes) -> Figures:
    """Return what an append costs over writing and syncing the same bytes."""
    path = folder / f"append-{name}"
    shutil.rmtree(path, ignore_errors=True)
    layout = layout_of(name)
    bases = random_bases(layout)
    num_bytes = 12 * 4 * layout.size
    payload = memoryview(np.concatenate(bases).tobytes())
    ratios = []
    with DiskLedger.create(path, Model(Params.zeros(layout))) as ledger:
        for index in range(2 if layout.size > 5e7 else sizes.repetitions + 1):
            round_ = made_up(layout, 10, index, bases)
            plain = folder / "plain"
            write = seconds_of(partial(write_plainly, plain, payload, num_bytes))
            plain.unlink()
            append = seconds_of(partial(ledger.append, round_))
            ratios.append(append / write)
            del round_
    shutil.rmtree(path)
    return {f"append_over_write_{name}": median(ratios[1:])}


def tiny_rounds(folder: Path, sizes: Sizes) -> Figures:
    """Return how appending, opening and forgetting grow with the rounds."""
    # In memory if there is room: a sync of a disk would hide what the ledger does.
    path = fast_folder(folder) / "tiny"
    shutil.rmtree(path, ignore_errors=True)
    layout = Layout((Slot("w", (15, 16), "float32"), Slot("b", (16,), "float32")))
    rng = stream(0, "scale tiny")
    seconds = []
    with DiskLedger.create(path, Model(Params.zeros(layout))) as ledger:
        for index in range(sizes.rounds):
            values = rng.standard_normal((10, layout.size), dtype=np.float32)
            updates = tuple(
                ClientUpdate(client_name(c), 0.1, Params(layout, values[c] * 1e-2))
                for c in range(10)
            )
            began = time.process_time()
            ledger.append(Round(index, updates, local=LOCAL))
            seconds.append(time.process_time() - began)
    files = len(list((path / "arrays").iterdir()))
    opening = min(seconds_of(lambda: DiskLedger(path).close()) for _ in range(5))
    with LedgerReader(path) as reader:
        looking = min(seconds_of(lambda: preview(reader, [TARGET])) for _ in range(2))
    with DiskLedger(path) as ledger:
        whole = seconds_of(lambda: forget(ledger, [TARGET]))
        intact = not verify(ledger).problems
    shutil.rmtree(path.parent if path.parent != folder else path)
    early = seconds[sizes.early : sizes.early + 200]
    return {
        "append_growth_rounds": median(seconds[-200:]) / median(early),
        "append_tiny_ms": 1e3 * median(seconds[-200:]),
        f"files_{sizes.rounds}_rounds": files,
        "open_to_write_seconds": opening,
        f"forget_{sizes.rounds}_rounds_seconds": looking,
        f"forget_and_erase_{sizes.rounds}_rounds_seconds": whole,
        "intact_after_erasing": float(intact),
    }


def many_clients(folder: Path, sizes: Sizes) -> Figures:
    """Return how long the commands take that show many clients."""
    path = fast_folder(folder) / "clients"
    shutil.rmtree(path, ignore_errors=True)
    layout = Layout((Slot("w", (4, 4), "float32"),))
    rng = stream(0, "scale clients")
    with DiskLedger.create(path, Model(Params.zeros(layout))) as ledger:
        for index in range(sizes.client_rounds):
            drawn = rng.choice(sizes.clients, sizes.drawn, replace=False)
            values = rng.standard_normal((sizes.drawn, 16), dtype=np.float32)
            updates = tuple(
                ClientUpdate(client_name(c), 1 / sizes.drawn, Params(layout, v))
                for c, v in zip(drawn.tolist(), values, strict=True)
            )
            ledger.append(Round(index, updates))
    found = {}
    for verb in ("clients", "info"):
        command = [sys.executable, "-m", "fastfedul", "ledger", verb, path, "--json"]
        found[f"{verb}_seconds"] = min(
            seconds_of(partial(run_silently, command)) for _ in range(3)
        )
    shutil.rmtree(path.parent if path.parent != folder else path)
    return found


def wide_round(folder: Path, sizes: Sizes) -> Figures:
    """Return what appending a round of very many clients costs."""
    path = folder / "wide"
    shutil.rmtree(path, ignore_errors=True)
    layout = Layout((Slot("w", (sizes.wide_values,), "float32"),))
    base = random_bases(layout)[0]
    count = sizes.wide_clients
    payload = memoryview(np.tile(base, 64).tobytes())
    num_bytes = (count + 2) * 4 * layout.size
    updates = tuple(
        ClientUpdate(client_name(c), 1 / count, Params(layout, np.roll(base, c)))
        for c in range(count)
    )
    ratios = []
    with DiskLedger.create(path, Model(Params.zeros(layout))) as ledger:
        for index in range(2):
            plain = folder / "plain"
            write = seconds_of(partial(write_plainly, plain, payload, num_bytes))
            plain.unlink()
            append = seconds_of(partial(ledger.append, Round(index, updates)))
            ratios.append(append / write)
    shutil.rmtree(path)
    return {"append_wide_over_write": min(ratios)}


def phone_federation(folder: Path, sizes: Sizes) -> Figures:
    """Return what a federation of phones costs that keeps ten updates a round."""
    clients, drawn, rounds, values = sizes.phones
    path = folder / "phones"
    shutil.rmtree(path, ignore_errors=True)
    layout = Layout((Slot("w", (values // 100, 100), "float32"),))
    bases = random_bases(layout)
    rng = stream(0, "scale phones")
    keep = Keep.parse("optimal:10", seed=1)
    seconds = []
    with DiskLedger.create(path, Model(Params.zeros(layout))) as ledger:
        for index in range(rounds):
            names = rng.choice(clients, drawn, replace=False).tolist()
            updates = tuple(
                ClientUpdate(
                    client_name(c),
                    1 / drawn,
                    Params(layout, np.roll(bases[c % 2], 7 * c + index)),
                )
                for c in names
            )
            round_ = keep(Round(index, updates, local=LOCAL))
            seconds.append(seconds_of(partial(ledger.append, round_)))
        num_bytes = ledger.num_array_bytes()
        kept = {u.client for u in ledger.updates_in(rounds // 2) if u.kept}
        leaver = min(kept)
        looking = seconds_of(lambda: preview(ledger, [leaver]))
    shutil.rmtree(path)
    return {
        "phones_append_ms": 1e3 * median(seconds),
        "phones_gb": num_bytes / 1e9,
        "phones_gb_with_all": rounds * (drawn + 1) * 4 * layout.size / 1e9,
        "phones_forget_seconds": looking,
    }


def start_up(folder: Path, sizes: Sizes) -> Figures:
    """Return how long the command line takes to say what it can do."""
    commands = {
        "help": [sys.executable, "-m", "fastfedul", "--help"],
        "numpy": [sys.executable, "-c", "import numpy"],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(4 * sizes.repetitions):
        for name, command in commands.items():
            times[name].append(seconds_of(partial(run_silently, command)))
    best = {name: min(found) for name, found in times.items()}
    return {"help_over_numpy": best["help"] / best["numpy"]}


def run_silently(command: Sequence[object]) -> None:
    """Run a command and look at nothing but its success."""
    subprocess.run([str(word) for word in command], check=True, capture_output=True)


def fast_folder(folder: Path) -> Path:
    """Return a folder in memory if there is one with room, else the one given."""
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > 4e9:
        return Path(tempfile.mkdtemp(prefix="fastfedul-", dir=memory))
    return folder


WANTED: dict[str, tuple[str, float]] = {
    "forget_over_read_1e6": ("<=", 4),
    "forget_over_read_1e7": ("<=", 4),
    "forget_over_read_1e8": ("<=", 4),
    "bytes_read_over_needed_1e7": ("<=", 1.1),
    "bytes_read_over_needed_1e8": ("<=", 1.1),
    "algebra_seconds_1e8": ("<=", 180),
    "peak_gb_1e8": ("<=", 2),
    "peak_erasing_gb_1e8": ("<=", 2),
    "append_over_write_1e6": ("<=", 1.3),
    "append_over_write_1e7": ("<=", 1.3),
    "append_over_write_1e8": ("<=", 1.3),
    "append_growth_rounds": ("<=", 1.2),
    "files_50000_rounds": ("<=", 1000),
    "clients_seconds": ("<=", 1),
    "info_seconds": ("<=", 1),
    "forget_50000_rounds_seconds": ("<=", 5),
    "append_wide_over_write": ("<=", 1.5),
    "help_over_numpy": ("<=", 3),
}
"""What is wanted of a figure, where something is."""


def parts_of(sizes: Sizes) -> dict[str, Callable[[Path, Sizes], Figures]]:
    """Return every part of the benchmark by its name."""
    return {
        "start": start_up,
        "tiny-rounds": tiny_rounds,
        "clients": many_clients,
        **{f"append-{n}": partial(append_at, n) for n in sizes.written},
        "wide-round": wide_round,
        "phones": phone_federation,
        **{f"forget-{n}": partial(forget_from, n) for n in sizes.parameters},
    }


def main() -> None:
    """Run every part that is not done yet, and print what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="small sizes, a minute")
    parser.add_argument("--work", type=Path, help="folder that keeps what is done")
    parser.add_argument("--only", nargs="+", help="parts to run")
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else FULL
    parts = parts_of(sizes)
    unknown = set(arguments.only or ()) - set(parts)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; parts: {', '.join(parts)}")
    with ExitStack() as stack:
        if arguments.work is None:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            work = arguments.work
            work.mkdir(parents=True, exist_ok=True)
        state = work / ("quick.json" if arguments.quick else "done.json")
        done: dict[str, Figures] = (
            json.loads(state.read_text()) if state.exists() else {}
        )
        for name in arguments.only or parts:
            if name in done:
                continue
            print(f"{time.strftime('%H:%M:%S')} {name}", file=sys.stderr, flush=True)
            done[name] = parts[name](work, sizes)
            state.write_text(json.dumps(done, indent=2))
    figures = {key: value for own in done.values() for key, value in own.items()}
    rows = []
    for key, value in figures.items():
        sign, limit = WANTED.get(key, ("", 0.0))
        wanted = f"{sign} {limit:g}" if sign else ""
        met = "" if not sign else ("yes" if value <= limit else "no")
        rows.append(
            (key, f"{value:.3g}" if value < 1e4 else f"{value:,.0f}", wanted, met)
        )
    write_result(
        {**figures, "machine": machine()},
        only_json=arguments.json,
        title="How it grows",
        columns=("figure", "found", "wanted", "met"),
        rows=rows,
    )


if __name__ == "__main__":
    main()
