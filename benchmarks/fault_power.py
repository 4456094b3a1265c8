"""Power loss at every system call: calls that were not synced are dropped or torn.

A command runs once, undisturbed, while every call that changes a file is recorded with
its bytes. A state after power loss is then put together from the record. Calls before
the loss that were synced count. Of the other calls a random part counts: writes whole,
not at all, or only their first sectors; names in their order up to some call, or any
of them. The command is repeated on that state, and everything must be right.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.progress import Progress

from benchmarks.fault_scenarios import SCENARIOS, Wanted, copy_run, wrong
from benchmarks.fault_server import Server
from benchmarks.fault_sweep import Sweep, attempt_of, prepare
from fastfedul import LedgerReader, verify
from fastfedul.rng import stream

_SECTOR = 512


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded call.

    Attributes:
        kind: `create`, `write`, `truncate`, `sync`, `rename`, `unlink`, `mkdir` or
            `rmdir`.
        path: The file or folder.
        other: New name of a renamed file.
        at: Offset of a write, or size after a truncation.
        data: Bytes of a write.
        file: Number of the file, the same under all of its names; -1 for a folder.
    """

    kind: str
    path: str
    other: str
    at: int
    data: bytes
    file: int


def read_record(record: Path, run: Path) -> tuple[list[Call], dict[int, Path]]:
    """Return recorded calls, and the files that were there before by number.

    Args:
        record: What the shim wrote.
        run: The run as it was before the command.
    """
    content, end = record.read_bytes(), 0
    before = [file for file in sorted(run.rglob("*")) if file.is_file()]
    known = dict(enumerate(before))
    numbers = {str(file.relative_to(run)): n for n, file in known.items()}
    calls: list[Call] = []
    prefix = ""
    while end < len(content):
        stop = content.index(b"\n", end)
        kind, path, other, at, count = content[end:stop].decode().split("\t")
        end = stop + 1 + int(count)
        prefix = prefix or path[: path.index("/try") + len("/try")]
        path = path[len(prefix) :].lstrip("/")
        other = other[len(prefix) :].lstrip("/")
        if kind == "create":
            numbers[path] = len(known) + len(calls)
        number = numbers.get(path, -1)
        if kind == "rename":
            numbers[other] = numbers.pop(path)
        elif kind == "unlink":
            numbers.pop(path, None)
        data = content[stop + 1 : end]
        calls.append(Call(kind, path, other, int(at), data, number))
    return calls, known


def lose_power(
    calls: Sequence[Call], files: dict[int, Path], run: Path, rng: np.random.Generator
) -> dict[str, bytes]:
    """Return files by name, as they may be after power loss behind these calls.

    Args:
        calls: Calls before the loss.
        files: Files that were there before the first call, by number.
        run: Folder of these files.
        rng: Draws what survives.
    """
    synced_files: dict[int, int] = {}
    synced_folders: dict[str, int] = {}
    for position, call in enumerate(calls):
        if call.kind == "sync" and call.file >= 0:
            synced_files[call.file] = position
        elif call.kind == "sync":
            synced_folders[call.path] = position
    names = {str(path.relative_to(run)): number for number, path in files.items()}
    contents = {number: bytearray(path.read_bytes()) for number, path in files.items()}
    last_name = int(rng.integers(0, len(calls) + 1))
    in_order = bool(rng.random() < 0.5)
    for position, call in enumerate(calls):
        if call.kind in ("write", "truncate"):
            safe = synced_files.get(call.file, -1) > position
            _change(contents.setdefault(call.file, bytearray()), call, safe, rng)
        elif call.kind != "sync":
            place = call.other or call.path
            folder = str(Path(place).parent)
            safe = synced_folders.get("" if folder == "." else folder, -1) > position
            lucky = position < last_name if in_order else bool(rng.random() < 0.5)
            if safe or lucky:
                _rename(names, call)
    return {name: bytes(contents.get(number, b"")) for name, number in names.items()}


def _change(
    content: bytearray, call: Call, safe: bool, rng: np.random.Generator
) -> None:
    """Apply a write or truncation that was synced, or as much of it as survives."""
    if call.kind == "truncate":
        if safe or rng.random() < 0.5:
            del content[call.at :]
            content.extend(bytes(call.at - len(content)))
        return
    data = call.data
    if not safe:
        fate = rng.random()
        if fate < 0.4:
            return
        if fate < 0.7:
            sectors = int(rng.integers(0, len(data) // _SECTOR + 1))
            data = data[: sectors * _SECTOR]
    if not data:
        return
    content.extend(bytes(max(0, call.at + len(data) - len(content))))
    content[call.at : call.at + len(data)] = data


def _rename(names: dict[str, int], call: Call) -> None:
    if call.kind == "create":
        names[call.path] = call.file
    elif call.kind == "rename":
        names.pop(call.path, None)
        names[call.other] = call.file
    elif call.kind == "unlink":
        names.pop(call.path, None)


def power_losses(folder: Path, wanted: int, seed: int, display: Progress) -> Sweep:
    """Put states after power loss together, and repeat the command on each."""
    tally = Sweep()
    rng = stream(seed, "power")
    work = folder / "power"
    with Server() as server:
        task = display.add_task("power losses", total=wanted)
        per_scenario = -(-wanted // len(SCENARIOS))
        for scenario in SCENARIOS:
            stage = prepare(work, scenario, server)
            run, record = work / "try", work / "record"
            copy_run(stage.template, run)
            server.must(attempt_of(scenario, run, record=str(record)))
            calls, files = read_record(record, stage.template)
            with LedgerReader(stage.template) as ledger:
                before = ledger.final.params.flat.tobytes()
            for _ in range(min(per_scenario, wanted - tally.faults)):
                count = int(rng.integers(0, len(calls) + 1))
                left = lose_power(calls[:count], files, stage.template, rng)
                _lay_out(run, left)
                done = count == len(calls)
                problems = [*_half(run, stage.wanted, before, done=done)]
                again = server.run(attempt_of(scenario, run))
                if again.code:
                    problems.append(
                        f"repeated, it fails with {again.code}: {again.line}"
                    )
                problems += [f"repeated, {text}" for text in wrong(run, stage.wanted)]
                tally.faults += 1
                tally.problems += [
                    f"{scenario.name}, power lost after {count} of {len(calls)} "
                    f"calls: {text}"
                    for text in problems
                ]
                display.advance(task)
    shutil.rmtree(work)
    return tally


def _lay_out(run: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(run)
    for folder in ("ledger/arrays", "certificates"):
        (run / folder).mkdir(parents=True)
    for name, content in files.items():
        place = run / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)


def _half(run: Path, wanted: Wanted, before: bytes, *, done: bool) -> Iterator[str]:
    """Yield what is wrong with a ledger before the command is repeated."""
    try:
        with LedgerReader(run) as ledger:
            yield from verify(ledger).problems
            model = ledger.final.params.flat.tobytes()
    except Exception as error:
        yield f"it cannot be read: {type(error).__name__}: {error}"
        return
    if model not in (before, wanted.model):
        yield "the model is neither the one before nor the one after"
    elif done and model != wanted.model:
        yield "acknowledged, and lost"
