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

TRACED = "openat,fsync,fdatasync,unlink,unlinkat,write,pwrite64,ftruncate,truncate"
TRACED += ",rename,renameat,renameat2"
PAGE = 4096  # What is added to an array file begins at a multiple of this.


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
        ends: dict[str, int] = {}
        for number, calls in enumerate(operations):
            for_good = kind == "erase"
            found = [*out_of_order(calls, path, for_good=for_good)]
            found += overwritten(calls, path, ends)
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


def out_of_order(calls: Sequence[Call], path: Path, *, for_good: bool) -> Iterator[str]:
    """Yield what one operation did too early or not at all.

    Args:
        calls: The operation.
        path: The ledger.
        for_good: Whether files that it removes must stay away after power loss.
    """
    arrays, index = str(path / "arrays"), str(path / "index.sqlite")
    journal = str(path / JOURNAL)
    created = [c for c in calls if c.name == "openat" and "O_CREAT" in c.text]
    created = [c for c in created if c.paths[-1].startswith(f"{arrays}/")]
    if not created:
        yield "no array file was created, not even the file of the model"
        return
    folder = first(syncs(calls, arrays), after=max(c.end for c in created))
    journal_syncs = syncs(calls, journal)
    index_syncs = syncs(calls, index)
    removal = first([c for c in calls if c.name == "unlink" and c.touches(journal)])
    if not (folder and journal_syncs and index_syncs and removal):
        yield "the folder, the journal or the index is not synced, or nothing committed"
        return
    before = min(c.start for c in (*journal_syncs, *index_syncs))
    if before < folder.end:
        yield "the index is synced before the folder of the arrays"
    for file, own in written(calls, arrays).items():
        done = [c for c in syncs(calls, file) if c.start > max(w.end for w in own)]
        if not done or done[0].end > before:
            yield f"{Path(file).name} is not synced before the index"
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
        if call.name == "unlink" and call.paths[0].startswith(f"{arrays}/"):
            if call.start < committed.end:
                yield "an array file is removed before the commit"
            if for_good and not first(syncs(calls, arrays), after=call.end):
                yield "the removal of an array file is not synced"


def overwritten(
    calls: Sequence[Call], path: Path, ends: dict[str, int]
) -> Iterator[str]:
    """Yield whether one operation writes to a page that was committed before.

    Args:
        calls: The operation.
        path: The ledger.
        ends: Where each array file ended after the operation before; brought up to
            date.
    """
    arrays = str(path / "arrays")
    for file, own in written(calls, arrays).items():
        spans = [span_of(c) for c in own if c.name == "pwrite64"]
        if spans:
            start = min(start for start, _ in spans)
            if start % PAGE or start < ends.get(file, 0):
                yield f"{Path(file).name} is written to where it was committed"
            ends[file] = max(end for _, end in spans)
    for call in calls:
        changes = call.name.startswith("rename") or "truncate" in call.name
        if changes and any(p.startswith(arrays) for p in call.paths):
            yield f"an array file is changed by {call.name}"


def written(calls: Iterable[Call], arrays: str) -> dict[str, list[Call]]:
    """Return the calls that write to each array file."""
    found: dict[str, list[Call]] = {}
    for call in calls:
        writes = call.name in ("write", "pwrite64")
        if writes and "".join(call.paths[:1]).startswith(f"{arrays}/"):
            found.setdefault(call.paths[0], []).append(call)
    return found


def span_of(call: Call) -> tuple[int, int]:
    """Return the first byte that a `pwrite64` writes, and the byte behind the last."""
    found = re.search(r", (\d+), (\d+)(?:\)| <unfinished)", call.text)
    assert found, call.text
    count, offset = map(int, found.groups())
    return offset, offset + count


def syncs(calls: Iterable[Call], path: str) -> list[Call]:
    """Return the calls that sync a file or a folder."""
    return [c for c in calls if c.name in ("fsync", "fdatasync") and c.touches(path)]


def first(calls: Iterable[Call], after: int = -1) -> Call | None:
    """Return the first call that begins after a time, if there is one."""
    return next((call for call in calls if call.start > after), None)
