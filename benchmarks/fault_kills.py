"""Writers killed at random instants, and what their ledgers look like afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import numpy as np
from rich.progress import Progress

from benchmarks.fault_writer import (
    JOURNAL,
    KILL_SIZE,
    ROUNDS_AT_ONCE,
    TARGET,
    Problems,
    initial,
    sent,
    work_into,
)
from fastfedul import ClientUpdate, DiskLedger, LedgerReader, verify
from fastfedul.ledger.protocol import vector
from fastfedul.ledger.store.array_files import SET_ASIDE
from fastfedul.params import Flat, weighted_sum
from fastfedul.records import VectorRef
from fastfedul.rng import stream

ROUNDS_PER_LEDGER = 40
ERASE_ROUNDS = 8


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


_FORKING = get_context("forkserver")
"""Workers are forks of a process that has imported everything: an attempt does not
take the time to start Python."""

_FORKING.set_forkserver_preload(["__main__", "benchmarks.fault_writer"])


def run_worker(
    kind: str,
    path: Path,
    seed: int,
    rounds: int | None = None,
    *,
    after: str = "",
    delay: float | None = None,
) -> Said:
    """Start a worker and kill it some time after a certain word, or let it finish."""
    receiver, sender = _FORKING.Pipe(duplex=False)
    process = _FORKING.Process(
        target=work_into, args=(sender, kind, path, seed, rounds)
    )
    process.start()
    sender.close()
    lines = []
    with os.fdopen(os.dup(receiver.fileno())) as output:
        receiver.close()
        if delay is not None:
            for line in output:
                lines.append(line.strip())
                if line.startswith(after):
                    break
            time.sleep(delay)
            process.kill()
        lines += output.read().splitlines()
    process.join()
    status = process.exitcode
    process.close()
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
            DiskLedger.create(path, initial(KILL_SIZE)).close()
        if not reach:
            said = run_worker("append", path, seed, ROUNDS_AT_ONCE)
            reach = said.seconds("ready") + 3 * said.seconds("done")
        else:
            delay = float(rng.uniform(0, reach))
            said = run_worker("append", path, seed, after="opening", delay=delay)
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
    except Exception as error:
        problems.append(f"{type(error).__name__}: {error}")
    return found, problems


def condition(ledger: DiskLedger) -> Iterator[str]:
    """Yield what is wrong with the files after the ledger was opened for writing."""
    names = {entry.name for entry in os.scandir(ledger.path)}
    strange = names - {
        "arrays",
        "requests",
        "certificates",
        "index.sqlite",
        "lock",
        JOURNAL,
    }
    strange -= {SET_ASIDE}
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


@dataclass(frozen=True, slots=True)
class State:
    """Where a ledger stands: everything that an erasure changes."""

    client: str
    num_updates: int
    num_events: int
    chain: bytes
    files: frozenset[tuple[str, int]]
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
                frozenset(
                    (entry.name, entry.stat().st_size)
                    for entry in os.scandir(path / "arrays")
                ),
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
    with DiskLedger.create(template, initial(KILL_SIZE)) as ledger:
        for index in range(ERASE_ROUNDS):
            ledger.append(sent(seed, index))
    before = State.of(template)
    shutil.copytree(template, path)
    said = run_worker("erase", path, seed, 1)
    after, reach = State.of(path), 1.3 * said.seconds("done")
    tally.problems += remains(template, path)
    while tally.kills < wanted and tally.outside <= 3 * wanted:
        shutil.rmtree(path)
        shutil.copytree(template, path)
        delay = float(rng.uniform(0, reach))
        said = run_worker("erase", path, seed, 1, after="start", delay=delay)
        tally.kills += said.interrupted
        tally.outside += not said.interrupted
        erased, problems = inspect_erasure(path, seed, before, after, said)
        tally.unacknowledged += erased and not said.num_done
        tally.empty_journals += (path / JOURNAL).exists()
        tally.problems += [f"erasure: {problem}" for problem in problems]
        display.update(task, completed=tally.kills)
    return tally


def remains(template: Path, after: Path) -> Iterator[str]:
    """Yield what an undisturbed erasure left of the client in the folder.

    Args:
        template: The ledger before it.
        after: The ledger after it.
    """
    with LedgerReader(template) as ledger:
        entries = ledger.updates_of(TARGET)
        refs = [VectorRef(entry.round, TARGET) for entry in entries if entry.kept]
        refs += [VectorRef(entry.round) for entry in entries]
        own = [vector(ledger, ref).tobytes()[:64] for ref in refs]
    with LedgerReader(after) as ledger:
        if ledger.clients()[TARGET].state != "erased" or ledger.updates_of(TARGET):
            yield "an undisturbed erasure did not take the client out of the index"
    if not own:
        yield "the client had sent nothing that could be left"
    for file in sorted(p for p in after.rglob("*") if p.is_file()):
        content = file.read_bytes()
        if any(some in content for some in own):
            yield f"an undisturbed erasure left something of the client in {file.name}"


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
