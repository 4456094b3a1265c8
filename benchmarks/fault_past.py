"""A run with copies of its earlier moments, from which files can be swapped back."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from unittest import mock

from benchmarks.fault_flips import questions
from benchmarks.fault_writer import METHOD, initial, sent
from benchmarks.measuring import client_name
from fastfedul import (
    DiskLedger,
    FastFedULError,
    LedgerError,
    LedgerReader,
    add_request,
    apply_requests,
    forget,
)
from fastfedul.forgetting.folder import RUN_CONFIG, RUN_MODEL, write_run_model
from fastfedul.forgetting.signing import SigningKey
from fastfedul.ledger.anchor import ANCHOR_VARIABLE
from fastfedul.records import History, StorageDtype

KEY_BYTES = bytes(range(32))
"""Private bytes of the key that signs every certificate here."""

ERASED, FORGOTTEN, ASKING = client_name(1), client_name(2), client_name(3)

State = dict[str, object]
"""Answers of a ledger to all questions, by the question."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of ledger.

    Attributes:
        size: Number of parameters.
        history: Whether the ledger keeps rounds or sums.
        dtype: How updates are stored.
        apart: Whether every vector has a file of its own, as in a large model.
    """

    size: int
    history: History = "rounds"
    dtype: StorageDtype = "float32"
    apart: bool = False


KINDS = (
    Kind(600),
    Kind(600, apart=True),
    Kind(70_000, dtype="int8"),  # A little more than one block of checksummed values.
    Kind(600, history="sums"),
)


@dataclass(frozen=True, slots=True)
class Moment:
    """A copy of a run at one moment.

    Attributes:
        number: Its place among the moments.
        run: Folder of the copy.
        state: Answers of its ledger.
        entries: Number of entries of its log.
        num_rounds: Number of its rounds.
    """

    number: int
    run: Path
    state: State
    entries: int
    num_rounds: int

    @property
    def ledger(self) -> Path:
        """Folder of the ledger."""
        return self.run / "ledger"


@dataclass(frozen=True, slots=True)
class Past:
    """A run, its earlier moments, and its anchor.

    Attributes:
        kind: Kind of the ledger.
        moments: All moments in their order; the last is the present.
        anchor: The anchor of the present, outside the run.
    """

    kind: Kind
    moments: tuple[Moment, ...]
    anchor: Path

    @property
    def now(self) -> Moment:
        """The present."""
        return self.moments[-1]

    @property
    def before(self) -> tuple[Moment, ...]:
        """All moments but the present."""
        return self.moments[:-1]


def key() -> SigningKey:
    """Return the key that signs every certificate here."""
    return SigningKey.of_bytes(KEY_BYTES)


@contextlib.contextmanager
def anchored(anchor: Path | None) -> Iterator[None]:
    """Let the environment name this anchor, or none."""
    with mock.patch.dict(os.environ):
        os.environ.pop(ANCHOR_VARIABLE, None)
        if anchor is not None:
            os.environ[ANCHOR_VARIABLE] = str(anchor)
        yield


@contextlib.contextmanager
def files_apart(apart: bool) -> Iterator[None]:
    """Treat a small model as a large one, whose vectors do not share files."""
    with contextlib.ExitStack() as stack:
        for name in ("append", "rewrite") if apart else ():
            module = import_module(f"fastfedul.ledger.changes.{name}")
            stack.enter_context(mock.patch.object(module, "SHARED_BYTES", 0))
        yield


def state_of(ledger: LedgerReader) -> State:
    """Return the answers of a ledger to all questions; a refusal is an answer too.

    Raises:
        LedgerError: If the ledger cannot answer.
    """
    found: State = {}
    asked = questions(ledger.settings.history, ledger.num_rounds)
    for name, question in asked.items():
        try:
            found[name] = question(ledger)
        except LedgerError:
            raise
        except FastFedULError as error:
            found[name] = repr(error)
    return found


def build_past(folder: Path, kind: Kind, seed: int) -> Past:
    """Return a run of ten rounds with an erasure and a forgetting, moment by moment.

    A client of a ledger of sums is erased alone: shares vary here, so that the sums
    would not tell enough about a second client.
    """
    shutil.rmtree(folder, ignore_errors=True)
    run = folder / "run"
    run.mkdir(parents=True)
    anchor = folder / "anchor.jsonl"
    moments: list[Moment] = []
    with anchored(anchor), files_apart(kind.apart):
        for _ in _changes(run, kind, seed):
            copy = folder / f"moment-{len(moments)}"
            shutil.copytree(run, copy)
            with LedgerReader(copy) as reader:
                state, log = state_of(reader), reader.log()
                moment = Moment(len(moments), copy, state, len(log), reader.num_rounds)
            moments.append(moment)
    return Past(kind, tuple(moments), anchor)


def _changes(run: Path, kind: Kind, seed: int) -> Iterator[None]:
    """Change a run step by step, and yield at every moment to keep."""
    ledger_path = run / "ledger"
    gone: set[str] = set()

    def train(ledger: DiskLedger, rounds: range) -> None:
        for index in rounds:
            ledger.append(sent(seed, index, kind.size, frozenset(gone)))
        write_run_model(ledger, run / RUN_MODEL)

    with DiskLedger.create(
        ledger_path,
        initial(kind.size),
        history=kind.history,
        update_dtype=kind.dtype,
        federation="faults",
    ) as ledger:
        (run / RUN_CONFIG).write_text('[data]\nname = "digits"\n')
        train(ledger, range(3))
        yield
        train(ledger, range(3, 5))
        yield
        add_request(ledger_path, ERASED, "consent withdrawn")
        yield
        apply_requests(ledger, method=METHOD, key=key())
        gone.add(ERASED)
        yield
        train(ledger, range(5, 7))
        yield
        if kind.history == "rounds":
            forget(ledger, [FORGOTTEN], METHOD, erase=False, key=key())
            gone.add(FORGOTTEN)
            yield
        train(ledger, range(7, 10))
        yield
        add_request(ledger_path, ASKING, "moved away")
        yield
