"""Checks a certificate: who signed it, the ledger it is about, and the computation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fastfedul.errors import (
    FastFedULError,
    InvalidInputError,
    LedgerError,
    UnlearnRefusedError,
)
from fastfedul.forgetting.audits import audit_digests
from fastfedul.forgetting.certificates import Certificate
from fastfedul.forgetting.envelopes import Envelope
from fastfedul.forgetting.folder import run_model_of, run_model_problem
from fastfedul.forgetting.signing import PublicKey
from fastfedul.forgetting.statements import (
    Predicate,
    Statement,
    is_certified,
    make_statement,
)
from fastfedul.forgetting.timestamps import Stamp
from fastfedul.ledger.reader import LedgerReader
from fastfedul.ledger.store.arrays import file_digest
from fastfedul.ledger.views import PastView
from fastfedul.methods.protocol import UnlearnRequest, needs_help
from fastfedul.methods.registry import find_installed
from fastfedul.params import Flat, norm
from fastfedul.records import LogEntry

TOLERANCE = 1e-5
"""How far, relative to its norm, a recomputed change of the model may be off."""

CLOCKS_APART = timedelta(minutes=1)
"""How far the server's clock may be ahead of a time stamping authority's."""

Verdict = Literal["holds", "fails", "not checked"]

UNSIGNED = "the certificate is not signed, so anybody may have written it"
NO_TRUSTED_KEY = (
    "you trust no key; give the signer's with --public-key, or pin it with "
    "`fastfedul key trust`"
)


NO_LEDGER = (
    "no ledger is at hand, so its log, its model and the erasure were not looked at; "
    "name the ledger that you expect with --ledger-id"
)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: `signature`, `time`, `stamp`, `audit`, `ledger`, `log`, `request`,
            `chain`, `model`, `deployed`, `clients` or `recomputed`.
        verdict: Whether it holds.
        text: The finding, in one line.
    """

    name: str
    verdict: Verdict
    text: str


@dataclass(frozen=True, slots=True)
class Audit:
    """Findings of an audit.

    Attributes:
        checks: One after the other; the signature comes first.
        fingerprint: Fingerprint of the trusted key that signed; None if none did.
    """

    checks: tuple[Check, ...]
    fingerprint: str | None

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that fail."""
        return tuple(check.name for check in self.checks if check.verdict == "fails")

    @property
    def ok(self) -> bool:
        """Whether nothing fails and a trusted key signed."""
        return not self.failed and self.fingerprint is not None


def audit(
    certificate: Certificate,
    ledger: LedgerReader | None = None,
    trusted: Sequence[PublicKey] = (),
    *,
    ledger_id: str | None = None,
    stamp: Stamp | None = None,
    attached: Path | None = None,
) -> Audit:
    """Check a certificate that was read by `read_certificate`.

    Args:
        certificate: The certificate.
        ledger: The ledger it is about, if it is there.
        trusted: Public keys of signers, from a source that is trusted.
        ledger_id: Id of the ledger that the certificate must be about, if it is known.
        stamp: The certificate's file with its time stamp, if it may have one.
        attached: File of the audit that the certificate names, if it is there.

    Raises:
        InvalidInputError: If the file of the audit cannot be read.
    """
    statement = certificate.statement
    signature, signer = check_signature(certificate.envelope, trusted)
    checks = [signature, _check_times(statement.predicate)]
    checks += [] if stamp is None else _check_stamp(stamp, statement.predicate)
    checks += _check_audit(statement.predicate, attached)
    about = statement.predicate.ledger.id
    if ledger_id is not None or ledger is not None:
        expected = ledger_id if ledger is None else ledger.ledger_id
        if ledger_id is not None and ledger is not None and expected != ledger_id:
            text = f"the ledger at hand is {expected}, and {ledger_id} was asked for"
            checks.append(Check("ledger", "fails", text))
        elif about != expected:
            text = f"the certificate is about ledger {about}, not {expected}"
            checks.append(Check("ledger", "fails", text))
        else:
            text = f"the certificate is about this ledger, {about}"
            checks.append(Check("ledger", "holds", text))
    else:
        checks.append(Check("ledger", "not checked", NO_LEDGER))
    if ledger is not None and checks[-1].verdict == "holds":
        try:
            with ledger.snapshot():
                checks += _check_ledger(statement, ledger)
        except LedgerError as error:
            checks.append(Check("log", "fails", f"the ledger cannot be read: {error}"))
    return Audit(tuple(checks), signer)


def check_signature(
    envelope: Envelope, trusted: Sequence[PublicKey]
) -> tuple[Check, str | None]:
    """Return whether a trusted key signed, and the fingerprint of that key."""
    if not envelope.signatures:
        return Check("signature", "not checked", UNSIGNED), None
    if not trusted:
        return Check("signature", "not checked", NO_TRUSTED_KEY), None
    signer = None
    for key in trusted:
        claimed = envelope.signature_of(key)
        if claimed is None:
            continue
        if not key.verifies(envelope.signed_bytes(), claimed.value):
            text = (
                f"the signature of key {key.fingerprint} does not fit: the certificate "
                "was changed after it was signed"
            )
            return Check("signature", "fails", text), None
        signer = key.fingerprint
    if signer is None:
        others = ", ".join(f"{one.keyid!r:.80}" for one in envelope.signatures)
        text = f"no key that you trust signed it; the signatures name {others}"
        return Check("signature", "not checked", text), None
    return Check("signature", "holds", f"the trusted key {signer} signed it"), signer


def _check_times(predicate: Predicate) -> Check:
    """Return whether the forgetting came after the requests that asked for it."""
    try:
        applied = _moment(predicate.applied)
        late = [r for r in predicate.requests if _moment(r.asked) > applied]
    except ValueError as error:
        return Check("time", "fails", f"a time is not in ISO 8601 with a zone: {error}")
    if late:
        text = (
            f"request {late[0].request} was asked at {late[0].asked}, after it was "
            f"applied at {predicate.applied}"
        )
        return Check("time", "fails", text)
    text = f"applied at {predicate.applied}, not before it was asked for"
    return Check("time", "holds", text)


def _check_stamp(stamp: Stamp, predicate: Predicate) -> list[Check]:
    """Return whether an authority that is trusted stamped the certificate."""
    if not stamp.roots:
        text = "no authority is trusted; give its root certificate with --tsa-root"
        return [Check("stamp", "not checked", text)] if stamp.answer else []
    try:
        time = stamp.time()
        late = _moment(predicate.applied) - time
    except (InvalidInputError, ValueError) as error:
        return [Check("stamp", "fails", str(error))]
    if late > CLOCKS_APART:
        text = f"stamped at {time.isoformat()}, before it was applied"
        return [Check("stamp", "fails", text)]
    text = f"a trusted authority says that it existed at {time.isoformat()}"
    return [Check("stamp", "holds", text)]


def _check_audit(predicate: Predicate, attached: Path | None) -> list[Check]:
    """Return whether a file is the audit that the certificate names."""
    named = predicate.audit
    if attached is None:
        text = "it names an audit; give the file with --audit"
        return [] if named is None else [Check("audit", "not checked", text)]
    if named is None:
        return [Check("audit", "fails", "the certificate names no audit")]
    if audit_digests(attached) == named.model_dump():
        return [Check("audit", "holds", f"it names the audit {attached.name}")]
    return [Check("audit", "fails", f"{attached.name} is another audit")]


def _moment(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    if found.tzinfo is None:
        raise ValueError(f"{text!r:.60} has no zone")
    return found


def _check_ledger(statement: Statement, ledger: LedgerReader) -> list[Check]:
    log = ledger.log()
    number = statement.predicate.log.entry
    if number > len(log):
        text = f"the ledger's log has {len(log)} entries and no number {number}"
        return [Check("log", "fails", text)]
    entry = log[number - 1]
    if not is_certified(entry):
        text = f"entry {number} of the log is another: {entry.event.kind}"
        return [Check("log", "fails", text)]
    wrong = _differences(make_statement(entry), statement)
    if wrong:
        text = f"entry {number} of the log says otherwise about: {', '.join(wrong)}"
        return [Check("log", "fails", text)]
    held = f"entry {number} of the ledger's log says the same in every field"
    later = log[number:]
    return [
        Check("log", "holds", held),
        *_check_requests(entry, ledger),
        _check_chain(entry, later, ledger),
        _check_model(entry, later, ledger),
        *_check_run_model(ledger),
        _check_clients(entry, ledger),
        _check_computation(entry, log, ledger),
    ]


def _differences(expected: Statement, found: Statement) -> list[str]:
    """Return the names of the fields in which two statements differ."""
    one, other = expected.to_json(), found.to_json()
    wrong = [
        name
        for name, value in one["predicate"].items()
        if json.dumps(value) != json.dumps(other["predicate"][name])
    ]
    return wrong if one["subject"] == other["subject"] else ["subject", *wrong]


def _check_requests(entry: LogEntry, ledger: LedgerReader) -> list[Check]:
    asked: Any = entry.event.details.get("requests", [])
    known = {request.number: request for request in ledger.requests()}
    checks = []
    for said in asked:
        number = said["request"]
        request = known.get(number)
        same = request is not None and (
            request.client in entry.event.clients
            and request.state == "applied"
            and request.event == entry.number
            and (request.asked, request.reason) == (said["asked"], said["reason"])
        )
        text = (
            f"request {number} was applied by this entry"
            if same
            else f"the ledger says otherwise about request {number}"
        )
        checks.append(Check("request", "holds" if same else "fails", text))
    return checks


def _check_chain(
    entry: LogEntry, later: Sequence[LogEntry], ledger: LedgerReader
) -> Check:
    after = entry.event.details["chain_after"]
    recorded: Any = entry.event.details.get("recorded_rounds")
    for other in later:
        found: Mapping[str, Any] = other.event.details
        if found["chain_before"] == found["chain_after"]:
            continue
        if found.get("recorded_rounds") == recorded:
            return _compare("chain", found["chain_before"], after, "the next erasure")
        text = f"entry {other.number} of the log rewrote the ledger afterwards"
        return Check("chain", "not checked", text)
    chain = ledger.chain_after(recorded - 1)
    return _compare("chain", chain.hex(), after, "the ledger")


def _check_model(
    entry: LogEntry, later: Sequence[LogEntry], ledger: LedgerReader
) -> Check:
    after = entry.event.details["model_after"]
    recorded = entry.event.details.get("recorded_rounds")
    if later:
        following: Mapping[str, Any] = later[0].event.details
        if following.get("recorded_rounds") == recorded:
            before = following["model_before"]
            return _compare("model", before, after, "the next entry of the log")
    elif recorded == ledger.num_rounds:
        path = ledger.model_path
        try:
            digest = file_digest(path).hex()
        except OSError as error:
            return Check("model", "fails", f"{path.name}: {error.strerror}")
        return _compare("model", digest, after, "the ledger's model")
    text = "later rounds have taken the place of the model of that time"
    return Check("model", "not checked", text)


def _compare(name: str, found: str, said: object, where: str) -> Check:
    if found == said:
        return Check(name, "holds", f"{where} has the digest after the forgetting")
    return Check(name, "fails", f"{where} has {found}, the certificate {said}")


def _check_run_model(ledger: LedgerReader) -> list[Check]:
    """Return whether the model file of the ledger's run follows the ledger."""
    if run_model_of(ledger.path) is None:
        return []
    problem = run_model_problem(ledger)
    text = problem or "the run's model file holds a model since the last forgetting"
    return [Check("deployed", "fails" if problem else "holds", text)]


def _check_clients(entry: LogEntry, ledger: LedgerReader) -> Check:
    erased = "erase" in entry.event.kind
    allowed = ("erased",) if erased else ("forgotten", "erased")
    recorded: Any = 0 if erased else entry.event.details.get("recorded_rounds")
    known = ledger.clients()
    for client in entry.event.clients:
        state = known[client].state if client in known else "unknown"
        if state not in allowed:
            text = f"client {client!r:.80} is {state} in the ledger"
            return Check("clients", "fails", text)
        late = [u for u in ledger.updates_of(client) if u.round >= (recorded or 0)]
        if late and recorded is not None:
            text = f"updates of client {client!r:.80} are in the ledger"
            return Check("clients", "fails", text)
    text = "none of them is in a later round"
    text = f"{text}, nor in an earlier one" if erased else text
    return Check("clients", "holds", text)


def _check_computation(
    entry: LogEntry, log: Sequence[LogEntry], ledger: LedgerReader
) -> Check:
    """Compute the change of the model again and compare it with the committed one."""
    reason = _why_not(entry, log, ledger)
    if reason:
        return Check("recomputed", "not checked", reason)
    at: Any = entry.event.details["recorded_rounds"]
    # All forgettings at the same round are one adjustment of the ledger.
    same = [
        e for e in log if is_certified(e) and e.event.details["recorded_rounds"] == at
    ]
    try:
        committed = ledger.adjustments()[at]
        total = np.zeros_like(committed)
        for one in same:
            total = total + _recompute(one, log, ledger)
    except FastFedULError as error:
        return Check("recomputed", "not checked", f"it cannot be computed: {error}")
    size = norm(committed)
    gap = norm(total - committed)
    text = (
        f"computed again from the kept updates, the change of the model differs by "
        f"{gap / size if size else gap:.1e} of its norm; {TOLERANCE:g} is allowed"
    )
    return Check("recomputed", "holds" if gap <= TOLERANCE * size else "fails", text)


def _why_not(
    entry: LogEntry, log: Sequence[LogEntry], ledger: LedgerReader
) -> str | None:
    """Return why the ledger does not allow to compute it again; None if it does."""
    at = entry.event.details.get("recorded_rounds")
    if entry.event.kind == "erase":
        return "an erasure leaves the model as it is"
    if entry.event.kind != "forget":
        return "the clients' updates were erased, as they should be"
    if ledger.settings.history == "sums":
        return "the ledger keeps sums and not the change of the model"
    if isinstance(at, int) and at and ledger.rounds()[at - 1].privacy is not None:
        return "the server added noise to the model of the same round"
    for other in log:
        details = other.event.details
        if not is_certified(other):
            if other.number > entry.number:
                return f"entry {other.number} of the log dropped updates afterwards"
            continue
        erased = "erase" in other.event.kind
        if erased and other.number > entry.number:
            return f"entry {other.number} of the log rewrote the ledger afterwards"
        if details.get("recorded_rounds") != at:
            continue
        if erased:
            return f"entry {other.number} of the log adjusted the same round"
        if at is None or "method" not in details:
            return "the log does not say by which method, or at which round"
    return None


def _recompute(entry: LogEntry, log: Sequence[LogEntry], ledger: LedgerReader) -> Flat:
    details: Any = entry.event.details
    before = filter(is_certified, log[: entry.number - 1])
    gone = {client for one in before for client in one.event.clients}
    chain = bytes.fromhex(details["chain_before"])
    past = PastView(ledger, details["recorded_rounds"], frozenset(gone), chain)
    method = find_installed(details["method"], details["settings"])
    if needs_help(method):
        raise UnlearnRefusedError(f"{method.name} needs the help of clients")
    result = method(UnlearnRequest(past, frozenset(entry.event.clients)))
    return result.change(past.final).flat
