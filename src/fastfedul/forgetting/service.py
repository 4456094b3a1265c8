"""Forgets clients for good: one way for Python, commands, requests and Flower.

The method computes the forgetting, and one transaction commits it to the ledger. Then
the service updates the files beside the ledger: the run's model file and the
certificate. After a crash the next call does the missing steps.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from fastfedul.errors import AlreadyForgottenError, InvalidInputError
from fastfedul.federation.clients import Federation
from fastfedul.forgetting.audits import audit_digests, checked_audit
from fastfedul.forgetting.certificates import certificate_path, certificates_folder
from fastfedul.forgetting.folder import bring_up_to_date
from fastfedul.forgetting.privacy import privacy_facts, privacy_warning
from fastfedul.forgetting.signing import SigningKey, find_key
from fastfedul.ledger.changes.erase_sums import given_up_by_erasing
from fastfedul.ledger.checks import check_name
from fastfedul.ledger.disk import DiskLedger, ledger_at
from fastfedul.ledger.lookalikes import lookalike_warnings
from fastfedul.ledger.protocol import (
    Ledger,
    WritableLedger,
    require_known,
    require_ledger,
    state_of,
)
from fastfedul.ledger.reader import LedgerReader
from fastfedul.limits import Place, path_of, require_number, require_type, show
from fastfedul.methods.buffers import OLD_BUFFERS
from fastfedul.methods.fast_fedul.method import FastFedUL
from fastfedul.methods.protocol import (
    Method,
    UnlearnRequest,
    UnlearnResult,
    coverage_of,
    measured,
    method_settings,
)
from fastfedul.methods.registry import require_method
from fastfedul.notebook import facts_to_html
from fastfedul.params import norm
from fastfedul.records import ClientId, Model

Accept = Callable[[Model, Model], None]
"""Gets the models before and after; raises to leave the ledger as it is."""

Key = SigningKey | None | Literal["usual"]
"""Key that signs certificates: a key, none, or the key at the usual place."""

NOBODY_STAYS = (
    "nobody stays: the cleaned model rests on no client's training, so it is close to "
    "the first model"
)

_NAMES_SHOWN = 3
"""How many names of a long list a warning shows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forgetting:
    """A forgetting, done or previewed.

    Attributes:
        clients: Clients that the forgetting concerns.
        model: The cleaned model.
        result: Result of the method; None if the service only erased updates.
        rounds: Number of rounds with at least one of the clients.
        coverage: Kept part of the clients' share in the model, 0 to 1.
        coverage_by_client: Kept part of each client's share, 0 to 1.
        delta_norm: Length of the difference between the models.
        committed: Whether the ledger has changed.
        erased: Whether the ledger has lost the clients' updates.
        certificate: File of the certificate; None for a ledger in memory or a preview.
        signed: Whether the certificate is signed.
        given_up: Other clients whose sums the erasure gives up, because the erased
            updates cannot be taken out of them.
        warnings: Sentences that a reader should know.
        privacy: Noise of the rounds with and without the clients; None if the server
            never added noise.
    """

    clients: tuple[ClientId, ...]
    model: Model
    result: UnlearnResult | None = None
    rounds: int
    coverage: float
    coverage_by_client: dict[ClientId, float]
    delta_norm: float = 0.0
    committed: bool = False
    erased: bool = False
    certificate: Path | None = None
    signed: bool = False
    given_up: tuple[ClientId, ...] = ()
    warnings: tuple[str, ...] = ()
    privacy: Mapping[str, object] | None = None

    @property
    def seconds(self) -> float:
        """Time of the method; 0 if the service only erased updates."""
        return self.result.seconds if self.result else 0.0

    def __str__(self) -> str:
        verb = "erased" if self.result is None else "forgot"
        verb = verb if self.committed else "would forget"
        return f"{verb} {', '.join(self.clients)}"

    def _repr_html_(self) -> str:
        facts = {
            "clients": ", ".join(self.clients),
            "rounds taken part in": self.rounds,
            "kept of their share": f"{self.coverage:.1%}",
            "model moved by": f"{self.delta_norm:.4g}",
            "updates": "erased" if self.erased else "kept",
            "certificate": self.certificate or "none",
            **{f"warning {i + 1}": text for i, text in enumerate(self.warnings)},
        }
        done = "Forgotten" if self.committed else "Preview of forgetting"
        return facts_to_html(done, facts)


def preview(
    ledger: Ledger | Place,
    clients: Iterable[ClientId],
    method: Method | None = None,
    *,
    erase: bool = True,
    federation: Federation | None = None,
) -> Forgetting:
    """Return the forgetting of clients without doing it; nothing changes.

    Args:
        ledger: Any ledger, the path of one or of a run, or what `train` returned.
        clients: Clients to forget.
        method: The method with its settings; None for Fast-FedUL.
        erase: Whether the forgetting would erase the clients' updates too.
        federation: The federation, for a method that needs its clients' help.

    Raises:
        AlreadyForgottenError: If the clients were forgotten before.
        UnlearnRefusedError: If the method refuses.
    """
    require_type("erase", erase, bool, "True or False")
    with ledger_at(ledger, LedgerReader) as opened:
        names = checked_names(opened, clients)
        _require_active(opened, names)
        method = usual_method(method)
        return _computed(opened, names, method, federation, erase=erase)


def forget(
    ledger: WritableLedger | Place,
    clients: Iterable[ClientId],
    method: Method | None = None,
    *,
    erase: bool = True,
    federation: Federation | None = None,
    key: Key = "usual",
    certificates: Path | str | None = None,
    accept: Accept | None = None,
    request: int | None = None,
    audit: Path | str | None = None,
) -> Forgetting:
    """Return the forgetting of clients, done for good; later rounds refuse them.

    One transaction gives the ledger the cleaned model, erases the clients' updates and
    closes the requests that wait for these clients. Then the service replaces the run's
    model file and writes the certificate. If the clients were forgotten before and the
    ledger kept their updates, this call erases the updates.

    Args:
        ledger: A ledger open for writing; or the path of a run or ledger, or what
            `train` returned, which is opened for the time of the call.
        clients: Clients to forget.
        method: The method with its settings; None for Fast-FedUL.
        erase: Whether to erase the clients' updates too; else the ledger keeps them.
        federation: The federation, for a method that needs its clients' help.
        key: Key that signs the certificate.
        certificates: Folder of the certificates; None for the usual folder.
        accept: Gets the models before and after; raises to refuse the forgetting.
        request: Number of the request that the forgetting answers.
        audit: File of an audit of this client and method; the certificate has its
            digest.

    Raises:
        AlreadyForgottenError: If the clients were forgotten and nothing is left to do.
        InvalidInputError: If the audit is another client's, ledger's or method's.
        UnlearnRefusedError: If the method refuses; nothing has changed then.
    """
    method = usual_method(method)
    require_type("erase", erase, bool, "True or False")
    require_accept(accept)
    require_number("number of a request", request, least=1, whole=True, unset=True)
    with ledger_at(ledger, DiskLedger) as opened:
        files = LedgerFiles.of(opened, key, certificates)
        names = checked_names(opened, clients)
        files.follow()
        if audit is not None:
            _require_audit_in_time(opened, names, path_of(audit))
        if erase and (held := _held(opened, names)):
            return _erased(opened, held, files)
        _require_active(opened, names)
        about = _audited(opened, names, method, audit)
        computed_at = state_of(opened)
        found = _computed(opened, names, method, federation, erase=erase)
        if accept is not None:
            accept(opened.final, found.model)
        result = found.result
        assert result is not None
        # A method without a difference costs one more reading of the current model.
        change = result.change(opened.final) if result.delta is None else result.delta
        opened.commit_forgetting(
            names,
            change.flat,
            {**describe(method, found), **about},
            erase=erase,
            model=found.model,
            request=request,
            computed_at=computed_at,
        )
        return _committed(opened, found, files, erased=erase)


def erase(
    ledger: WritableLedger | Place,
    clients: Iterable[ClientId],
    *,
    key: Key = "usual",
    certificates: Path | str | None = None,
) -> Forgetting:
    """Return the erasure of forgotten clients' updates, done; the model stays.

    Args:
        ledger: A ledger open for writing; or the path of a run or ledger, or what
            `train` returned, which is opened for the time of the call.
        clients: Forgotten clients whose updates the ledger kept.
        key: Key that signs the certificate.
        certificates: Folder of the certificates; None for the usual folder.
    """
    with ledger_at(ledger, DiskLedger) as opened:
        files = LedgerFiles.of(opened, key, certificates)
        names = checked_names(opened, clients)
        files.follow()
        return _erased(opened, names, files)


def _audited(
    ledger: WritableLedger,
    names: Sequence[ClientId],
    method: Method,
    audit: Path | str | None,
) -> dict[str, object]:
    """Return the digests of an audit for the ledger's log."""
    if audit is None:
        return {}
    if not isinstance(ledger, DiskLedger):
        raise InvalidInputError(
            "a ledger in memory has no certificate that an audit could be attached to"
        )
    return {"audit": checked_audit(path_of(audit), ledger, names, method)}


def _require_audit_in_time(
    ledger: WritableLedger, names: Sequence[ClientId], audit: Path
) -> None:
    """Raise if a client was forgotten before, and without this audit.

    With the audit, the command is a repeated one, and its certificate has the digest.
    """
    known = ledger.clients()
    late = [name for name in names if known[name].state != "active"]
    if not late or not isinstance(ledger, DiskLedger):
        return
    digests = audit_digests(audit)
    logged = (one for one in ledger.events() if set(late) & set(one.clients))
    if all(one.details.get("audit") != digests for one in logged):
        raise InvalidInputError(
            f"client {late[0]!r:.80} was forgotten before without this audit, and its "
            "certificate does not change; leave out --audit"
        )


def describe(method: Method, found: Forgetting) -> dict[str, object]:
    """Return the entry of the ledger's log for a forgetting, as JSON values.

    The entry is enough to write the certificate, even for another process after a
    crash. Coverages follow the order of the clients; the entry does not name them.
    """
    assert found.result is not None
    return {
        "software": _versions(),
        "method": method.name,
        "settings": {**method_settings(method), **found.result.settings},
        "rounds": found.rounds,
        "coverage": found.coverage,
        "coverages": [found.coverage_by_client[name] for name in found.clients],
        "delta_norm": found.delta_norm,
        **found.result.evidence(),
        **({} if found.privacy is None else {"privacy": found.privacy}),
    }


def usual_method(method: Method | None) -> Method:
    """Return the given method, or Fast-FedUL for None.

    Raises:
        InvalidInputError: If the given object is no method.
    """
    return FastFedUL() if method is None else require_method(method)


def require_accept(accept: object) -> None:
    """Raise unless a caller's own check can be called."""
    if accept is not None and not callable(accept):
        raise InvalidInputError(
            f"accept is a function of two models, not {show(accept)}"
        )


def checked_names(ledger: Ledger, clients: Iterable[ClientId]) -> tuple[ClientId, ...]:
    """Return the names of known clients, sorted, none twice.

    Raises:
        InvalidInputError: If the caller gives no list of names, or an empty one.
        UnknownClientError: If the ledger never saw a client.
    """
    require_ledger(ledger)
    if isinstance(clients, str):
        raise InvalidInputError(
            f"{show(clients)} is one name, and a list of names is wanted: "
            f"[{show(clients)}]"
        )
    try:
        given = list(clients)
    except TypeError:
        raise InvalidInputError(
            f"clients are a list of names, not {show(clients)}"
        ) from None
    for name in given:
        check_name(name)
    names = tuple(sorted(set(given)))
    if not names:
        raise InvalidInputError("name at least one client")
    require_known(ledger, names)
    return names


@dataclass(frozen=True, slots=True)
class LedgerFiles:
    """The files beside a ledger; a ledger in memory has none.

    Attributes:
        ledger: The ledger on disk; None for a ledger in memory.
        key: Key that signs certificates, if there is one.
        certificates: Folder of the certificates.
    """

    ledger: DiskLedger | None
    key: SigningKey | None
    certificates: Path

    @classmethod
    def of(
        cls, ledger: WritableLedger, key: Key, certificates: Path | str | None
    ) -> LedgerFiles:
        """Return the files beside a ledger that is open for writing.

        Raises:
            InvalidInputError: If an argument is of a wrong type.
        """
        require_ledger(ledger, writable=True)
        if not (key is None or hasattr(key, "sign") or isinstance(key, str)):
            raise InvalidInputError(f"a key is a SigningKey or None, not {show(key)}")
        if isinstance(key, str) and key != "usual":
            raise InvalidInputError(
                "a key is no text; read a key file with fastfedul.forgetting.signing"
            )
        folder = None if certificates is None else path_of(certificates)
        if not isinstance(ledger, DiskLedger):
            return cls(None, None, Path())
        used = find_key() if key == "usual" else key
        return cls(ledger, used, folder or certificates_folder(ledger.path))

    def follow(self) -> Path | None:
        """Bring the files up to date; return the newest certificate, if any."""
        if self.ledger is None:
            return None
        bring_up_to_date(self.ledger, self.key, self.certificates)
        log = self.ledger.log()
        return certificate_path(self.certificates, log[-1]) if log else None


def _computed(
    ledger: Ledger,
    names: tuple[ClientId, ...],
    method: Method,
    federation: Federation | None,
    *,
    erase: bool,
) -> Forgetting:
    """Return a method's answer, with the ledger's facts about the clients."""
    if federation is not None:
        require_type("the federation", federation, Federation, "a Federation")
    request = UnlearnRequest(ledger, frozenset(names), federation)
    result = measured(method, request)
    # Read after the call, so that it takes no memory while the method works.
    current = ledger.final
    privacy = privacy_facts(ledger, names)
    found = _described(ledger, names, result.model(current), erase=erase)
    return replace(
        found,
        result=result,
        delta_norm=norm(result.change(current).flat),
        warnings=(
            *lookalike_warnings(names, ledger.clients()),
            *(() if request.stayers else (NOBODY_STAYS,)),
            *result.warnings,
            *((OLD_BUFFERS,) if current.buffers and result.buffers is None else ()),
            *privacy_warning(privacy),
            *found.warnings,
        ),
        privacy=privacy,
    )


def _described(
    ledger: Ledger, names: tuple[ClientId, ...], model: Model, *, erase: bool
) -> Forgetting:
    """Return the ledger's facts about the clients, as of a forgetting to be done."""
    given_up: tuple[ClientId, ...] = ()
    if erase and isinstance(ledger, LedgerReader):
        given_up = given_up_by_erasing(ledger, names)
    updates = {name: ledger.updates_of(name) for name in names}
    together = [update for own in updates.values() for update in own]
    return Forgetting(
        clients=names,
        model=model,
        rounds=len({update.round for update in together}),
        coverage=coverage_of(together),
        coverage_by_client={name: coverage_of(own) for name, own in updates.items()},
        given_up=given_up,
        warnings=(given_up_warning(given_up),) if given_up else (),
    )


def given_up_warning(clients: Sequence[ClientId]) -> str:
    """Return a warning about clients whose sums an erasure gives up."""
    shown = ", ".join(f"{name!r:.80}" for name in clients[:_NAMES_SHOWN])
    more = ", ..." if clients[_NAMES_SHOWN:] else ""
    several = len(clients) > 1
    return (
        f"the erasure gives up the sum{'s' if several else ''} of {len(clients):,} "
        f"other client{'s' if several else ''} ({shown}{more}): it cannot take the "
        "erased updates out of them, so what these clients sent until now can "
        "afterwards be forgotten only by retraining; --keep-history keeps the sums, "
        "and a ledger of rounds, or of sums:K with K above the rounds of a client, "
        "avoids it"
    )


def _erased(
    ledger: WritableLedger, names: tuple[ClientId, ...], files: LedgerFiles
) -> Forgetting:
    found = _described(ledger, names, ledger.final, erase=True)
    ledger.commit_erasure(names, {"software": _versions()})
    return _committed(ledger, found, files, erased=True)


def _committed(
    ledger: WritableLedger, found: Forgetting, files: LedgerFiles, *, erased: bool
) -> Forgetting:
    """Return a committed forgetting, after the files beside the ledger followed."""
    certificate = files.follow()
    # An erasure sets the state of the server optimizer anew.
    anew = erased and ledger.settings.optimizer is not None
    return replace(
        found,
        model=ledger.final if anew else found.model,
        committed=True,
        erased=erased,
        certificate=certificate,
        signed=certificate is not None and files.key is not None,
    )


def _held(ledger: Ledger, names: Sequence[ClientId]) -> tuple[ClientId, ...]:
    """Return whose updates a repeated call erases; nobody's if a client is active."""
    known = ledger.clients()
    if any(known[name].state == "active" for name in names):
        return ()
    return tuple(name for name in names if known[name].state == "forgotten")


def _require_active(ledger: Ledger, names: Sequence[ClientId]) -> None:
    """Raise unless all these clients are still in the model."""
    known = ledger.clients()
    late = [name for name in names if known[name].state != "active"]
    if not late:
        return
    state = known[late[0]].state
    if len(late) < len(names):
        raise InvalidInputError(
            f"client {late[0]!r:.80} was forgotten before and others were not; name "
            "only active clients"
        )
    how = "erased" if state == "erased" else "kept"
    raise AlreadyForgottenError(
        f"client {late[0]!r:.80} was forgotten already, and its updates were {how}"
    )


def _versions() -> dict[str, Any]:
    return {
        "fastfedul": version("fastfedul"),
        "numpy": version("numpy"),
        "python": platform.python_version(),
    }
