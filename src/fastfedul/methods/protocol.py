"""What a method is given, what it needs, and what it gives back.

`Method` is all that a package of your own has to offer; its docstring holds a whole
one. docs/methods.md says how it is found by the command line.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from fastfedul.errors import InvalidInputError, UnlearnRefusedError
from fastfedul.federation.clients import Federation
from fastfedul.ledger.protocol import Ledger
from fastfedul.ledger.views import CountedLedger
from fastfedul.params import Array, Params, subtract
from fastfedul.records import ClientId, Model, UpdateEntry

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
        params: Parameters of the cleaned model.
        clients: Clients that the method forgot.
        buffers: Buffers of the cleaned model; None for those of the current model.
        delta: Cleaned minus current parameters, where the method has them more exactly
            than the subtraction gives them; None for the subtraction.
        settings: Settings that the call filled in, as JSON values.
        seconds: Time taken.
        bytes_read: Bytes of history read.
        client_calls: Times a client had to compute something.
        warnings: What a reader of the result should know.
    """

    params: Params
    clients: tuple[ClientId, ...]
    buffers: Mapping[str, Array] | None = None
    delta: Params | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    seconds: float = 0.0
    bytes_read: int = 0
    client_calls: int = 0
    warnings: tuple[str, ...] = field(default=())

    def model(self, current: Model) -> Model:
        """Return the cleaned model, with buffers of the current one if it has none."""
        buffers = current.buffers if self.buffers is None else self.buffers
        return Model(self.params, buffers)

    def change(self, current: Model) -> Params:
        """Return cleaned minus current parameters."""
        if self.delta is not None:
            return self.delta
        return subtract(self.params, current.params)

    def evidence(self) -> dict[str, object]:
        """Return what the log and the certificate keep of this result, as JSON values.

        A key may be `standard_error`, `bound`, `lipschitz` or `bound_source`, which a
        certificate shows in places of their own.
        """
        return {}


class Method(Protocol):
    """A way to forget clients: settings that can be called.

    A method that leaves the model as it is, whoever is forgotten:

    >>> from dataclasses import dataclass
    >>> from typing import ClassVar
    >>> @dataclass(frozen=True)
    ... class DoNothing:
    ...     '''Leaves the model as it is.'''
    ...
    ...     name: ClassVar[str] = "do-nothing"
    ...     needs: ClassVar[Needs] = Needs()
    ...
    ...     def __call__(self, request: UnlearnRequest) -> UnlearnResult:
    ...         return UnlearnResult(
    ...             params=request.ledger.final.params,
    ...             clients=tuple(sorted(request.forget)),
    ...         )
    >>> from fastfedul.testing import check_method
    >>> check_method(DoNothing)
    >>> method_settings(DoNothing()), method_note(DoNothing)
    ({}, 'Leaves the model as it is.')

    Besides these three a method may have:

    - fields of a dataclass: its settings, which `--set NAME=VALUE` gives and the
      certificate names. Their values are JSON values.
    - `defaults(facts: RunFacts) -> dict`: a class method that returns settings which
      only a run can tell.
    - `kept_bytes(ledger) -> int`: bytes of history that a server must store so that
      the method can forget any client.
    - `check(ledger)`: raises InvalidInputError if the method could forget nobody from
      such a ledger.
    - `caveat`: a sentence that is shown below every table with the method.
    - `is_retraining`: True for a method that gives the retrained model itself.

    The first line of the docstring is the note that lists of methods show.
    """

    @property
    def name(self) -> str:
        """Name of the method in tables, logs and certificates."""

    @property
    def needs(self) -> Needs:
        """What the method cannot do without."""

    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        """Return the model without the forgotten clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a run can tell a method about itself.

    Attributes:
        target_label: Class that the attackers want; None without an attack.
    """

    target_label: int | None = None


def method_settings(method: Method) -> dict[str, object]:
    """Return the settings of a method as JSON values."""
    own = getattr(method, "settings", None)
    if callable(own):
        return dict(own())
    if not dataclasses.is_dataclass(method):
        return {}
    return {
        field.name: getattr(method, field.name)
        for field in dataclasses.fields(method)
        if field.compare and field.name not in ("name", "needs")
    }


def method_note(make: object) -> str:
    """Return the first line of a method's docstring."""
    return (getattr(make, "__doc__", None) or "").strip().partition("\n")[0]


def bytes_to_keep(method: Method, ledger: Ledger) -> int:
    """Return the bytes of history that a server must store for a method; 0 for none."""
    own = getattr(method, "kept_bytes", None)
    return int(own(ledger)) if callable(own) else 0


def needs_help(method: Method) -> bool:
    """Return whether a method needs more than the history."""
    needs = method.needs
    return needs.target or needs.others or needs.server_data


def coverage_of(updates: Sequence[UpdateEntry]) -> float:
    """Return the part of the share that went into the model whose update was kept."""
    entered = math.fsum(u.share for u in updates if u.entered)
    kept = math.fsum(u.share for u in updates if u.entered and (u.kept or u.summed))
    return kept / entered if entered else 1.0


def measured(method: Method, request: UnlearnRequest) -> UnlearnResult:
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


def require_usable(
    method: Method, ledger: Ledger, federation: Federation | None
) -> None:
    """Raise if a method could forget nobody from a ledger, whoever is asked for.

    Raises:
        InvalidInputError: If it could not, with what to use in its place.
    """
    if needs_help(method) and federation is None:
        raise InvalidInputError(
            f"{method.name} needs the help of {_helpers(method.needs)}, which nobody "
            "gives here; use a method that needs the history alone, as fast-fedul"
        )
    check = getattr(method, "check", None)
    if callable(check):
        check(ledger)


def federation_of(request: UnlearnRequest, method: Method) -> Federation:
    """Return the federation that a method needs.

    Raises:
        UnlearnRefusedError: If what it needs is not there.
        InvalidInputError: If a client to forget is not part of it.
    """
    name, needs = method.name, method.needs
    if needs.history:
        require_rounds_for(name, request.ledger)
    federation = request.federation
    if federation is None:
        raise UnlearnRefusedError(
            f"{name} needs the help of {_helpers(needs)}, which a ledger alone cannot "
            "give; use it on a run, or pass a federation"
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
