"""The files beside a ledger that follow it: the run's model, and the certificates.

The ledger decides. After a crash the next call does the missing steps, because every
forgetting begins and ends with `bring_up_to_date`.
"""

from __future__ import annotations

import json
from pathlib import Path

from fastfedul.errors import FastFedULError, InvalidInputError, LedgerDamagedError
from fastfedul.files import read_regular, sync_folder
from fastfedul.forgetting.certificates import (
    certificates_folder,
    read_certificate,
    write_certificates,
)
from fastfedul.forgetting.signing import SigningKey
from fastfedul.ledger.anchor import require_anchored
from fastfedul.ledger.reader import LedgerReader
from fastfedul.ledger.store.model_files import holds_model, read_note, write_model

RUN_CONFIG = "config.toml"
"""The file that makes a folder a run."""

RUN_MODEL = "model.safetensors"
"""The file of a run that people deploy."""

RETRAINED_MODELS = "retrained-"
"""Beginning of the names of retrained models that a comparison leaves in a run.

Beside each lies a `.json` file with the clients that the model was trained without.
"""

_NOTE = "fastfedul-model"
"""Name of the note in a model file: the digest of the ledger's model."""


def run_model_of(ledger: Path) -> Path | None:
    """Return the model file of a ledger's run; None if there is none.

    A ledger outside a run has none, and a run has none before its training ends.
    """
    place = ledger.parent / RUN_MODEL
    in_run = (ledger.parent / RUN_CONFIG).is_file()
    return place if in_run and place.is_file() else None


def write_run_model(ledger: LedgerReader, place: Path) -> None:
    """Write the ledger's model to a file, whole or not at all."""
    write_model(place, ledger.final, {_NOTE: ledger.model_digest})


def run_model_problem(ledger: LedgerReader) -> str | None:
    """Return what is wrong with the model file of a ledger's run; None if nothing is.

    While training goes on, the file may hold an earlier model, but none from before
    the last forgetting. Every value is compared, not only the digest that the file
    names.
    """
    place = run_model_of(ledger.path)
    if place is None:
        return None
    with ledger.snapshot():
        named = read_note(place, _NOTE)
        if named == ledger.model_digest:
            same = holds_model(place, ledger.final)
            return None if same else f"{place} does not hold the model that it names"
        for model in reversed(ledger.lineage()):
            if model.digest == named:
                return None
            if model.origin == "forgetting":
                break
    return f"{place} holds a model from before the last forgetting, or another one"


def require_newest(ledger: LedgerReader, certificates: Path | None = None) -> None:
    """Raise if a certificate or the operator's anchor knows more than the ledger.

    Then somebody has restored an older copy of the ledger, and clients that were
    forgotten are back. Certificates of other ledgers do not count.

    Args:
        ledger: The ledger.
        certificates: Folder of the certificates; None for the usual folder.

    Raises:
        LedgerDamagedError: If a certificate has an entry that the log lacks, or the
            anchor a change that the ledger lacks.
    """
    require_anchored(ledger)
    folder = certificates_folder(ledger.path) if certificates is None else certificates
    digests = [entry.digest for entry in ledger.log()]
    for path in sorted(folder.glob("*.json")):
        try:
            told = read_certificate(path).predicate
        except InvalidInputError:
            continue
        place = told.log.entry - 1
        if told.ledger.id != ledger.ledger_id or digests[place : place + 1] == [
            told.log.digest
        ]:
            continue
        names = ", ".join(f"{name!r:.80}" for name in told.clients[:3])
        raise LedgerDamagedError(
            f"the ledger at {ledger.path} is older than {path}, which tells that "
            f"{names} was forgotten, so nothing was done; restore the newest copy, or "
            "move that certificate elsewhere and forget the client again"
        )


def bring_up_to_date(
    ledger: LedgerReader, key: SigningKey | None, certificates: Path | None = None
) -> tuple[Path, ...]:
    """Return the files that this call brought up to date with the ledger.

    These are the run's model file, if it has another model than the ledger, and the
    certificates of the log that are missing, or unsigned although there is a key.
    Retrained models of comparisons that a forgotten client helped to train are removed.

    Args:
        ledger: The ledger.
        key: Key that signs certificates; None for certificates without a signature.
        certificates: Folder of the certificates; None for the usual folder.

    Raises:
        LedgerDamagedError: If a certificate tells of a log that the ledger lacks.
        FastFedULError: If a file cannot be written. The ledger keeps its record, and
            the next call writes the file.
    """
    require_newest(ledger, certificates)
    written: list[Path] = []
    place = run_model_of(ledger.path)
    if place is not None and run_model_problem(ledger) is not None:
        try:
            write_run_model(ledger, place)
        except FastFedULError as error:
            raise FastFedULError(
                f"the ledger has the new model, but {place} still holds the old model: "
                f"{error}; mend the cause and repeat the command"
            ) from None
        written.append(place)
    _remove_retrained(ledger)
    folder = certificates_folder(ledger.path) if certificates is None else certificates
    written += write_certificates(ledger, folder, key)
    return tuple(written)


def _remove_retrained(ledger: LedgerReader) -> None:
    """Remove retrained models that a client helped to train before it left.

    Raises:
        FastFedULError: If a file cannot be removed.
    """
    run = ledger.path.parent
    if not (run / RUN_CONFIG).is_file():
        return
    gone = {n for n, client in ledger.clients().items() if client.state != "active"}
    for facts in run.glob(f"{RETRAINED_MODELS}*.json"):
        try:
            without = set(json.loads(read_regular(facts))["without"])
        except (OSError, ValueError, LookupError, TypeError):
            without = set()
        if gone <= without:
            continue
        try:
            facts.with_suffix(".safetensors").unlink(missing_ok=True)
            facts.unlink()
            sync_folder(run)
        except OSError as error:
            raise FastFedULError(
                f"{facts} and the model beside it were made with a client that is "
                f"forgotten, and cannot be removed: {error.strerror}; remove them and "
                "repeat the command"
            ) from None
