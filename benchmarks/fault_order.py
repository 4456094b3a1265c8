"""The order of system calls in appends and erasures: a kill shows no missing sync."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fault_writer import (
    JOURNAL,
    KILL_SIZE,
    ROUNDS_AT_ONCE,
    Problems,
    initial,
    worker_command,
)
from fastfedul import DiskLedger

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
    DiskLedger.create(path, initial(KILL_SIZE)).close()
    problems: Problems = []
    for kind, rounds in (("append", ROUNDS_AT_ONCE), ("erase", 1)):
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
