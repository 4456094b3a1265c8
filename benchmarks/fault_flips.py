"""Flipped bytes in every file of a ledger, and whether an answer was wrong."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from pathlib import Path

import numpy as np
from rich.progress import Progress

from benchmarks.fault_writer import (
    METHOD,
    NUM_CLIENTS,
    Problems,
    initial,
    sent,
)
from benchmarks.measuring import client_name
from fastfedul import (
    DiskLedger,
    FastFedULError,
    LedgerReader,
    Model,
    UnlearnRequest,
    add_request,
    forget,
    read_round,
    verify,
)
from fastfedul.ledger.protocol import vector
from fastfedul.ledger.store.schema import ROWS
from fastfedul.records import History, StorageDtype, VectorRef
from fastfedul.rng import stream

FLIP_SIZE = 70_000  # A little more than one block of checksummed values.
FLIP_ROUNDS = 10
TABLES = tuple(row.table for row in ROWS)


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

    def counts(self) -> dict[str, int]:
        """Return the counts."""
        return {
            "faults": self.flips,
            "of_index": self.of_index,
            "of_index_in_slack": self.index_slack,
            "of_arrays": self.of_arrays,
            "detected": self.detected,
            "harmless": self.harmless,
            "silent": self.silent,
            "crashed": self.crashed,
            "verify_missed": self.verify_missed,
            "files_destroyed": self.destroyed,
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
    """Return what forgetting a client takes, to be compared bit by bit."""
    return ledger.own_difference(client_name(number)).tobytes()


def round_bytes(ledger: LedgerReader, index: int) -> object:
    """Return a round so that it can be compared bit by bit."""
    round_ = read_round(ledger, index)
    assert round_.step is not None
    updates = [
        (u.client, u.share, u.kept, u.delta.flat.tobytes() if u.delta else b"")
        for u in round_.updates
    ]
    return round_.step.flat.tobytes(), updates, repr(ledger.rounds()[index])


def pairs_bytes(ledger: LedgerReader) -> object:
    """Return every kept difference of two clients, to be compared bit by bit."""
    return [
        (repr(pair), vector(ledger, ref).tobytes())
        for pair in ledger.pairs()
        for ref in [VectorRef(pair.round, pair.client, pair.other)]
    ]


Questions = dict[str, Callable[[LedgerReader], object]]


def questions(history: History, num_rounds: int) -> Questions:
    """Return questions by name; together they read every vector of a ledger."""
    names = [client_name(number) for number in range(NUM_CLIENTS)]
    common: Questions = {
        "forgetting": forgotten,
        "final model": lambda ledger: model_bytes(ledger.final),
        "initial model": lambda ledger: model_bytes(ledger.initial),
        "clients": lambda ledger: repr(ledger.clients()),
        "events": lambda ledger: repr(ledger.events()),
        "requests": lambda ledger: repr(ledger.requests()),
        "rounds": lambda ledger: repr(ledger.rounds()),
        "participants": lambda ledger: repr(
            [ledger.updates_in(index) for index in range(num_rounds)]
        ),
        "participation": lambda ledger: repr([ledger.updates_of(n) for n in names]),
        "names": lambda ledger: repr([ledger.client(name) for name in names]),
        **{
            f"sums of {name}": partial(sums_bytes, number=number)
            for number, name in enumerate(names)
        },
    }
    if history == "sums":
        return {**common, "pairs": pairs_bytes}
    return {
        **common,
        "adjustments": lambda ledger: [
            (index, flat.tobytes()) for index, flat in ledger.adjustments().items()
        ],
        **{
            f"round {index}": partial(round_bytes, index=index)
            for index in range(num_rounds)
        },
    }


@dataclass(frozen=True, slots=True)
class Victim:
    """A ledger whose bytes are flipped, with everything to compare and to restore.

    Attributes:
        path: Where it is.
        history: What it keeps.
        pristine: Where a copy is.
        files: Its files, relative to the path.
        answers: The right answer to each question.
        values: Every value of the index.
        dead: Bytes of array files that do not count any more, by file.
        pointers: Bytes of the index, each with a value that makes one entry of a page
            lead to where another one leads.
    """

    path: Path
    history: History
    pristine: Path
    files: tuple[str, ...]
    answers: dict[str, object]
    values: object
    dead: dict[str, tuple[range, ...]]
    pointers: tuple[tuple[int, int], ...]

    @classmethod
    def create(
        cls,
        path: Path,
        seed: int,
        update_dtype: StorageDtype,
        step_dtype: StorageDtype,
        history: History,
    ) -> Victim:
        """Build a ledger with an erased and a forgotten client, and rounds after it.

        From sums nobody is forgotten: shares vary here, so that they would not tell
        enough of a second client.
        """
        names = [client_name(1), client_name(2)]
        with DiskLedger.create(
            path,
            initial(FLIP_SIZE),
            update_dtype=update_dtype,
            step_dtype=step_dtype,
            history=history,
        ) as ledger:
            for index in range(FLIP_ROUNDS):
                if index == FLIP_ROUNDS - 3 and history == "rounds":
                    forget(ledger, names[:1], METHOD, erase=True)
                    forget(ledger, names[1:], METHOD, erase=False)
                absent = frozenset(names if index >= FLIP_ROUNDS - 3 else ())
                ledger.append(sent(seed, index, FLIP_SIZE, absent))
            add_request(path, client_name(3), "consent withdrawn")
        pristine = path.with_name(f"{path.name}-pristine")
        shutil.copytree(path, pristine)
        files = [p for p in sorted(path.rglob("*")) if p.is_file()]
        with LedgerReader(path) as reader:
            asked = questions(history, FLIP_ROUNDS)
            right = {name: question(reader) for name, question in asked.items()}
        return cls(
            path,
            history,
            pristine,
            tuple(str(file.relative_to(path)) for file in files),
            right,
            index_values(path / "index.sqlite"),
            dead_bytes(path),
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


def dead_bytes(path: Path) -> dict[str, tuple[range, ...]]:
    """Return the vectors in array files that no row refers to, by file.

    An array file is one or more safetensors images, each at a multiple of 4,096 bytes.
    """
    connection = sqlite3.connect(path / "index.sqlite")
    rows = connection.execute(
        "SELECT file, step FROM rounds UNION ALL "
        "SELECT file, array FROM updates UNION ALL "
        "SELECT file, difference FROM clients UNION ALL "
        "SELECT file, array FROM pairs UNION ALL SELECT file, array FROM adjustments"
    ).fetchall()
    models = connection.execute("SELECT file FROM head UNION SELECT file FROM ledger")
    whole = {file for (file,) in models}
    connection.close()
    live = {
        (file, int.from_bytes(column[:8], "little")) for file, column in rows if column
    }
    found: dict[str, tuple[range, ...]] = {}
    for name in sorted((path / "arrays").iterdir()):
        number, content, start = int(name.stem), name.read_bytes(), 0
        dead = []
        while start < len(content) and number not in whole:
            data = start + 8 + int.from_bytes(content[start : start + 8], "little")
            header = json.loads(content[start + 8 : data])
            end = data
            for tensor, entry in header.items():
                begin, end = (data + at for at in entry["data_offsets"])
                scales = header.get(f"{tensor}.scales", entry)
                vector_at = data + scales["data_offsets"][0]
                if tensor.endswith(".scales"):
                    vector_at = begin
                if (number, vector_at) not in live:
                    dead.append(range(begin, end))
            start = -(-end // 4096) * 4096
        found[f"arrays/{name.name}"] = tuple(dead)
    return found


def index_values(path: Path) -> object:
    """Return every value that can be selected from an index; an error if it cannot."""
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)
    connection.text_factory = bytes
    selects = [f"SELECT * FROM {table} NOT INDEXED" for table in TABLES]
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
    kinds: list[tuple[StorageDtype, StorageDtype, History]] = [
        ("float32", "float32", "rounds"),
        ("float16", "bfloat16", "rounds"),
        ("int8", "float32", "rounds"),
        ("float16", "float32", "sums"),
    ]
    victims = [
        Victim.create(
            (folder / f"flip-{update}-{history}").resolve(), seed, update, step, history
        )
        for update, step, history in kinds
    ]
    for number in range(wanted):
        victim = victims[number % len(victims)]
        file, at, value = victim.draw(rng)
        with (victim.path / file).open("r+b") as opened:
            opened.seek(at)
            opened.write(bytes([value]))
        counts = not any(at in gone for gone in victim.dead.get(file, ()))
        place = f"{victim.path.name}/{file}[{at}] = {value}"
        examine(victim, file, place, tally, counts=counts)
        display.advance(task)
    return tally


def examine(
    victim: Victim, file: str, place: str, tally: Flips, *, counts: bool
) -> None:
    """Ask a damaged ledger everything, verify it, open it for writing, restore it.

    Args:
        victim: The ledger.
        file: The damaged file.
        place: What was changed, for an example.
        tally: What became of all flips.
        counts: Whether the byte is one that counts.
    """
    verdict, detail = ask(victim)
    of_arrays = file.startswith("arrays")
    must_report = of_arrays and counts
    tally.of_arrays += of_arrays
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
            for name, question in questions(victim.history, FLIP_ROUNDS).items():
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
