"""Whether a killed writer loses anything, and whether a wrong byte is ever believed.

Three things: SIGKILL at random instants of appending and of forgetting with erasure;
random bytes flipped in every file of a ledger; and, because a kill cannot reveal a
missing sync, the order of system calls as `strace` sees it.

    python benchmarks/faults.py [--json] [--kills 200] [--flips 500] [--seed 0]

It exits with status 1 if anything was lost, believed or out of order.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice, permutations
from pathlib import Path
from statistics import median

import numpy as np
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import (
    client_name,
    machine,
    progress,
    work_folder,
    write_result,
)

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    FastFedUL,
    FastFedULError,
    LedgerReader,
    Model,
    Params,
    Round,
    UnlearnRequest,
    add_request,
    forget,
    read_round,
    verify,
)
from fastfedul.history.ledger import vector
from fastfedul.history.schema import COLUMNS
from fastfedul.params import Flat, weighted_sum
from fastfedul.records import StorageDtype, VectorRef
from fastfedul.rng import stream

NUM_CLIENTS = 5
TARGET = client_name(1)
METHOD = FastFedUL(minimum_coverage=0)
KILL_SIZE = 100_000
FLIP_SIZE = 70_000  # A little more than one block of checksummed values.
ROUNDS_PER_LEDGER = 40
ERASE_ROUNDS = 8
FLIP_ROUNDS = 10
SUMS_EVERY = 4
JOURNAL = "index.sqlite-journal"
_SHOWN = 20

Problems = list[str]
Tick = Callable[[], object]


def main() -> None:
    """Run the three parts and print what came out."""
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments.worker, arguments.folder, arguments.seed, arguments.rounds)
        return
    seed = arguments.seed
    with progress() as display, work_folder(arguments.folder) as folder:
        order = check_order(folder.resolve(), seed)
        appends = kill_appends(
            folder, arguments.kills - arguments.kills // 2, seed, display
        )
        erasures = kill_erasures(folder, arguments.kills // 2, seed, display)
        flips = flip_bytes(folder, arguments.flips, seed, display)
    violations = [*appends.problems, *erasures.problems]
    result = {
        "kills": appends.kills + erasures.kills,
        "lost": len(violations),
        "flips": flips.flips,
        "silent": flips.silent,
        "crashed": flips.crashed,
        "verify_missed": flips.verify_missed,
        "files_destroyed": flips.destroyed,
        "order": order,
        "append": appends.summary(),
        "erase": erasures.summary(),
        "flip": flips.summary(),
        "violations": violations[:_SHOWN],
        "machine": machine(),
    }
    write_result(
        result,
        only_json=arguments.json,
        title="Faults: what they did",
        columns=("fault", "number", "of these"),
        rows=table_rows(appends, erasures, flips, order),
    )
    bad = len(violations) + flips.silent + flips.crashed
    bad += flips.verify_missed + flips.destroyed
    sys.exit(1 if bad or order not in ("ok", "no strace") else 0)


def parse_arguments() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--kills", type=int, default=200, help="kills in an operation")
    parser.add_argument("--flips", type=int, default=500, help="bytes to flip")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything")
    parser.add_argument("--folder", type=Path, help="where ledgers are put; on a disk")
    parser.add_argument("--worker", choices=("append", "erase"), help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def table_rows(
    appends: Kills, erasures: Kills, flips: Flips, order: str
) -> list[tuple[str, str, str]]:
    """Return the lines of the table."""
    rows = []
    for name, kills in (("append", appends), ("forget and erase", erasures)):
        rows += [
            (f"kills during {name}", str(kills.kills), ""),
            ("", str(kills.unacknowledged), "committed, not yet acknowledged"),
            ("", str(len(kills.problems)), "violations"),
        ]
    rows += [
        ("flipped bytes", str(flips.flips), ""),
        ("", str(flips.detected), "refused by an error"),
        ("", str(flips.harmless), "without effect on any answer"),
        ("", str(flips.silent), "silently wrong"),
        ("", str(flips.crashed), "some other exception"),
        ("", str(flips.verify_missed), "missed by verify"),
        ("", str(flips.destroyed), "made a writer remove files"),
        ("order of system calls", order, ""),
    ]
    return rows


# What is written: everything follows from the seed and the round.


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
    command = [sys.executable, __file__, "--worker", kind, "--folder", str(path)]
    command += ["--seed", str(seed)]
    return command if rounds is None else [*command, "--rounds", str(rounds)]


# Kills.


@dataclass(slots=True)
class Kills:
    """What became of the kills.

    Attributes:
        kills: Those that landed between the start of an operation and its
            acknowledgement.
        outside: Others: while the ledger was being opened, or just afterwards.
        unacknowledged: Operations that were killed but found to be committed.
        empty_journals: Times when, after the ledger was opened for writing, there was
            a journal whose header SQLite had not written yet. It is void and the next
            commit removes it.
        problems: One line for each violation.
    """

    kills: int = 0
    outside: int = 0
    unacknowledged: int = 0
    empty_journals: int = 0
    problems: Problems = field(default_factory=list)

    def summary(self) -> dict[str, int]:
        """Return the counts."""
        return {
            "kills": self.kills,
            "outside_an_operation": self.outside,
            "committed_unacknowledged": self.unacknowledged,
            "empty_journals": self.empty_journals,
            "lost": len(self.problems),
        }


@dataclass(frozen=True, slots=True)
class Said:
    """What a worker said before it was killed, or ended."""

    lines: tuple[str, ...]
    failed: bool

    @property
    def num_done(self) -> int:
        """Operations acknowledged."""
        return sum(line.startswith("done") for line in self.lines)

    @property
    def interrupted(self) -> bool:
        """Whether it was killed between start and acknowledgement."""
        return bool(self.lines) and self.lines[-1].startswith("start")

    def seconds(self, word: str) -> float:
        """Return the median of the times behind a word."""
        found = [line.split() for line in self.lines]
        times = [float(line[1]) for line in found if line[0] == word]
        if not times:
            raise SystemExit("a worker that nobody disturbed failed; see above")
        return median(times)


def run_worker(
    command: Sequence[str], *, after: str = "", delay: float | None = None
) -> Said:
    """Start a worker and kill it some time after a certain word, or let it finish."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        if delay is not None:
            for line in process.stdout:
                lines.append(line.strip())
                if line.startswith(after):
                    break
            time.sleep(delay)
            process.kill()
        lines += process.stdout.read().splitlines()
        status = process.wait()
    return Said(tuple(lines), status not in (0, -signal.SIGKILL))


def kill_appends(folder: Path, wanted: int, seed: int, display: Progress) -> Kills:
    """Kill appending workers, one after the other on the same ledger."""
    tally = Kills()
    if not wanted:
        return tally
    rng = stream(seed, "kill-append")
    task = display.add_task("killing appends", total=wanted)
    path, num_rounds, reach = folder / "appended", ROUNDS_PER_LEDGER, 0.0
    while tally.kills < wanted and tally.outside <= 3 * wanted:
        if num_rounds >= ROUNDS_PER_LEDGER:
            seed, num_rounds = seed + 1, 0
            shutil.rmtree(path, ignore_errors=True)
            DiskLedger.create(path, initial(KILL_SIZE), sums_every=SUMS_EVERY).close()
        if not reach:
            said = run_worker(worker_command("append", path, seed, 2 * SUMS_EVERY))
            reach = said.seconds("ready") + 3 * said.seconds("done")
        else:
            delay = float(rng.uniform(0, reach))
            command = worker_command("append", path, seed, None)
            said = run_worker(command, after="opening", delay=delay)
            tally.kills += said.interrupted
            tally.outside += not said.interrupted
        acknowledged = num_rounds + said.num_done
        found, problems = inspect_append(path, seed, num_rounds, acknowledged, said)
        tally.unacknowledged += found > acknowledged
        tally.empty_journals += (path / JOURNAL).exists()
        tally.problems += [f"append, ledger {seed}: {problem}" for problem in problems]
        # After a violation the ledger is of no more use.
        num_rounds = ROUNDS_PER_LEDGER if problems else found
        display.update(task, completed=tally.kills)
    shutil.rmtree(path)
    return tally


def inspect_append(
    path: Path, seed: int, before: int, acknowledged: int, said: Said
) -> tuple[int, Problems]:
    """Return how many rounds there are, and what is wrong with them."""
    problems = ["the worker failed"] if said.failed else []
    found = before
    try:
        with LedgerReader(path) as reader:
            seen = reader.num_rounds
        with DiskLedger(path) as ledger:
            found = ledger.num_rounds
            if not acknowledged <= found <= acknowledged + said.interrupted:
                problems.append(f"{acknowledged} rounds acknowledged, {found} found")
            if seen != found:
                problems.append(f"a reader saw {seen} rounds, the next writer {found}")
            problems += condition(ledger)
            # A ledger that is about to be given up is compared from the beginning.
            first = 0 if found >= ROUNDS_PER_LEDGER else before
            problems += differences(ledger, seed, range(first, found))
            problems += inconsistencies(ledger)
            if first == 0:
                problems += wrong_sums(ledger, seed)
    except Exception as error:
        problems.append(f"{type(error).__name__}: {error}")
    return found, problems


def condition(ledger: DiskLedger) -> Iterator[str]:
    """Yield what is wrong with the files after the ledger was opened for writing."""
    names = {entry.name for entry in os.scandir(ledger.path)}
    strange = names - {"arrays", "index.sqlite", "lock", JOURNAL}
    if strange:
        yield f"{sorted(strange)} were left behind"
    if JOURNAL in names and (ledger.path / JOURNAL).read_bytes()[:1] > b"\0":
        yield "a journal that could still be rolled back was left behind"
    found = verify(ledger)
    yield from found.problems
    if found.num_strays:
        yield f"{found.num_strays} stray files were not swept"


def differences(
    ledger: LedgerReader,
    seed: int,
    indices: Iterable[int],
    gone: frozenset[str] = frozenset(),
) -> Iterator[str]:
    """Yield where rounds are not, bit by bit, what was sent less the clients gone."""
    for index in indices:
        updates = sent(seed, index).updates
        staying = {u.client: u for u in updates if u.client not in gone}
        entries = {entry.client: entry for entry in ledger.updates_in(index)}
        if entries.keys() != staying.keys():
            yield f"round {index} has {sorted(entries)} in place of {sorted(staying)}"
            continue
        for name, update in staying.items():
            entry = entries[name]
            if (entry.share, entry.kept) != (update.share, update.kept):
                yield f"round {index}, {name}: another share or not kept"
            elif update.kept:
                stored = vector(ledger, VectorRef(index, name))
                if not np.array_equal(stored, flat_of(update)):
                    yield f"round {index}, {name}: not the update that was sent"
        if len(staying) == len(updates):
            step = weighted_sum(
                [flat_of(u) for u in updates], [u.share for u in updates]
            )
            if not np.array_equal(vector(ledger, VectorRef(index)), step):
                yield f"round {index}: not the step of its updates"


def flat_of(update: ClientUpdate) -> Flat:
    """Return the values of an update that is there."""
    assert update.delta is not None
    return update.delta.flat


def inconsistencies(ledger: LedgerReader) -> Iterator[str]:
    """Yield where the current model is not the sum of what led to it."""
    adjustments = ledger.adjustments()
    flat = ledger.initial.params.flat
    for index in range(ledger.num_rounds):
        flat = flat + adjustments.get(index, np.float32(0))
        flat = flat + vector(ledger, VectorRef(index))
    flat = flat + adjustments.get(ledger.num_rounds, np.float32(0))
    final = ledger.final
    tolerance = 1e-5 if adjustments else 0
    if not np.allclose(final.params.flat, flat, rtol=0, atol=tolerance):
        yield "the current model is not the initial one plus steps and adjustments"
    if int(final.buffers["count"]) != ledger.num_rounds:
        yield f"the buffer is that of round {final.buffers['count']}"


def wrong_sums(ledger: LedgerReader, seed: int) -> Iterator[str]:
    """Yield clients whose running sums are not those of what was sent."""
    sums: dict[str, Flat] = {}
    for index in range(ledger.num_rounds):
        for update in sent(seed, index).updates:
            part = flat_of(update) * np.float32(update.share)
            sums[update.client] = sums.get(update.client, np.float32(0)) + part
    for name, expected in sums.items():
        if not np.allclose(ledger.running_sums(name).weighted, expected, atol=1e-6):
            yield f"{name}: the running sum is wrong"


@dataclass(frozen=True, slots=True)
class State:
    """Where a ledger stands: everything that an erasure changes."""

    client: str
    num_updates: int
    num_events: int
    chain: bytes
    files: frozenset[str]
    model: bytes

    @classmethod
    def of(cls, path: Path) -> State:
        """Return the state of the ledger at a path."""
        with LedgerReader(path) as ledger:
            return cls(
                ledger.clients()[TARGET].state,
                len(ledger.updates_of(TARGET)),
                len(ledger.events()),
                ledger.chain,
                frozenset(entry.name for entry in os.scandir(path / "arrays")),
                ledger.final.params.flat.tobytes(),
            )


def kill_erasures(folder: Path, wanted: int, seed: int, display: Progress) -> Kills:
    """Kill workers that forget and erase a client, each on a copy of one ledger."""
    tally = Kills()
    if not wanted:
        return tally
    rng = stream(seed, "kill-erase")
    task = display.add_task("killing erasures", total=wanted)
    template, path = folder / "template", folder / "erased"
    with DiskLedger.create(
        template, initial(KILL_SIZE), sums_every=SUMS_EVERY
    ) as ledger:
        for index in range(ERASE_ROUNDS):
            ledger.append(sent(seed, index))
    before = State.of(template)
    shutil.copytree(template, path)
    said = run_worker(worker_command("erase", path, seed, 1))
    after, reach = State.of(path), 1.3 * said.seconds("done")
    tally.problems += remains(template, after)
    while tally.kills < wanted and tally.outside <= 3 * wanted:
        shutil.rmtree(path)
        shutil.copytree(template, path)
        command = worker_command("erase", path, seed, 1)
        delay = float(rng.uniform(0, reach))
        said = run_worker(command, after="start", delay=delay)
        tally.kills += said.interrupted
        tally.outside += not said.interrupted
        erased, problems = inspect_erasure(path, seed, before, after, said)
        tally.unacknowledged += erased and not said.num_done
        tally.empty_journals += (path / JOURNAL).exists()
        tally.problems += [f"erasure: {problem}" for problem in problems]
        display.update(task, completed=tally.kills)
    return tally


def remains(template: Path, after: State) -> Iterator[str]:
    """Yield what an undisturbed erasure left of the client."""
    with sqlite3.connect(template / "index.sqlite") as connection:
        number = "(SELECT id FROM clients WHERE name = ?1)"
        own = connection.execute(
            f"SELECT array FROM updates WHERE client = {number} "
            f"UNION SELECT array FROM pending WHERE client = {number} "
            f"UNION SELECT weighted FROM clients WHERE id = {number} "
            f"UNION SELECT squared FROM clients WHERE id = {number} "
            "UNION SELECT step FROM rounds WHERE round IN "
            f"(SELECT round FROM updates WHERE client = {number})",
            (TARGET,),
        ).fetchall()
    connection.close()
    names = {f"{array.hex()}.safetensors" for (array,) in own if array is not None}
    if names & after.files or after.client != "erased" or after.num_updates:
        yield "an undisturbed erasure left something of the client"


def inspect_erasure(
    path: Path, seed: int, before: State, after: State, said: Said
) -> tuple[bool, Problems]:
    """Return whether the client is erased, and whether that is all or nothing."""
    problems = ["the worker failed"] if said.failed else []
    erased = False
    try:
        with DiskLedger(path) as ledger:
            problems += condition(ledger)
            erased = ledger.clients()[TARGET].state == "erased"
            gone = frozenset({TARGET}) if erased else frozenset()
            problems += differences(ledger, seed, range(ledger.num_rounds), gone)
            problems += inconsistencies(ledger)
        found = State.of(path)
        if found != (after if erased else before):
            problems.append("neither as before nor as after an undisturbed erasure")
        if said.num_done and not erased:
            problems.append("acknowledged but not done")
    except Exception as error:
        problems.append(f"{type(error).__name__}: {error}")
    return erased, problems


# Flips.


@dataclass(slots=True)
class Flips:
    """What became of the flipped bytes; every one is counted once from `detected` on.

    Attributes:
        of_index: Flips in the index.
        of_arrays: Flips in array files.
        detected: An error of the library was raised, and no answer was wrong.
        harmless: Every answer was the right one.
        silent: An answer was wrong.
        crashed: Some other exception was raised.
        verify_missed: Not reported by `verify`, though a file of arrays or a value of
            the index was changed.
        index_slack: Flips in the index that changed no value.
        destroyed: Opening for writing removed files that belong to the ledger.
        examples: A line for each flip that should not have gone that way.
    """

    of_index: int = 0
    of_arrays: int = 0
    detected: int = 0
    harmless: int = 0
    silent: int = 0
    crashed: int = 0
    verify_missed: int = 0
    index_slack: int = 0
    destroyed: int = 0
    examples: Problems = field(default_factory=list)

    @property
    def flips(self) -> int:
        """All flips."""
        return self.detected + self.harmless + self.silent + self.crashed

    def summary(self) -> dict[str, object]:
        """Return the counts and the first examples."""
        return {
            "of_index": self.of_index,
            "of_index_in_slack": self.index_slack,
            "of_arrays": self.of_arrays,
            "detected": self.detected,
            "harmless": self.harmless,
            "examples": self.examples[:_SHOWN],
        }


def forgotten(ledger: LedgerReader) -> object:
    """Return everything about forgetting a client that must never be wrong."""
    result = METHOD(UnlearnRequest(ledger, frozenset({client_name(0)})))
    numbers = (result.coverage, result.gamma_norms, result.standard_error, result.bound)
    return result.params.flat.tobytes(), result.delta.flat.tobytes(), repr(numbers)


def model_bytes(model: Model) -> object:
    """Return a model so that it can be compared bit by bit."""
    buffers = {name: array.tobytes() for name, array in model.buffers.items()}
    return model.params.flat.tobytes(), buffers


def sums_bytes(ledger: LedgerReader, number: int) -> object:
    """Return a client's running sums so that they can be compared bit by bit."""
    sums = ledger.running_sums(client_name(number))
    return sums.weighted.tobytes(), sums.squared.tobytes(), sums.num_unseen


def round_bytes(ledger: LedgerReader, index: int) -> object:
    """Return a round so that it can be compared bit by bit."""
    round_ = read_round(ledger, index)
    assert round_.step is not None
    updates = [
        (u.client, u.share, u.kept, u.delta.flat.tobytes() if u.delta else b"")
        for u in round_.updates
    ]
    return round_.step.flat.tobytes(), updates, repr(ledger.rounds()[index])


QUESTIONS: dict[str, Callable[[LedgerReader], object]] = {
    "forgetting": forgotten,
    "final model": lambda ledger: model_bytes(ledger.final),
    "initial model": lambda ledger: model_bytes(ledger.initial),
    "clients": lambda ledger: repr(ledger.clients()),
    "events": lambda ledger: repr(ledger.events()),
    "requests": lambda ledger: repr(ledger.requests()),
    "adjustments": lambda ledger: [
        (index, flat.tobytes()) for index, flat in ledger.adjustments().items()
    ],
    **{
        f"sums of {client_name(number)}": partial(sums_bytes, number=number)
        for number in range(NUM_CLIENTS)
    },
    **{
        f"round {index}": partial(round_bytes, index=index)
        for index in range(FLIP_ROUNDS)
    },
}
"""What is asked of a damaged ledger; between them they read every file of it."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A ledger whose bytes are flipped, with everything to compare and to restore.

    Attributes:
        path: Where it is.
        pristine: Where a copy is.
        files: Its files, relative to the path.
        answers: The right answer to each question.
        values: Every value of the index.
        pointers: Bytes of the index, each with a value that makes one entry of a page
            lead to where another one leads.
    """

    path: Path
    pristine: Path
    files: tuple[str, ...]
    answers: dict[str, object]
    values: object
    pointers: tuple[tuple[int, int], ...]

    @classmethod
    def create(
        cls, path: Path, seed: int, update_dtype: StorageDtype, step_dtype: StorageDtype
    ) -> Victim:
        """Build a ledger with an erased and a forgotten client, and rounds after it."""
        names = [client_name(1), client_name(2)]
        with DiskLedger.create(
            path,
            initial(FLIP_SIZE),
            update_dtype=update_dtype,
            step_dtype=step_dtype,
            sums_every=SUMS_EVERY,
        ) as ledger:
            for index in range(FLIP_ROUNDS):
                if index == FLIP_ROUNDS - 3:
                    forget(ledger, names[:1], METHOD, erase=True)
                    forget(ledger, names[1:], METHOD)
                absent = frozenset(names if index >= FLIP_ROUNDS - 3 else ())
                ledger.append(sent(seed, index, FLIP_SIZE, absent))
            add_request(path, client_name(3), "consent withdrawn")
        pristine = path.with_name(f"{path.name}-pristine")
        shutil.copytree(path, pristine)
        files = [p for p in sorted(path.rglob("*")) if p.is_file()]
        with LedgerReader(path) as reader:
            right = {name: question(reader) for name, question in QUESTIONS.items()}
        return cls(
            path,
            pristine,
            tuple(str(file.relative_to(path)) for file in files),
            right,
            index_values(path / "index.sqlite"),
            tuple(pointer_flips((path / "index.sqlite").read_bytes())),
        )

    def draw(self, rng: np.random.Generator) -> tuple[str, int, int]:
        """Return a file, a position in it, and what to put there.

        The index is one file among many, but every answer hangs on it, so it gets
        four flips in ten. One in four of these goes where chance seldom does and
        does most harm: a row is then read twice, and another one never.
        """
        if rng.random() < 0.4:
            file = "index.sqlite"
            if rng.random() < 0.25:
                at, value = self.pointers[rng.integers(len(self.pointers))]
                return file, at, value
        else:
            file = str(rng.choice(self.files))
        content = (self.pristine / file).read_bytes()
        at = int(rng.integers(len(content)))
        mask = int(rng.integers(1, 256) if rng.random() < 0.5 else 1 << rng.integers(8))
        return file, at, content[at] ^ mask

    def restore(self, file: str) -> bool:
        """Undo the damage of one file; return whether other files were gone."""
        shutil.copyfile(self.pristine / file, self.path / file)
        shutil.copyfile(self.pristine / "lock", self.path / "lock")
        found = {p for p in self.path.rglob("*") if p.is_file()}
        known = {self.path / name for name in self.files}
        for extra in found - known:
            extra.unlink()
        for lost in known - found:
            shutil.copyfile(self.pristine / lost.relative_to(self.path), lost)
        return bool(known - found)


def pointer_flips(content: bytes) -> Iterator[tuple[int, int]]:
    """Yield single bytes of an SQLite file that send one entry to another's place.

    Every page has an array of two-byte pointers to its cells, and the cells of an
    inner page begin with the four-byte number of a page below.
    """
    page_size = int.from_bytes(content[16:18], "big")
    for page in range(0, len(content), page_size):
        header = page + (100 if page == 0 else 0)
        kind = content[header]
        if kind not in (2, 5, 10, 13):
            continue
        inner = kind in (2, 5)
        first = header + (12 if inner else 8)
        num_cells = int.from_bytes(content[header + 3 : header + 5], "big")
        cells = [(first + 2 * i, 2) for i in range(num_cells)]
        below = [(header + 8, 4)] if inner else []
        for at, width in cells if inner else ():
            offset = int.from_bytes(content[at : at + width], "big")
            below.append((page + offset, 4))
        for group in (cells, below):
            for (one, width), (other, _) in permutations(group, 2):
                pairs = [(one + i, content[other + i]) for i in range(width)]
                changed = [pair for pair in pairs if content[pair[0]] != pair[1]]
                if len(changed) == 1:
                    yield changed[0]


def index_values(path: Path) -> object:
    """Return every value that can be selected from an index; an error if it cannot."""
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)
    connection.text_factory = bytes
    selects = [f"SELECT * FROM {table} NOT INDEXED" for table in COLUMNS]
    selects.append("SELECT round, client FROM updates INDEXED BY updates_by_round")
    try:
        return [repr(connection.execute(select).fetchall()) for select in selects]
    except (sqlite3.Error, ValueError) as error:  # a column's name may be damaged too
        return error
    finally:
        connection.close()


def flip_bytes(folder: Path, wanted: int, seed: int, display: Progress) -> Flips:
    """Flip bytes of ledgers one at a time, and look at what is answered."""
    tally = Flips()
    if not wanted:
        return tally
    rng = stream(seed, "flip")
    task = display.add_task("flipping bytes", total=wanted)
    dtypes: list[tuple[StorageDtype, StorageDtype]] = [
        ("float32", "float32"),
        ("float16", "bfloat16"),
        ("int8", "float32"),
    ]
    victims = [
        Victim.create((folder / f"flip-{update}").resolve(), seed, update, step)
        for update, step in dtypes
    ]
    for number in range(wanted):
        victim = victims[number % len(victims)]
        file, at, value = victim.draw(rng)
        with (victim.path / file).open("r+b") as opened:
            opened.seek(at)
            opened.write(bytes([value]))
        examine(victim, file, f"{victim.path.name}/{file}[{at}] = {value}", tally)
        display.advance(task)
    return tally


def examine(victim: Victim, file: str, place: str, tally: Flips) -> None:
    """Ask a damaged ledger everything, verify it, open it for writing, restore it."""
    verdict, detail = ask(victim)
    must_report = file.startswith("arrays")
    tally.of_arrays += must_report
    if file == "index.sqlite":
        tally.of_index += 1
        must_report = index_values(victim.path / file) != victim.values
        tally.index_slack += not must_report
    try:
        if not verify_reports(victim.path) and must_report:
            tally.verify_missed += 1
            tally.examples.append(f"{place}: verify missed it")
        with contextlib.suppress(FastFedULError):
            DiskLedger(victim.path).close()
    except Exception as error:
        if verdict != "silent":
            verdict, detail = "crashed", f"{type(error).__name__}: {error}"
    setattr(tally, verdict, getattr(tally, verdict) + 1)
    if verdict in ("silent", "crashed"):
        tally.examples.append(f"{place}: {verdict}: {detail}")
    if victim.restore(file):
        tally.destroyed += 1
        tally.examples.append(f"{place}: a writer removed files of the ledger")


def ask(victim: Victim) -> tuple[str, str]:
    """Return the worst that became of the answers, and what it was."""
    verdict, detail = "harmless", ""
    try:
        with LedgerReader(victim.path) as ledger:
            for name, question in QUESTIONS.items():
                try:
                    if question(ledger) != victim.answers[name]:
                        return "silent", f"{name} wrong"
                except FastFedULError as error:
                    verdict, detail = "detected", str(error)
    except FastFedULError as error:
        return "detected", str(error)
    except Exception as error:
        return "crashed", f"{type(error).__name__}: {error}"
    return verdict, detail


def verify_reports(path: Path) -> bool:
    """Return whether `verify` finds anything wrong."""
    try:
        with LedgerReader(path) as ledger:
            return bool(verify(ledger).problems)
    except FastFedULError:
        return True


# The order of system calls.

TRACED = "rename,renameat,renameat2,fsync,fdatasync,unlink,unlinkat,write,pwrite64"


@dataclass(slots=True)
class Call:
    """One system call: its name, the files it names, and when it began and ended."""

    name: str
    text: str
    start: int
    end: int = sys.maxsize

    @property
    def paths(self) -> list[str]:
        """The files behind descriptors and between quotes, in order."""
        return [a or b for a, b in re.findall(r'\d<(/[^>]*)>|"(/[^"]*)"', self.text)]

    def touches(self, path: str) -> bool:
        """Return whether the first file it names is this one."""
        return self.paths[:1] == [path]


def check_order(folder: Path, seed: int) -> str:
    """Return `ok`, or what was out of order in appends and in an erasure."""
    if not shutil.which("strace"):
        return "no strace"
    path = folder / "traced"
    DiskLedger.create(path, initial(KILL_SIZE), sums_every=SUMS_EVERY).close()
    problems: Problems = []
    for kind, rounds in (("append", 2 * SUMS_EVERY), ("erase", 1)):
        trace = folder / f"{kind}.trace"
        command = worker_command(kind, path, seed, rounds)
        options = ["-f", "-y", "-qq", "-o", str(trace), "-e", f"trace={TRACED}"]
        finished = subprocess.run(
            ["strace", *options, *command], capture_output=True, text=True
        )
        if finished.returncode:
            return f"strace failed: {finished.stderr.strip()[-200:]}"
        operations = list(operations_of(read_trace(trace)))
        if len(operations) != rounds:
            problems.append(f"{len(operations)} operations traced, not {rounds}")
        for number, calls in enumerate(operations):
            found = out_of_order(calls, path)
            problems += [f"{kind} {number}: {problem}" for problem in found]
    shutil.rmtree(path)
    return "; ".join(problems) or "ok"


def read_trace(trace: Path) -> list[Call]:
    """Return the calls of a trace, those of several threads put together again."""
    calls: list[Call] = []
    open_calls: dict[str, Call] = {}
    for position, line in enumerate(trace.read_text(errors="replace").splitlines()):
        thread, _, rest = line.partition(" ")
        rest = rest.strip()
        if rest.startswith("<..."):
            if thread in open_calls:
                open_calls.pop(thread).end = position
            continue
        name, bracket, text = rest.partition("(")
        if not bracket:
            continue
        calls.append(Call(name, text, position, position))
        if text.endswith("<unfinished ...>"):
            calls[-1].end = sys.maxsize
            open_calls[thread] = calls[-1]
    return calls


def operations_of(calls: Iterable[Call]) -> Iterator[list[Call]]:
    """Yield the calls of each operation, from its start to its acknowledgement."""
    current: list[Call] | None = None
    for call in calls:
        if call.name == "write" and '"start ' in call.text:
            current = []
        elif call.name == "write" and '"done ' in call.text and current is not None:
            yield current
            current = None
        elif current is not None:
            current.append(call)


def out_of_order(calls: Sequence[Call], path: Path) -> Iterator[str]:
    """Yield what one operation did too early or not at all."""
    arrays, index = str(path / "arrays"), str(path / "index.sqlite")
    journal = str(path / JOURNAL)
    renames = [c for c in calls if c.name.startswith("rename")]
    for rename in renames:
        yield from unsynced(calls, rename)
    if not renames:
        yield "no array file was put in its place"
        return
    in_place = max(rename.end for rename in renames)
    folder = first(syncs(calls, arrays), after=in_place)
    journal_syncs = syncs(calls, journal)
    index_syncs = syncs(calls, index)
    removal = first([c for c in calls if c.name == "unlink" and c.touches(journal)])
    if not (folder and journal_syncs and index_syncs and removal):
        yield "the folder, the journal or the index is not synced, or nothing committed"
        return
    if min(c.start for c in (*journal_syncs, *index_syncs)) < folder.end:
        yield "the index is synced before the folder of the arrays"
    writes = [c for c in calls if c.name == "pwrite64" and c.touches(index)]
    if not writes or min(c.start for c in writes) < max(c.end for c in journal_syncs):
        yield "the index is written before its journal is synced"
    if max(c.end for c in writes) > index_syncs[-1].start:
        yield "the index is written after its last sync"
    if index_syncs[-1].end > removal.start:
        yield "the journal is removed before the index is synced"
    committed = first(syncs(calls, str(path)), after=removal.end)
    if not committed:
        yield "the removal of the journal is not synced"
        return
    for call in calls:
        if call.name == "unlink" and not call.touches(journal):
            if call.start < committed.end:
                yield "an array file is removed before the commit"
            if not first(syncs(calls, arrays), after=call.end):
                yield "the removal of an array file is not synced"


def unsynced(calls: Sequence[Call], rename: Call) -> Iterator[str]:
    """Yield whether a file is given its name before its content is on the disk."""
    source = rename.paths[0]
    done = [c for c in syncs(calls, source) if c.end < rename.start]
    if not done:
        yield f"{Path(source).name} is renamed before it is synced"
        return
    writes = [c for c in calls if c.name == "write" and c.touches(source)]
    if not writes or max(c.end for c in writes) > done[-1].start:
        yield f"{Path(source).name} is written after its sync"


def syncs(calls: Iterable[Call], path: str) -> list[Call]:
    """Return the calls that sync a file or a folder."""
    return [c for c in calls if c.name in ("fsync", "fdatasync") and c.touches(path)]


def first(calls: Iterable[Call], after: int = -1) -> Call | None:
    """Return the first call that begins after a time, if there is one."""
    return next((call for call in calls if call.start > after), None)


if __name__ == "__main__":
    main()
