"""What a method of unlearning is given, what it needs, and what it gives back."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from fastfedul.errors import InvalidInputError, UnlearnRefusedError
from fastfedul.federation.clients import Federation
from fastfedul.ledger.protocol import Ledger
from fastfedul.ledger.views import CountedLedger
from fastfedul.params import Array, Params
from fastfedul.records import ClientId, Model

OLD_BUFFERS = (
    "the buffers, such as batch-norm statistics, are those of the current model, which "
    "the forgotten clients helped to make"
)
"""The warning of methods that leave the buffers as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a method cannot do without.

    Attributes:
        history: Stored updates of the clients.
        target: The help of the clients to forget, with their data.
        others: The help of the clients that stay, with their data.
        server_data: Clean images of the server's own.
    """

    history: bool = False
    target: bool = False
    others: bool = False
    server_data: bool = False


@dataclass(frozen=True, slots=True)
class UnlearnRequest:
    """Whom to forget, from which history, and with whose help.

    Attributes:
        ledger: The history.
        forget: Whom to forget.
        federation: The clients, where they can still be asked.
    """

    ledger: Ledger
    forget: frozenset[ClientId]
    federation: Federation | None = None

    @property
    def stayers(self) -> tuple[ClientId, ...]:
        """Clients of the history that are there now and are not to be forgotten."""
        return tuple(
            name
            for name, entry in sorted(self.ledger.clients().items())
            if entry.state == "active" and name not in self.forget
        )

    @property
    def gone(self) -> frozenset[ClientId]:
        """Everybody who is left out: those of the request, and who left before."""
        clients = self.ledger.clients().items()
        return self.forget | {n for n, entry in clients if entry.state != "active"}


@dataclass(frozen=True, slots=True, kw_only=True)
class UnlearnResult:
    """The cleaned model, and what it took to get it.

    Attributes:
        params: The cleaned model.
        clients: Who was forgotten.
        buffers: Its buffers, if they are not those of the current model.
        seconds: Time taken.
        bytes_read: Bytes of history read.
        client_calls: Times a client had to compute something.
        warnings: What a reader of the result should know.
    """

    params: Params
    clients: tuple[ClientId, ...]
    buffers: Mapping[str, Array] | None = None
    seconds: float = 0.0
    bytes_read: int = 0
    client_calls: int = 0
    warnings: tuple[str, ...] = field(default=())

    def model(self, current: Model) -> Model:
        """Return the cleaned model, with buffers of the current one if it has none."""
        buffers = current.buffers if self.buffers is None else self.buffers
        return Model(self.params, buffers)


class Unlearner(Protocol):
    """A method: hyperparameters that can be called."""

    @property
    def needs(self) -> Needs:
        """What it cannot do without."""

    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        """Return the model without the forgotten clients."""


def measured(method: Unlearner, request: UnlearnRequest) -> UnlearnResult:
    """Call a method; time, client calls and bytes are counted alike for all."""
    counted = CountedLedger(request.ledger)
    clients = request.federation.clients if request.federation else None
    calls = clients.calls if clients else 0
    started = time.perf_counter()
    result = method(replace(request, ledger=counted))
    return replace(
        result,
        seconds=time.perf_counter() - started,
        bytes_read=counted.bytes_read,
        client_calls=clients.calls - calls if clients else 0,
    )


def require_rounds_for(name: str, ledger: Ledger) -> None:
    """Raise unless a ledger has the updates of rounds, which a method needs.

    Raises:
        UnlearnRefusedError: If the ledger keeps sums.
    """
    if ledger.settings.history == "sums":
        raise UnlearnRefusedError(
            f"{name} needs the updates of rounds, and this ledger keeps sums per "
            "client; forget with fast-fedul (skew kronecker), or record with --keep all"
        )


def federation_of(request: UnlearnRequest, name: str, needs: Needs) -> Federation:
    """Return the federation that a method needs.

    Raises:
        UnlearnRefusedError: If what it needs is not there.
        InvalidInputError: If a client to forget is not part of it.
    """
    if needs.history:
        require_rounds_for(name, request.ledger)
    federation = request.federation
    if federation is None:
        raise UnlearnRefusedError(
            f"{name} needs the help of {_helpers(needs)}, which a ledger alone cannot "
            "give; use it through `fastfedul compare` on a run, or pass a federation"
        )
    strangers = sorted(request.forget - set(federation.clients.data))
    if strangers:
        raise InvalidInputError(
            f"client {strangers[0]!r:.80} is not in this federation"
        )
    if needs.others and not request.stayers:
        raise UnlearnRefusedError(f"{name} needs other clients, and nobody stays")
    if needs.server_data and not len(federation.server):
        raise UnlearnRefusedError(
            f"{name} needs clean images of the server's own, and there are none; "
            "train with --server-images 500 or so"
        )
    return federation


def _helpers(needs: Needs) -> str:
    asked = {
        "the client to forget": needs.target,
        "the other clients": needs.others,
        "the server's own images": needs.server_data,
    }
    return " and ".join(name for name, wanted in asked.items() if wanted)
