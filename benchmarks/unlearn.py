"""How fast forgetting is, what it needs, and how that grows.

Every ratio is taken within one run, between things that take turns, and comes with
the seconds behind it. It takes a few minutes on an idle machine, 6 GB of memory and
6 GB of disk.

    python benchmarks/unlearn.py [--json] [--quick] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import numpy as np
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import (
    History,
    MadeUpRounds,
    algorithm_2,
    algorithm_2_in_blocks,
    algorithm_2_in_place,
    client_name,
    interleaved,
    machine,
    peak_of,
    progress,
    read_memory,
    seconds_of,
    work_folder,
    write_plainly,
    write_result,
)
from fastfedul import (
    DiskLedger,
    FastFedUL,
    Ledger,
    LedgerReader,
    MemoryLedger,
    Round,
    Scalar,
    UnlearnRequest,
)
from fastfedul.ledger.store.array_files import ArrayFiles
from fastfedul.ledger.store.arrays import ArrayWriter, new_part
from fastfedul.ledger.store.codec import STORAGE_DTYPES
from fastfedul.params import Flat
from fastfedul.records import VectorRef

TARGET = client_name(0)
DAMPING = 0.07
ROUNDS_TOGETHER = 8
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much of everything.

    Attributes:
        parameters: Values of the model.
        rounds: Rounds of the history, the target in every one.
        clients: Participants of each round.
        rounds_on_disk: Rounds of the ledger that times appends and forgets in bounded
            memory: two or more times eight.
        repetitions: How often everything is timed.
        growth_clients: Participants of each round while parameters or rounds grow.
        few_parameters: Values of the model while the number of clients grows.
        many_clients: Participants of each round when it has grown.
        trained_rounds: Rounds of the small run that is really trained, and retrained.
    """

    parameters: int = 1_700_000
    rounds: int = 51
    clients: int = 10
    rounds_on_disk: int = 56
    repetitions: int = 11
    growth_clients: int = 2
    few_parameters: int = 170_000
    many_clients: int = 100
    trained_rounds: int = 20


QUICK = Sizes(
    parameters=70_000,
    rounds=15,
    clients=5,
    rounds_on_disk=16,
    repetitions=3,
    few_parameters=7_000,
    many_clients=50,
    trained_rounds=2,
)


@dataclass(slots=True)
class Figures:
    """Ratios and other results, the seconds behind them, and the lines to print."""

    results: dict[str, object] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    lines: list[tuple[str, str, str, str]] = field(default_factory=list)

    def ratio(self, name: str, above: str, below: str, target: str = "") -> None:
        """Record the ratio of two recorded times."""
        one, other = self.seconds[above], self.seconds[below]
        self.results[name] = round(one / other, 3)
        self.line(name, f"{one / other:.2f}", target, f"{one:.4f} / {other:.4f}")

    def line(self, name: str, result: str, target: str = "", seconds: str = "") -> None:
        """Record a line of the table."""
        self.lines.append((name, result, target, seconds))


def main() -> None:
    """Run every measurement and print what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="small sizes, seconds")
    parser.add_argument("--folder", type=Path, help="where ledgers are put; on a disk")
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else Sizes()
    figures, before = Figures(), machine()
    with progress() as display, work_folder(arguments.folder) as folder:
        measure_history(folder, sizes, figures, display)
        measure_peak(folder / "ledger", figures, display)
        shutil.rmtree(folder / "ledger")
        measure_growth(folder, sizes, figures, display)
        measure_clients(folder, sizes, figures, display)
        measure_compaction(folder, sizes, figures, display)
        measure_retraining(folder, sizes, figures, display)
        measure_dtypes(folder, sizes, figures)
    result = {
        **figures.results,
        "seconds": {name: round(value, 6) for name, value in figures.seconds.items()},
        "sizes": asdict(sizes),
        "machine": before,
    }
    write_result(
        result,
        only_json=arguments.json,
        title=f"{sizes.parameters:,} parameters, {sizes.rounds} rounds, "
        f"{sizes.clients} clients"
        + (" (too small for the targets)" if arguments.quick else ""),
        columns=("measurement", "result", "target", "seconds"),
        rows=figures.lines,
    )


def forgotten(ledger: Ledger) -> Flat:
    """Return what forgetting the target adds to the model."""
    request = UnlearnRequest(ledger, frozenset({TARGET}))
    return FastFedUL(skew=Scalar(DAMPING))(request).delta.flat


def forgotten_from_disk(path: Path) -> Flat:
    """Return the same from a ledger on disk, opened for it and closed again."""
    with LedgerReader(path) as ledger:
        return forgotten(ledger)


def forgotten_as_usual(path: Path) -> Flat:
    """Return the same with the skew that is the default."""
    with LedgerReader(path) as ledger:
        request = UnlearnRequest(ledger, frozenset({TARGET}))
        return FastFedUL()(request).delta.flat


def measure_history(
    folder: Path, sizes: Sizes, figures: Figures, display: Progress
) -> None:
    """Build one history in memory and on disk, timing appends; forget from both."""
    made_up = MadeUpRounds.of(sizes.parameters, sizes.clients)
    memory = MemoryLedger.create(made_up.initial)
    path = folder / "ledger"
    appends = Appends(folder)
    task = display.add_task("appending", total=sizes.rounds_on_disk)
    with DiskLedger.create(path, made_up.initial) as disk:
        for index in range(sizes.rounds_on_disk):
            if index == sizes.rounds:
                measure_speed(memory, path, sizes, figures, display)
                del memory
            round_ = made_up.round(index)
            if index < sizes.rounds:
                memory.append(round_)
            appends.time(disk, round_)
            display.advance(task)
    appends.report(figures)


def measure_speed(
    memory: MemoryLedger, path: Path, sizes: Sizes, figures: Figures, display: Progress
) -> None:
    """Time forgetting, Algorithm 2 and the reading of memory in turns."""
    history = history_of(memory, sizes)
    words = np.ones(sizes.rounds * sizes.parameters, np.uint64)  # two float32 each
    forms = (algorithm_2, algorithm_2_in_place, algorithm_2_in_blocks)
    task = display.add_task("forgetting", total=sizes.repetitions + 1)
    with ThreadPoolExecutor(2) as pool:
        answers: dict[str, Callable[[], Flat]] = {
            "memory": partial(forgotten, memory),
            "disk": partial(forgotten_from_disk, path),
            **{form.__name__: partial(form, history, DAMPING) for form in forms},
        }
        expected = algorithm_2(history, DAMPING)
        for name, answer in answers.items():
            np.testing.assert_allclose(answer(), expected, 1e-3, 1e-7, err_msg=name)
        figures.seconds |= interleaved(
            {"memory_read": partial(read_memory, words, pool), **answers},
            sizes.repetitions,
            partial(display.advance, task),
        )
    for form in forms:
        target = ">= 25" if form is algorithm_2 else ""
        figures.ratio(f"speedup_over_{form.__name__}", form.__name__, "memory", target)
    # No answer can come before its bytes have been read.
    figures.ratio("speedup_possible", "algorithm_2", "memory_read")
    figures.ratio("over_memory_read", "memory", "memory_read", "<= 1.6")
    figures.ratio("over_memory_read_disk", "disk", "memory_read", "<= 4.5")
    figures.results["memory_read_bytes"] = words.nbytes


def history_of(memory: MemoryLedger, sizes: Sizes) -> History:
    """Return every update by round and client, where it lies in the ledger.

    The ledger has no public way to them without a copy, and a copy of everything
    would double the memory this needs.
    """
    return [
        [
            memory._row(VectorRef(index, client_name(client)))
            for client in range(sizes.clients)
        ]
        for index in range(sizes.rounds)
    ]


@dataclass(frozen=True, slots=True)
class Appends:
    """Times of every append, and of a plain write of as many bytes right after it.

    Attributes:
        folder: Where the ledger is.
        times: Seconds of the append and of the plain write.
        num_bytes: Bytes of the array files that the append left.
    """

    folder: Path
    times: list[tuple[float, float]] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)

    def time(self, ledger: DiskLedger, round_: Round) -> None:
        """Append a round, then write as many bytes to a plain file."""
        arrays, plain = self.folder / "ledger" / "arrays", self.folder / "plain"
        before = sizes_in(arrays)
        append = seconds_of(lambda: ledger.append(round_))
        # Small rounds are added to a file that was there before.
        added = {n: size - before.get(n, 0) for n, size in sizes_in(arrays).items()}
        num_bytes = sum(added.values())
        payload = memoryview(bytes([len(self.times) % 256]) * _CHUNK_BYTES)
        write = seconds_of(lambda: write_plainly(plain, payload, num_bytes))
        plain.unlink()
        self.times.append((append, write))
        self.num_bytes.append(num_bytes)

    def report(self, figures: Figures) -> None:
        """Record the median ratio over periods of a few rounds.

        A ratio of totals would hang on a few slow syncs of the disk.
        """
        starts = range(0, len(self.times) - ROUNDS_TOGETHER + 1, ROUNDS_TOGETHER)
        periods = [np.sum(self.times[i : i + ROUNDS_TOGETHER], axis=0) for i in starts]
        ratios = [float(append / write) for append, write in periods]
        append, write = (sum(column) for column in zip(*self.times, strict=True))
        figures.seconds["append_total"] = append
        figures.seconds["plain_write_total"] = write
        figures.results["append_over_write"] = round(median(ratios), 3)
        figures.results["append_over_write_by_period"] = [round(r, 3) for r in ratios]
        figures.results["append_over_write_of_totals"] = round(append / write, 3)
        figures.results["append_bytes"] = sum(self.num_bytes)
        figures.line(
            "append_over_write",
            f"{median(ratios):.2f}",
            "<= 1.5",
            f"{append:.4f} / {write:.4f}",
        )


def sizes_in(folder: Path) -> dict[str, int]:
    """Return the bytes of each file in a folder."""
    return {entry.name: entry.stat().st_size for entry in os.scandir(folder)}


_START = "import sys\nfrom fastfedul import *\npath = sys.argv[1]\n"
_FORGETTINGS = {
    "peak_mb_answer": "with LedgerReader(path) as ledger:\n"
    "    FastFedUL()(UnlearnRequest(ledger, frozenset({'client-0'})))",
    "peak_mb_forget": "with DiskLedger(path) as ledger:\n"
    "    forget(ledger, ['client-1'])",
    "peak_mb_forget_and_erase": "with DiskLedger(path) as ledger:\n"
    "    forget(ledger, ['client-2'], erase=True)",
}


def measure_peak(path: Path, figures: Figures, display: Progress) -> None:
    """Forget from the large ledger in fresh processes; the worst of them counts."""
    task = display.add_task("measuring memory", total=len(_FORGETTINGS))
    with LedgerReader(path) as ledger:
        num_bytes = ledger.num_array_bytes()
    baseline = peak_of("import numpy")
    peaks = {}
    for name, code in _FORGETTINGS.items():
        peak = peak_of(_START + code, path)
        peaks[name] = round((peak - baseline) / 1e6, 1)
        display.advance(task)
    worst = max(peaks.values())
    figures.results["peak_mb_over_baseline"] = worst
    figures.results |= peaks
    figures.results["baseline_mb"] = round(baseline / 1e6, 1)
    figures.results["ledger_bytes"] = num_bytes
    figures.line(
        f"peak_mb_over_baseline, {num_bytes / 1e9:.2f} GB", str(worst), "<= 300"
    )
    for name, value in peaks.items():
        figures.line(f"  {name}", str(value))


def build(
    path: Path | None, size: int, num_clients: int, num_rounds: int
) -> Callable[[], object]:
    """Return how to forget from a new ledger at a path, or in memory without one."""
    made_up = MadeUpRounds.of(size, num_clients)
    if path is None:
        memory = MemoryLedger.create(made_up.initial)
        for index in range(num_rounds):
            memory.append(made_up.round(index))
        return lambda: forgotten(memory)
    with DiskLedger.create(path, made_up.initial) as disk:
        for index in range(num_rounds):
            disk.append(made_up.round(index))
    return lambda: forgotten_from_disk(path)


def measure_growth(
    folder: Path, sizes: Sizes, figures: Figures, display: Progress
) -> None:
    """Time forgetting at the base size and with parameters or rounds doubled."""
    shapes = {
        "base": (sizes.parameters, sizes.rounds),
        "parameters": (2 * sizes.parameters, sizes.rounds),
        "rounds": (sizes.parameters, 2 * sizes.rounds),
    }
    for place, suffix in (("memory", ""), ("disk", "_disk")):
        task = display.add_task(
            f"growing in {place}", total=len(shapes) + sizes.repetitions + 1
        )
        functions = {}
        for name, (size, rounds) in shapes.items():
            path = folder / f"growth-{name}" if suffix else None
            key = f"growth_{name}{suffix}"
            functions[key] = build(path, size, sizes.growth_clients, rounds)
            display.advance(task)
        figures.seconds |= interleaved(
            functions, sizes.repetitions, partial(display.advance, task)
        )
        for name in ("parameters", "rounds"):
            key = f"growth_{name}{suffix}"
            figures.ratio(key, key, f"growth_base{suffix}", "1.8 to 2.2")
        functions.clear()
    for name in shapes:
        shutil.rmtree(folder / f"growth-{name}")


def measure_clients(
    folder: Path, sizes: Sizes, figures: Figures, display: Progress
) -> None:
    """Time forgetting with many clients in every round and with few."""
    for place, suffix in (("memory", ""), ("disk", "_disk")):
        task = display.add_task(
            f"more clients in {place}", total=2 + 3 * sizes.repetitions + 1
        )
        functions = {}
        for count in (sizes.clients, sizes.many_clients):
            path = folder / f"clients-{count}" if suffix else None
            functions[f"clients_{count}{suffix}"] = build(
                path, sizes.few_parameters, count, sizes.rounds
            )
            display.advance(task)
        # The model is small here, so there is time for more repetitions.
        figures.seconds |= interleaved(
            functions, 3 * sizes.repetitions, partial(display.advance, task)
        )
        few, many = functions
        figures.ratio(f"growth_clients{suffix}", many, few, "<= 1.2")
        functions.clear()


def measure_compaction(
    folder: Path, sizes: Sizes, figures: Figures, display: Progress
) -> None:
    """Time forgetting from a ledger of rounds and from the same one compacted."""
    made_up = MadeUpRounds.of(sizes.parameters, sizes.clients)
    paths = {name: folder / f"history-{name}" for name in ("full", "compact")}
    task = display.add_task("compacting", total=sizes.rounds + sizes.repetitions + 2)
    with DiskLedger.create(paths["full"], made_up.initial) as ledger:
        for index in range(sizes.rounds):
            ledger.append(made_up.round(index))
            display.advance(task)
    shutil.copytree(paths["full"], paths["compact"])
    with DiskLedger(paths["compact"]) as ledger:
        figures.seconds["compaction"] = seconds_of(ledger.compact)
    display.advance(task)
    expected, found = map(forgotten_as_usual, paths.values())
    figures.seconds |= interleaved(
        {name: partial(forgotten_as_usual, p) for name, p in paths.items()},
        sizes.repetitions,
        partial(display.advance, task),
    )
    figures.ratio("compact_over_full_seconds", "compact", "full")
    gap = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    figures.results["compact_distance"] = gap
    figures.line("compact_distance, relative", f"{gap:.1e}")
    for name, path in paths.items():
        with LedgerReader(path) as reader:
            num_bytes = reader.num_array_bytes()
        figures.results[f"{name}_bytes"] = num_bytes
        figures.line(f"{name}_bytes", f"{num_bytes:,}")
        shutil.rmtree(path)


def measure_retraining(
    folder: Path, sizes: Sizes, figures: Figures, display: Progress
) -> None:
    """Time forgetting from rounds and from sums beside retraining a small run."""
    if find_spec("torch") is None:
        figures.results["retraining_over_compact"] = None
        figures.line("retraining_over_compact", "not measured: needs the extra torch")
        return
    from fastfedul.runs.comparison import compare
    from fastfedul.runs.training import RunConfig, train

    task = display.add_task("retraining", total=2 + sizes.repetitions + 1)
    run, compact = folder / "run", folder / "run-compact"
    train(RunConfig(rounds=sizes.trained_rounds), run)
    display.advance(task)
    compared = compare(run, [TARGET], methods=["fast-fedul"])
    display.advance(task)
    figures.seconds["retraining"] = compared.rows[1].seconds
    shutil.copytree(run, compact)
    with DiskLedger(compact) as ledger:
        ledger.compact()
    paths = {"of_run_full": run, "of_run_compact": compact}
    figures.seconds |= interleaved(
        {name: partial(forgotten_as_usual, p) for name, p in paths.items()},
        sizes.repetitions,
        partial(display.advance, task),
    )
    figures.ratio("retraining_over_compact", "retraining", "of_run_compact")
    figures.ratio("retraining_over_full", "retraining", "of_run_full")


def measure_dtypes(folder: Path, sizes: Sizes, figures: Figures) -> None:
    """Record the bytes of an update's file in every storage dtype."""
    vector = MadeUpRounds.of(sizes.parameters, 1).bases[0]
    found = {}
    for number, dtype in enumerate(STORAGE_DTYPES):
        with ArrayWriter(ArrayFiles(folder), number) as writer:
            writer.add([new_part("0.update.1", vector, dtype)])
            writer.sync()
            found[dtype] = writer.end
    figures.results["bytes_per_update"] = found
    for dtype, num_bytes in found.items():
        figures.line(f"bytes_per_update, {dtype}", f"{num_bytes:,}")


if __name__ == "__main__":
    main()
