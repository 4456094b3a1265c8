"""Checks a certificate: its signature, the ledger it is about, and the computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fastfedul.canonical_json import encode
from fastfedul.errors import FastFedULError, LedgerError, UnlearnRefusedError
from fastfedul.forgetting.certificates import (
    is_certified,
    make_certificate,
    signed_bytes,
)
from fastfedul.forgetting.signing import ALGORITHM, fingerprint, is_signed
from fastfedul.ledger.disk import LedgerReader
from fastfedul.ledger.store.arrays import file_digest
from fastfedul.ledger.views import PastView
from fastfedul.methods.protocol import UnlearnRequest, needs_help
from fastfedul.methods.registry import find_installed
from fastfedul.params import Flat, norm
from fastfedul.records import LogEntry

TOLERANCE = 1e-5
"""How far, relative to its norm, a recomputed change of the model may be off."""

Verdict = Literal["holds", "fails", "not checked"]

ONLY_INTEGRITY = (
    "it fits the public key inside the certificate, which proves that nothing was "
    "changed since it was signed, but not who signed; compare the fingerprint, or give "
    "the signer's key with --public-key"
)
UNSIGNED = "the certificate is not signed: by itself it proves nothing"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: `signature`, `log`, `request`, `chain`, `model`, `clients` or
            `recomputed`.
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
        checks: One after the other.
        fingerprint: Fingerprint of the key that signed; None if nobody did.
    """

    checks: tuple[Check, ...]
    fingerprint: str | None

    @property
    def ok(self) -> bool:
        """Whether nothing fails, and at least the signature or the log holds."""
        anchors = [c for c in self.checks if c.name in ("signature", "log")]
        return all(c.verdict != "fails" for c in self.checks) and any(
            c.verdict == "holds" for c in anchors
        )


def audit(
    certificate: Mapping[str, Any],
    ledger: LedgerReader | None = None,
    public_key: bytes | None = None,
) -> Audit:
    """Check a certificate that was read by `read_certificate`.

    Args:
        certificate: The certificate.
        ledger: The ledger it is about, if it is there.
        public_key: The signer's public key, from a source that is trusted.
    """
    signature, signer = _check_signature(certificate, public_key)
    checks = [signature]
    if ledger is not None:
        try:
            with ledger.snapshot():
                checks += _check_ledger(certificate, ledger)
        except LedgerError as error:
            checks.append(Check("log", "fails", f"the ledger cannot be read: {error}"))
    return Audit(tuple(checks), signer)


def _check_signature(
    certificate: Mapping[str, Any], public_key: bytes | None
) -> tuple[Check, str | None]:
    found = certificate["signature"]
    if found is None:
        if public_key is None:
            return Check("signature", "not checked", UNSIGNED), None
        return Check("signature", "fails", "the certificate is not signed"), None
    key, value = _bytes(found.get("public_key")), _bytes(found.get("value"))
    known = set(found) == {"algorithm", "public_key", "value"}
    if not known or found["algorithm"] != ALGORITHM or key is None or value is None:
        text = f"it is not in the form of an {ALGORITHM} signature"
        return Check("signature", "fails", text), None
    signer = fingerprint(key)
    if public_key is not None and key != public_key:
        text = f"another key signed: its fingerprint is {signer}"
        return Check("signature", "fails", text), signer
    if not is_signed(signed_bytes(certificate), value, key):
        text = "it does not fit: the certificate was changed after it was signed"
        return Check("signature", "fails", text), signer
    text = "it fits the given public key" if public_key else ONLY_INTEGRITY
    return Check("signature", "holds", text), signer


def _bytes(value: object) -> bytes | None:
    """Return the bytes of hexadecimal text in its one form."""
    try:
        data = bytes.fromhex(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return data if data is not None and data.hex() == value else None


def _check_ledger(certificate: Mapping[str, Any], ledger: LedgerReader) -> list[Check]:
    log = ledger.log()
    number = certificate["log"]["entry"]
    if not 1 <= number <= len(log):
        text = f"the ledger's log has {len(log)} entries and no number {number}"
        return [Check("log", "fails", text)]
    entry = log[number - 1]
    if not is_certified(entry):
        text = f"entry {number} of the log is another: {entry.event.kind}"
        return [Check("log", "fails", text)]
    expected = make_certificate(entry)
    everything = sorted(set(expected) | set(certificate) - {"signature"})
    wrong = [n for n in everything if _encoded(expected, n) != _encoded(certificate, n)]
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
        _check_clients(entry, ledger),
        _check_computation(entry, log, ledger),
    ]


def _encoded(certificate: Mapping[str, Any], name: str) -> bytes | None:
    return encode(certificate[name]) if name in certificate else None


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
    if recorded is None:
        return Check("chain", "not checked", "the log does not say at which round")
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
