"""Commands that change a run, and what must be true once they have been repeated."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.fault_writer import TARGET, initial, sent
from fastfedul import DiskLedger, LedgerReader, add_request, apply_requests, verify
from fastfedul.forgetting.certificates import (
    certificate_path,
    certificates_folder,
)
from fastfedul.forgetting.folder import RUN_CONFIG, RUN_MODEL, write_run_model
from fastfedul.forgetting.statements import is_certified
from fastfedul.ledger.protocol import vector
from fastfedul.ledger.store.model_files import read_model
from fastfedul.records import History, VectorRef

SIZE = 600
ROUNDS = 5
SEED = 7


@dataclass(frozen=True, slots=True)
class Scenario:
    """A command that changes a run.

    Attributes:
        name: Its name.
        arguments: Its arguments; `RUN` stands for the folder of the run.
        asked: Whether a request waits before.
        apart: Whether every vector has a file of its own.
        sums: Whether the ledger keeps sums.
        erases: Whether the client is gone from the disk afterwards.
        deploys: Whether the run's model file follows; it does not during training.
    """

    name: str
    arguments: tuple[str, ...]
    asked: bool = False
    apart: bool = False
    sums: bool = False
    erases: bool = True
    deploys: bool = True


SCENARIOS = (
    Scenario("forget", ("forget", "RUN", TARGET)),
    Scenario("forget, large", ("forget", "RUN", TARGET), apart=True),
    Scenario("forget, sums", ("forget", "RUN", TARGET), sums=True),
    Scenario("request apply", ("request", "apply", "RUN"), asked=True),
    Scenario("compact", ("ledger", "compact", "RUN", "--yes"), erases=False),
    Scenario("append", ("append", "RUN"), erases=False, deploys=False),
)


def append(run: str) -> None:
    """Append one round to the ledger of a run, unless it is there."""
    with DiskLedger(run) as ledger:
        apply_requests(ledger)
        if ledger.num_rounds == ROUNDS:
            ledger.append(sent(SEED, ROUNDS, SIZE))


def build(name: str, path: str) -> None:
    """Make the run of a scenario: a ledger, a configuration and a model file."""
    [scenario] = [one for one in SCENARIOS if one.name == name]
    run = Path(path)
    run.mkdir(parents=True)
    history: History = "sums" if scenario.sums else "rounds"
    with DiskLedger.create(run / "ledger", initial(SIZE), history=history) as ledger:
        for index in range(ROUNDS):
            ledger.append(sent(SEED, index, SIZE))
        write_run_model(ledger, run / RUN_MODEL)
    (run / RUN_CONFIG).write_text('[data]\nname = "digits"\n')
    if scenario.asked:
        add_request(run, TARGET)


PROGRAMS: dict[str, Callable[..., None]] = {"append": append, "build": build}
"""Programs that an attempt may run in place of the command line."""


def needles(run: Path) -> list[bytes]:
    """Return bytes that only the client's updates, or steps with them, have."""
    with LedgerReader(run) as ledger:
        if ledger.settings.history == "sums":
            own = [ledger.own_difference(TARGET)]
        else:
            entries = ledger.updates_of(TARGET)
            refs = [VectorRef(entry.round, TARGET) for entry in entries if entry.kept]
            refs += [VectorRef(entry.round) for entry in entries]
            own = [vector(ledger, ref) for ref in refs]
    return [flat.tobytes()[:64] for flat in own]


@dataclass(frozen=True, slots=True)
class Wanted:
    """State of a run after the command, undisturbed.

    Attributes:
        model: Bytes of the parameters.
        rounds: Number of rounds.
        certificates: Number of certificates.
        needles: Bytes that must be nowhere below the run.
        deployed: Whether the run's model file must hold the model.
    """

    model: bytes
    rounds: int
    certificates: int
    needles: tuple[bytes, ...]
    deployed: bool

    @classmethod
    def of(cls, run: Path, gone: list[bytes], *, deployed: bool) -> Wanted:
        """Return the state of a run."""
        with LedgerReader(run) as ledger:
            return cls(
                ledger.final.params.flat.tobytes(),
                ledger.num_rounds,
                sum(is_certified(entry) for entry in ledger.log()),
                tuple(gone),
                deployed,
            )


def wrong(run: Path, wanted: Wanted) -> Iterator[str]:
    """Yield what is not as wanted in a run, its model file and its certificates."""
    with LedgerReader(run) as ledger:
        yield from verify(ledger).problems
        if ledger.final.params.flat.tobytes() != wanted.model:
            yield "the ledger has another model"
        if ledger.num_rounds != wanted.rounds:
            yield f"the ledger has {ledger.num_rounds} rounds"
        if ledger.waiting():
            yield "a request still waits"
        yield from _missing_certificates(ledger, wanted)
        layout, buffers = ledger.settings.layout, frozenset({"count"})
        try:
            deployed = read_model(run / RUN_MODEL, layout=layout, buffers=buffers)
        except Exception as error:
            yield f"the model file cannot be read: {error}"
        else:
            same = np.array_equal(deployed.params.flat, ledger.final.params.flat)
            if wanted.deployed and not same:
                yield "the model file is not the ledger's model"
    for file in sorted(run.rglob("*")):
        if file.is_file():
            content = file.read_bytes()
            if any(needle in content for needle in wanted.needles):
                yield f"something of the client is left in {file.relative_to(run)}"
        if ".new-" in file.name:
            yield f"{file.relative_to(run)} was left behind"


def _missing_certificates(ledger: LedgerReader, wanted: Wanted) -> Iterator[str]:
    entries = [entry for entry in ledger.log() if is_certified(entry)]
    if len(entries) != wanted.certificates:
        yield f"the log has {len(entries)} forgettings, not {wanted.certificates}"
    folder = certificates_folder(ledger.path)
    for entry in entries:
        if not certificate_path(folder, entry).is_file():
            yield f"there is no certificate of entry {entry.number}"


def copy_run(template: Path, run: Path) -> None:
    """Put a copy of a run in the place of another one."""
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(template, run)
