"""How a run or ledger is doing: one look at everything that an operator watches."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fastfedul.errors import InvalidInputError
from fastfedul.files import read_regular_text
from fastfedul.forgetting.certificates import (
    certificate_path,
    certificates_folder,
    read_certificate,
)
from fastfedul.forgetting.statements import is_certified
from fastfedul.forgetting.verification import VerificationNote, last_verification
from fastfedul.ledger.failures import FailureEntry, read_failures
from fastfedul.ledger.protocol import now
from fastfedul.ledger.reader import LedgerReader
from fastfedul.ledger.store.folder import INDEX, LOCK
from fastfedul.records import ClientState, ForgetRequest, ModelEntry
from fastfedul.runs import metrics_file
from fastfedul.runs.evaluation_source import TWO_LINES, federation_file, run_at
from fastfedul.runs.metrics_file import RoundMetrics
from fastfedul.runs.training import load_config

LONG_WAIT = timedelta(hours=24)
"""Age from which a waiting request is a problem, unless a caller says otherwise."""

STALE = timedelta(days=30)
"""Age from which a verification should be repeated."""

_FEW_ROUNDS = 10
"""Rounds for which the disk must have room, or an operator should hear of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The state of a run or ledger.

    Attributes:
        path: The ledger.
        run: The run around it; None for a ledger alone.
        federation: Name of the federation, if it has one.
        rounds: Recorded rounds.
        planned: Rounds that the run is to have; None for a ledger alone.
        clients: Number of clients in each state.
        last_clients: Participants of the last round.
        metrics: Metrics of the last measured round; None if nobody measured.
        forgot_since: Whether the server forgot clients after it measured.
        changed: Time of the last change of the ledger, in UTC, ISO 8601.
        writer: Process that writes to the ledger now; None if there is none.
        failures: Newest clients that a round left out or capped, the oldest first.
        waiting: Requests that wait.
        strangers: Requests of the last 30 days that were refused because their file
            does not fit the ledger.
        num_bytes: Bytes of the array files.
        budget: Bytes that they may take; None for no limit.
        free_bytes: Free bytes of the disk; None if the arrays lie on an object store.
        verified: What the last verification found; None if nobody noted one.
        certificates: Certificates that the log calls for.
        missing: Certificates among them that are not there.
        unsigned: Certificates among them without a signature.
        problems: What an operator should see to now.
        advice: What to do next, each with a command.
    """

    path: Path
    run: Path | None
    federation: str | None
    rounds: int
    planned: int | None
    clients: dict[ClientState, int]
    last_clients: int
    metrics: RoundMetrics | None
    forgot_since: bool
    changed: str
    writer: int | None
    failures: tuple[FailureEntry, ...]
    waiting: tuple[ForgetRequest, ...]
    strangers: tuple[ForgetRequest, ...]
    num_bytes: int
    budget: int | None
    free_bytes: int | None
    verified: VerificationNote | None
    certificates: int
    missing: int
    unsigned: int
    problems: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()

    @property
    def round_bytes(self) -> int:
        """Bytes that a round takes on average; 0 before the first round."""
        return self.num_bytes // self.rounds if self.rounds else 0

    @property
    def bytes_at_end(self) -> int | None:
        """Bytes that the ledger of a run will take; None for a ledger alone."""
        if self.planned is None or not self.rounds:
            return None
        end = self.num_bytes + self.round_bytes * max(0, self.planned - self.rounds)
        return end if self.budget is None else min(end, self.budget)

    @property
    def last_failures(self) -> tuple[FailureEntry, ...]:
        """Failures of the last recorded round."""
        return tuple(one for one in self.failures if one.round == self.rounds)


def status_of(path: Path, *, long_wait: timedelta = LONG_WAIT) -> Status:
    """Return the state of a run or ledger; nothing changes, and no lock is taken.

    Args:
        path: A run, or a ledger.
        long_wait: Age from which a waiting request is a problem.
    """
    with LedgerReader(path) as ledger:
        return status_in(ledger, path, long_wait=long_wait)


def status_in(
    ledger: LedgerReader, path: Path, *, long_wait: timedelta = LONG_WAIT
) -> Status:
    """Return the state of a run or ledger that is open."""
    run = run_at(path)
    with ledger.snapshot():
        states: dict[ClientState, int] = {"active": 0, "forgotten": 0, "erased": 0}
        for entry in ledger.clients().values():
            states[entry.state] += 1
        rounds = ledger.num_rounds
        lineage = ledger.lineage()
        last = ledger.updates_in(rounds - 1)
        waiting = tuple(ledger.waiting())
        strangers = tuple(
            one
            for one in ledger.requests()
            if not one.client and age_of(one.asked) <= STALE
        )
        settings = ledger.settings
        num_bytes = ledger.num_array_bytes()
        wanted = [entry for entry in ledger.log() if is_certified(entry)]
    folder = certificates_folder(ledger.path)
    signed = [_signed(certificate_path(folder, entry)) for entry in wanted]
    local = Path(ledger.files.address)
    free = shutil.disk_usage(local).free if local.is_dir() else None
    measured = metrics_file.read(metrics_file.metrics_of(path))
    metrics = measured[max(measured)] if measured else None
    found = Status(
        path=ledger.path,
        run=run,
        federation=settings.federation,
        rounds=rounds,
        planned=load_config(run).rounds if run else None,
        clients=states,
        last_clients=len(last),
        metrics=metrics,
        forgot_since=metrics is not None and _forgot_since(lineage, metrics.round),
        changed=_changed(ledger.path / INDEX),
        writer=writer_of(ledger.path),
        failures=read_failures(ledger.path),
        waiting=waiting,
        strangers=strangers,
        num_bytes=num_bytes,
        budget=settings.budget,
        free_bytes=free,
        verified=last_verification(ledger.path),
        certificates=len(wanted),
        missing=signed.count(None),
        unsigned=signed.count(False),
    )
    return _with_advice(found, path, long_wait)


def _forgot_since(lineage: Sequence[ModelEntry], measured: int) -> bool:
    """Return whether a forgetting changed the model after a round was measured."""
    later = False
    for one in reversed(lineage):
        if (one.origin, one.at) == ("round", measured):
            break
        later = later or one.origin == "forgetting"
    return later


def age_of(time: str) -> timedelta:
    """Return how long ago a time of the ledger was."""
    return datetime.fromisoformat(now()) - datetime.fromisoformat(time)


def writer_of(ledger: Path) -> int | None:
    """Return the process that has a ledger open for writing; None if there is none.

    Only the system's list of locks is read: trying the lock could refuse a writer.
    Where there is no such list, as outside Linux, the answer is None.
    """
    try:
        lock = ledger / LOCK
        inode = lock.stat().st_ino
        held = Path("/proc/locks").read_text()
        if any(f":{inode} " in line for line in held.splitlines() if "FLOCK" in line):
            return int(read_regular_text(lock))
    except (OSError, ValueError):
        pass
    return None


def _signed(certificate: Path) -> bool | None:
    """Return whether a certificate is signed; None if there is none to read."""
    try:
        return read_certificate(certificate).is_signed
    except InvalidInputError:
        return None


def _changed(index: Path) -> str:
    moment = datetime.fromtimestamp(index.stat().st_mtime, UTC)
    return moment.isoformat(timespec="seconds")


def _with_advice(found: Status, path: Path, long_wait: timedelta) -> Status:
    """Return a status with its problems and the next steps."""
    problems, advice = [], []
    place = shlex.quote(str(path))
    if found.verified is not None and found.verified.problems:
        problems.append(
            f"the last verification found {len(found.verified.problems)} problems, "
            f"first: {found.verified.problems[0]}"
        )
        advice.append(
            "restore the ledger from a backup, then: fastfedul ledger verify " + place
        )
    problems += [
        f"request {one.number} was refused: {one.answer}" for one in found.strangers
    ]
    old = [one for one in found.waiting if age_of(one.asked) >= long_wait]
    if old:
        hours = age_of(old[0].asked) // timedelta(hours=1)
        problems.append(f"request {old[0].number} has waited for {hours} hours")
    if found.waiting and found.writer is None:
        advice.append(f"answer the waiting requests: fastfedul request apply {place}")
    need = _FEW_ROUNDS * found.round_bytes
    if found.free_bytes is not None and found.free_bytes < need:
        left = found.free_bytes // found.round_bytes
        problems.append(f"the disk has room for {left} more rounds")
        advice.append("free some disk, or give the ledger a budget with --budget")
    if found.planned is not None and found.rounds < found.planned and not found.writer:
        advice.append(f"finish the training: fastfedul train {place} --resume")
    if found.missing or found.unsigned:
        key = "fastfedul key new, then " if found.unsigned else ""
        advice.append(
            f"complete the certificates: {key}fastfedul request apply {place}"
        )
    if found.clients["forgotten"]:
        advice.append(
            "erase what is left of forgotten clients: fastfedul ledger clients "
            f"{place} names them, fastfedul forget --erase removes their updates"
        )
    if found.rounds and found.verified is None:
        advice.append(f"verify the ledger: fastfedul ledger verify {place}")
    elif found.verified is not None and age_of(found.verified.time) > STALE:
        advice.append(f"verify the ledger again: fastfedul ledger verify {place}")
    file = federation_file(found.path.absolute())
    if found.run is None and not file.is_file():
        advice.append(
            "say how the model is evaluated: " + TWO_LINES.format(file=file.name)
        )
    return replace(found, problems=tuple(problems), advice=tuple(advice))
