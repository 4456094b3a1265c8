"""Forgets clients for good: one way for Python, commands, requests and Flower.

A forgetting is computed, committed to the ledger in one transaction, and then the
files beside the ledger follow: the run's model file and the certificate. If a crash
comes between, the next call lets them follow.
"""

from __future__ import annotations

import html
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from fastfedul.errors import AlreadyForgottenError, InvalidInputError
from fastfedul.federation.clients import Federation
from fastfedul.forgetting.certificates import certificate_path, certificates_folder
from fastfedul.forgetting.folder import bring_up_to_date
from fastfedul.forgetting.signing import SigningKey, find_key
from fastfedul.ledger.checks import check_name
from fastfedul.ledger.disk import DiskLedger
from fastfedul.ledger.lookalikes import lookalike_warnings
from fastfedul.ledger.protocol import Ledger, WritableLedger, require_known, state_of
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
from fastfedul.params import norm
from fastfedul.records import ClientId, Model

Accept = Callable[[Model, Model], None]
"""Called with the model before and after; raises to keep the ledger as it is."""

Key = SigningKey | None | Literal["usual"]
"""Signs certificates: a key, none, or the key of the usual place if there is one."""

NOBODY_STAYS = (
    "nobody stays: without these clients no client is left whose training the model "
    "could rest on, so it is close to the first model"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forgetting:
    """Result of forgetting, done or previewed.

    Attributes:
        clients: Clients that were forgotten, or would be.
        model: The cleaned model.
        result: Result of the method; None if updates were only erased.
        rounds: Rounds in which any of them took part.
        coverage: Part of their share in the model whose updates were kept, 0 to 1.
        coverage_by_client: The same for each client.
        delta_norm: Length of the difference between the models.
        committed: Whether the ledger was changed.
        erased: Whether the clients' updates were erased from the ledger.
        certificate: File of the certificate; None for a ledger in memory or a preview.
        signed: Whether the certificate is signed.
        warnings: Sentences that a reader should know.
    """

    clients: tuple[ClientId, ...]
    model: Model
    result: UnlearnResult | None
    rounds: int
    coverage: float
    coverage_by_client: dict[ClientId, float]
    delta_norm: float
    committed: bool
    erased: bool
    certificate: Path | None
    signed: bool
    warnings: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Time that the method took; 0 if updates were only erased."""
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
            "history": "erased" if self.erased else "kept",
            "certificate": self.certificate or "none",
            **{f"warning {i + 1}": text for i, text in enumerate(self.warnings)},
        }
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
            for name, value in facts.items()
        )
        done = "Forgotten" if self.committed else "Preview of forgetting"
        return f"<table><caption>{done}</caption>{rows}</table>"


def preview(
    ledger: Ledger,
    clients: Iterable[ClientId],
    method: Method | None = None,
    *,
    federation: Federation | None = None,
) -> Forgetting:
    """Return the forgetting of clients as it would be; nothing changes.

    Args:
        ledger: Any ledger.
        clients: Clients to forget.
        method: The method with its settings; None for Fast-FedUL.
        federation: The clients, for a method that needs their help.
    """
    names = checked_names(ledger, clients)
    _require_active(ledger, names)
    return _computed(ledger, names, method or FastFedUL(), federation)


def forget(
    ledger: WritableLedger,
    clients: Iterable[ClientId],
    method: Method | None = None,
    *,
    erase: bool = True,
    federation: Federation | None = None,
    key: Key = "usual",
    certificates: Path | None = None,
    accept: Accept | None = None,
    request: int | None = None,
) -> Forgetting:
    """Take clients out of the model and the ledger, and bar them from later rounds.

    In one transaction the cleaned model becomes the ledger's, the clients' updates are
    erased, and requests that wait for them are applied. Then the run's model file is
    replaced and the certificate written. If the clients were forgotten before and
    their updates were kept, the updates are erased now.

    Args:
        ledger: A ledger open for writing.
        clients: Clients to forget.
        method: The method with its settings; None for Fast-FedUL.
        erase: Whether to erase the clients' updates too; else the ledger keeps them.
        federation: The clients, for a method that needs their help.
        key: Signs the certificate.
        certificates: Folder of the certificates; None for the usual one.
        accept: Called with the models before and after; it raises to refuse.
        request: Number of the request that this answers.

    Raises:
        AlreadyForgottenError: If they were forgotten, and erased if that is asked for.
        UnlearnRefusedError: If the method refuses; nothing has changed then.
    """
    method = require_method(method or FastFedUL())
    files = _Files.of(ledger, key, certificates)
    files.follow()
    names = checked_names(ledger, clients)
    if erase and _all_forgotten(ledger, names):
        return _erased(ledger, names, files)
    _require_active(ledger, names)
    computed_at = state_of(ledger)
    found = _computed(ledger, names, method, federation)
    if accept is not None:
        accept(ledger.final, found.model)
    result = found.result
    assert result is not None
    # The current model is read for a method that gives no difference, and only then.
    change = result.change(ledger.final) if result.delta is None else result.delta
    ledger.commit_forgetting(
        names,
        change.flat,
        describe(method, found),
        erase=erase,
        model=found.model,
        request=request,
        computed_at=computed_at,
    )
    return _committed(found, files.follow(), erased=erase)


def erase(
    ledger: WritableLedger,
    clients: Iterable[ClientId],
    *,
    key: Key = "usual",
    certificates: Path | None = None,
) -> Forgetting:
    """Erase the updates of clients that were forgotten before; the model stays.

    Args:
        ledger: A ledger open for writing.
        clients: Clients that were forgotten while their updates were kept.
        key: Signs the certificate.
        certificates: Folder of the certificates; None for the usual one.
    """
    files = _Files.of(ledger, key, certificates)
    files.follow()
    return _erased(ledger, checked_names(ledger, clients), files)


def describe(method: Method, found: Forgetting) -> dict[str, object]:
    """Return the entry of the ledger's log for a forgetting, as JSON values.

    A certificate is made from this alone, also by another process after a crash.
    Coverages are in the order of the clients, whose names stand elsewhere.
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
    }


def checked_names(ledger: Ledger, clients: Iterable[ClientId]) -> tuple[ClientId, ...]:
    """Return the names of known clients, sorted, none twice.

    Raises:
        InvalidInputError: If it is no list of names, or nobody is named.
        UnknownClientError: If the ledger never saw a client.
    """
    if isinstance(clients, str):
        raise InvalidInputError(
            f"{clients!r:.80} is one name, and a list of names is wanted: "
            f"[{clients!r:.80}]"
        )
    if not isinstance(clients, Iterable):
        raise InvalidInputError(f"clients are a list of names, not {clients!r:.80}")
    given = list(clients)
    for name in given:
        check_name(name)
    names = tuple(sorted(set(given)))
    if not names:
        raise InvalidInputError("name at least one client")
    require_known(ledger, names)
    return names


@dataclass(frozen=True, slots=True)
class _Files:
    """The files beside a ledger, if it is one on disk.

    Attributes:
        ledger: The ledger on disk; None for one in memory.
        key: Signs certificates, if there is one.
        certificates: Folder of the certificates.
    """

    ledger: DiskLedger | None
    key: SigningKey | None
    certificates: Path

    @classmethod
    def of(cls, ledger: WritableLedger, key: Key, certificates: Path | None) -> _Files:
        if not isinstance(ledger, DiskLedger):
            return cls(None, None, Path())
        used = find_key() if key == "usual" else key
        folder = certificates or certificates_folder(ledger.path)
        return cls(ledger, used, folder)

    def follow(self) -> tuple[Path, bool] | None:
        """Bring the files up to date; return the newest certificate, if there is one.

        With it comes whether it is signed.
        """
        if self.ledger is None:
            return None
        log = self.ledger.log()
        if not log:
            return None
        bring_up_to_date(self.ledger, self.key, self.certificates)
        return certificate_path(self.certificates, log[-1]), self.key is not None


def _computed(
    ledger: Ledger,
    names: tuple[ClientId, ...],
    method: Method,
    federation: Federation | None,
) -> Forgetting:
    """Return the answer of a method, with the ledger's facts about the clients."""
    request = UnlearnRequest(ledger, frozenset(names), federation)
    result = measured(require_method(method), request)
    # Read after the call, so that it takes no memory while the method works.
    current = ledger.final
    model = result.model(current)
    updates = {name: ledger.updates_of(name) for name in names}
    together = [update for own in updates.values() for update in own]
    warnings = result.warnings if request.stayers else (NOBODY_STAYS, *result.warnings)
    warnings = (*lookalike_warnings(names, ledger.clients()), *warnings)
    return Forgetting(
        clients=names,
        model=model,
        result=result,
        rounds=len({update.round for update in together}),
        coverage=coverage_of(together),
        coverage_by_client={name: coverage_of(own) for name, own in updates.items()},
        delta_norm=norm(result.change(current).flat),
        committed=False,
        erased=False,
        certificate=None,
        signed=False,
        warnings=warnings,
    )


def _erased(
    ledger: WritableLedger, names: tuple[ClientId, ...], files: _Files
) -> Forgetting:
    updates = {name: ledger.updates_of(name) for name in names}
    together = [update for own in updates.values() for update in own]
    found = Forgetting(
        clients=names,
        model=ledger.final,
        result=None,
        rounds=len({update.round for update in together}),
        coverage=coverage_of(together),
        coverage_by_client={name: coverage_of(own) for name, own in updates.items()},
        delta_norm=0.0,
        committed=False,
        erased=False,
        certificate=None,
        signed=False,
        warnings=(),
    )
    ledger.commit_erasure(names, {"software": _versions()})
    return _committed(found, files.follow(), erased=True)


def _committed(
    found: Forgetting, certificate: tuple[Path, bool] | None, *, erased: bool
) -> Forgetting:
    path, signed = certificate or (None, False)
    return replace(
        found, committed=True, erased=erased, certificate=path, signed=signed
    )


def _all_forgotten(ledger: Ledger, names: Sequence[ClientId]) -> bool:
    """Return whether all of these were forgotten and none of them was erased."""
    known = ledger.clients()
    return all(known[name].state == "forgotten" for name in names)


def _require_active(ledger: Ledger, names: Sequence[ClientId]) -> None:
    """Raise unless all of these can be forgotten now."""
    known = ledger.clients()
    late = [name for name in names if known[name].state != "active"]
    if not late:
        return
    state = known[late[0]].state
    if len(late) < len(names):
        raise InvalidInputError(
            f"client {late[0]!r:.80} was forgotten before and others were not; name "
            "only clients that are still there"
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
