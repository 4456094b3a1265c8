"""Altered certificates, and whether a check passes one."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import Progress

from benchmarks.altered_envelopes import Altered, Originals, alter
from benchmarks.fault_past import KINDS, anchored, build_past, key
from benchmarks.fault_writer import Problems
from fastfedul import InvalidInputError, LedgerReader
from fastfedul.forgetting.certificates import certificates_folder, read_certificate
from fastfedul.forgetting.checking import audit
from fastfedul.forgetting.signing import SigningKey
from fastfedul.rng import stream


@dataclass(slots=True)
class Envelopes:
    """Outcomes of the alterations; every one is counted once from `refused` on.

    Attributes:
        kinds: Alterations by their kind.
        refused: The file was no certificate for the reader.
        failed: The check did not pass it.
        silent: The check passed it.
        crashed: Another exception than the library's was raised.
        problems: A line for each violation.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    failed: int = 0
    silent: int = 0
    crashed: int = 0
    problems: Problems = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Return the counts."""
        return {
            "faults": self.kinds.total(),
            "refused": self.refused,
            "failed": self.failed,
            "silent": self.silent,
            "crashed": self.crashed,
            **{f"of_{name}": n for name, n in sorted(self.kinds.items())},
        }


def alter_envelopes(
    folder: Path, wanted: int, seed: int, display: Progress
) -> Envelopes:
    """Alter certificates of a run, and check each with its ledger and without.

    Args:
        folder: Where the run is put.
        wanted: Number of alterations.
        seed: Seed of the draws.
        display: Shows the progress.
    """
    tally = Envelopes()
    rng = stream(seed, "envelope")
    own = (folder / "envelopes").resolve()
    past = build_past(own, KINDS[0], seed)
    files = sorted(certificates_folder(past.now.ledger).glob("*.json"))
    originals = Originals(
        tuple(file.read_bytes() for file in files),
        key(),
        SigningKey.of_bytes(rng.bytes(32)),
    )
    task = display.add_task("altering certificates", total=wanted)
    with anchored(None), LedgerReader(past.now.run) as ledger:
        for original in files:
            # Otherwise nothing would follow from a check that does not pass.
            assert audit(read_certificate(original), ledger, [key().public]).ok
        for number in range(wanted):
            made = alter(originals, number, rng)
            outcome, detail = judge(made, ledger, own / "altered.json")
            tally.kinds[made.kind] += 1
            setattr(tally, outcome, getattr(tally, outcome) + 1)
            if outcome in ("silent", "crashed"):
                line = f"{made.kind}, {made.text}: {outcome}: {detail}"
                tally.problems.append(line)
            display.advance(task)
    shutil.rmtree(own)
    return tally


def judge(made: Altered, ledger: LedgerReader, place: Path) -> tuple[str, str]:
    """Return the outcome of an alteration, and the reason if it is a violation."""
    place.write_bytes(made.data)
    trusted = [key().public]
    try:
        try:
            found = read_certificate(place)
        except InvalidInputError as error:
            one_line = "\n" not in str(error)
            return ("refused", "") if one_line else ("crashed", "several lines")
        if audit(found, ledger, trusted).ok:
            return "silent", "passed with its ledger"
        if not made.by_signer and audit(found, None, trusted).ok:
            return "silent", "passed without its ledger"
    except Exception as error:
        return "crashed", f"{type(error).__name__}: {error}"
    return "failed", ""
