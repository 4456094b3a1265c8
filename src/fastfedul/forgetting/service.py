"""Forgets clients for good: computes the cleaned model and commits it."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

from fastfedul.errors import InvalidInputError, UnlearnRefusedError
from fastfedul.ledger.protocol import WritableLedger, require_known
from fastfedul.ledger.recording import check_name
from fastfedul.methods.fast_fedul.method import FastFedUL
from fastfedul.methods.fast_fedul.removal import Removal, coverage_of
from fastfedul.methods.fast_fedul.skews import skew_of
from fastfedul.methods.protocol import UnlearnRequest
from fastfedul.params import norm
from fastfedul.records import ClientId


def forget(
    ledger: WritableLedger,
    clients: Iterable[ClientId],
    method: FastFedUL | None = None,
    *,
    erase: bool = False,
) -> Removal:
    """Take clients out of the ledger's model and bar them from later rounds.

    Args:
        ledger: A ledger open for writing.
        clients: Whom to forget.
        method: The method with its settings.
        erase: Also rewrite the history as if they had never been there and remove
            their updates; in one step with the forgetting, or not at all.
    """
    names = _checked(ledger, clients)
    method = method or FastFedUL()
    result = method(UnlearnRequest(ledger, frozenset(names)))
    commit(ledger, method, result, erase=erase)
    return result


def forget_as_planned(ledger: WritableLedger, client: ClientId) -> None:
    """Forget a client that a run's options name.

    Raises:
        UnlearnRefusedError: If the method refuses, with its reason. If too little of
            the client was kept, the error also says how the run can go on.
    """
    method = FastFedUL()
    try:
        forget(ledger, [client], method)
    except UnlearnRefusedError as error:
        advice = ""
        if coverage_of(ledger.updates_of(client)) < method.minimum_coverage:
            advice = (
                ": forget it with `fastfedul forget` and --minimum-coverage 0, then go "
                "on with --resume"
            )
        raise UnlearnRefusedError(
            f"{client!r:.80} was to be forgotten now: {error}; the rounds so far are "
            f"recorded{advice}"
        ) from None


def commit(
    ledger: WritableLedger, method: FastFedUL, result: Removal, *, erase: bool
) -> None:
    """Make a result the ledger's current model and bar its clients."""
    ledger.commit_forgetting(
        result.clients, result.delta.flat, describe(method, result), erase=erase
    )


def erase(ledger: WritableLedger, clients: Iterable[ClientId]) -> tuple[ClientId, ...]:
    """Erase the history of clients that were forgotten before; the model stays."""
    names = _checked(ledger, clients)
    ledger.commit_erasure(names, {"software": _versions()})
    return names


def describe(method: FastFedUL, result: Removal) -> dict[str, object]:
    """Return what the ledger's log keeps of a forgetting, as JSON values.

    A certificate is made from this alone, also by another process after a crash.
    Coverages are in the order of the clients, whose names stand elsewhere.
    """
    return {
        "software": _versions(),
        "method": "fast-fedul",
        **settings_of(result),
        "minimum_coverage": method.minimum_coverage,
        "rounds": result.rounds,
        "coverage": result.coverage,
        "coverages": [result.coverage_by_client[name] for name in result.clients],
        "delta_norm": _finite(norm(result.delta.flat)),
        "standard_error": _finite(result.standard_error),
        "bound": _finite(result.bound.value),
        "lipschitz": _finite(result.bound.lipschitz),
        "bound_source": result.bound.source,
    }


SETTINGS = ("skew", "damping", "damped", "updates")
"""Settings of the skew, of those the log has."""


def settings_of(result: Removal) -> dict[str, object]:
    """Return the skew with its settings, and what it saw, as JSON values."""
    found: dict[str, object] = {"skew": result.skew.name, **result.skew.settings()}
    reaction = result.reaction
    if reaction is not None:
        found["used"] = {
            "updates": reaction.num_updates,
            "directions": reaction.num_directions,
            "scale": _finite(reaction.scale),
            "rounds_of_unknown_training": reaction.num_unknown,
        }
    return found


def method_of(details: Mapping[str, Any]) -> FastFedUL:
    """Return the method with the settings that an entry of the log has."""
    return FastFedUL(skew=skew_of(details), minimum_coverage=0.0)


def _finite(value: float | None) -> float | None:
    """Return a number that JSON can hold."""
    return value if value is not None and math.isfinite(value) else None


def _versions() -> dict[str, str]:
    return {
        "fastfedul": version("fastfedul"),
        "numpy": version("numpy"),
        "python": platform.python_version(),
    }


def _checked(
    ledger: WritableLedger, clients: Iterable[ClientId]
) -> tuple[ClientId, ...]:
    if isinstance(clients, str):
        raise InvalidInputError(
            f"{clients!r:.80} is one name, and a list of names is wanted: "
            f"[{clients!r:.80}]"
        )
    given = list(clients)
    for name in given:
        check_name(name)
    names = tuple(sorted(set(given)))
    if not names:
        raise InvalidInputError("name at least one client")
    require_known(ledger, names)
    return names
