"""The long work of the console, each by the service that the command line calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastfedul.console.jobs import Say
from fastfedul.console.views import find_certificate
from fastfedul.forgetting.certificates import Certificate
from fastfedul.forgetting.checking import Audit, audit
from fastfedul.forgetting.requests import apply_requests
from fastfedul.forgetting.service import Forgetting, forget, preview
from fastfedul.forgetting.statements import conclusions
from fastfedul.forgetting.timestamps import Stamp
from fastfedul.forgetting.trust import trusted_keys
from fastfedul.forgetting.verification import verify_with_files
from fastfedul.investigate.trace import Suspect, trace
from fastfedul.ledger.disk import DiskLedger
from fastfedul.ledger.reader import LedgerReader
from fastfedul.ledger.verify import Verification
from fastfedul.params import norm
from fastfedul.records import ClientId
from fastfedul.runs.validation import Judgement, open_validation


@dataclass(frozen=True, slots=True)
class Plan:
    """A forgetting that was computed and not done.

    Attributes:
        clients: Whom it would forget.
        rounds: Rounds with at least one of them.
        coverage: Kept part of their share in the model.
        by_client: The same for each of them.
        moved: Length of the difference between the models.
        relative: The same over the length of the model.
        seconds: Time of the method.
        warnings: Sentences that an operator should know.
        judgement: How the cleaned model does on clean images, if some were given.
    """

    clients: tuple[ClientId, ...]
    rounds: int
    coverage: float
    by_client: dict[ClientId, float]
    moved: float
    relative: float | None
    seconds: float
    warnings: tuple[str, ...]
    judgement: Judgement | None


@dataclass(frozen=True, slots=True)
class Done:
    """A forgetting that was done.

    Attributes:
        clients: Whom it forgot.
        erased: Whether their updates are gone from the ledger.
        certificate: Name of the certificate's file.
        signed: Whether the certificate is signed.
        warnings: Sentences that an operator should know.
    """

    clients: tuple[ClientId, ...]
    erased: bool
    certificate: str | None
    signed: bool
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """A request and how it ended.

    Attributes:
        number: Number of the request.
        client: Client to forget.
        state: How it ended.
        answer: Reason of a refusal.
        done: The forgetting, if it was applied.
    """

    number: int
    client: ClientId
    state: str
    answer: str | None
    done: Done | None


@dataclass(frozen=True, slots=True)
class Ranking:
    """Whom unwanted answers come from.

    Attributes:
        verdict: Whether somebody stands out.
        culprits: Who does.
        clients: All clients, from the most to the least suspected.
        answers: Number of unwanted answers.
        clean: Number of right answers that they were compared with.
        notes: Limits of the answer.
    """

    verdict: str
    culprits: tuple[ClientId, ...]
    clients: tuple[Suspect, ...]
    answers: int
    clean: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Checked:
    """A certificate and what an audit of it found.

    Attributes:
        name: Name of its file.
        certificate: The certificate.
        audit: The findings.
        may: What one may conclude; empty unless a trusted key signed.
        may_not: What one may not conclude.
    """

    name: str
    certificate: Certificate
    audit: Audit
    may: tuple[str, ...]
    may_not: tuple[str, ...]


def plan(
    path: Path, names: Sequence[ClientId], validation: Path | None, say: Say
) -> Plan:
    """Return what forgetting clients would do; nothing changes."""
    with LedgerReader(path) as ledger:
        images = None
        if validation is not None:
            say("reading the images", 0, 0)
            images = open_validation(validation, ledger, path)
        say("computing the cleaned model", 0, 0)
        found = preview(ledger, names)
        judged = None
        before = ledger.final
        if images is not None:
            say("asking both models", 0, 0)
            judged = images.judge(before, found.model)
    size = norm(before.params.flat)
    return Plan(
        found.clients,
        found.rounds,
        found.coverage,
        found.coverage_by_client,
        found.delta_norm,
        found.delta_norm / size if size else None,
        found.seconds,
        found.warnings,
        judged,
    )


def forget_now(path: Path, names: Sequence[ClientId], erase: bool, say: Say) -> Done:
    """Return a forgetting, done for good."""
    say("opening the ledger", 0, 0)
    with DiskLedger(path) as ledger:
        say("computing the cleaned model and writing it", 0, 0)
        return _done(forget(ledger, names, erase=erase))


def answer_requests(path: Path, say: Say) -> tuple[Answer, ...]:
    """Return the waiting requests with their answers."""
    say("opening the ledger", 0, 0)
    with DiskLedger(path) as ledger:
        say("answering the requests", 0, 0)
        return tuple(
            Answer(
                one.request.number,
                one.request.client,
                one.request.state,
                one.request.answer,
                None if one.forgetting is None else _done(one.forgetting),
            )
            for one in apply_requests(ledger)
        )


def _done(found: Forgetting) -> Done:
    return Done(
        found.clients,
        found.erased,
        None if found.certificate is None else found.certificate.name,
        found.signed,
        found.warnings,
    )


def rank(path: Path, inputs: Path, say: Say) -> Ranking:
    """Return whom the unwanted answers of a file come from."""
    found = trace(path, inputs, say=say)
    return Ranking(
        found.verdict,
        found.culprits,
        found.clients,
        len(found.answers),
        found.num_clean,
        found.notes,
    )


def verify_all(path: Path, say: Say) -> Verification:
    """Return what is wrong with the ledger and the files beside it."""
    return verify_with_files(path, lambda done, all_: say("checking bytes", done, all_))


def check(path: Path, name: str, say: Say) -> Checked:
    """Return what an audit of a certificate finds."""
    say("checking", 0, 0)
    with LedgerReader(path) as ledger:
        own = find_certificate(ledger, name)
        assert own.certificate is not None
        stamp = Stamp.beside(own.file, None)
        found = audit(own.certificate, ledger, trusted_keys(), stamp=stamp)
    may, may_not = conclusions(erased=own.certificate.predicate.history == "erased")
    if not found.ok:
        may = may_not = ()
    return Checked(name, own.certificate, found, tuple(may), tuple(may_not))
