"""The interface of methods: their request, their needs, their result.

`Method` is all that a package of your own has to offer; its docstring holds a whole
method. docs/methods.md says how the command line finds it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from fastfedul.errors import InvalidInputError, UnlearnRefusedError
from fastfedul.federation.aggregation import MEAN, Aggregation, named_rule
from fastfedul.federation.clients import Federation
from fastfedul.ledger.protocol import Ledger
from fastfedul.ledger.store.codec import encoded_bytes
from fastfedul.ledger.views import CountedLedger
from fastfedul.limits import require_type
from fastfedul.methods.buffers import buffers_without
from fastfedul.params import Array, Params, subtract
from fastfedul.records import ClientId, Model, ServerState, UpdateEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Needs of a method.

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

    @property
    def helpers(self) -> str:
        """Everybody whose help the method needs besides the ledger; empty if nobody."""
        asked = {
            "the client to forget": self.target,
            "the other clients": self.others,
            "the server's own images": self.server_data,
        }
        return " and ".join(name for name, wanted in asked.items() if wanted)


@dataclass(frozen=True, slots=True)
class UnlearnRequest:
    """A request to a method: the ledger, the clients to forget, and the helpers.

    Attributes:
        ledger: The ledger.
        forget: Clients to forget.
        federation: The clients that can still help; None if nobody can.
    """

    ledger: Ledger
    forget: frozenset[ClientId]
    federation: Federation | None = None

    @property
    def stayers(self) -> tuple[ClientId, ...]:
        """Active clients of the ledger that the request does not name, sorted."""
        return tuple(
            name
            for name, entry in sorted(self.ledger.clients().items())
            if entry.state == "active" and name not in self.forget
        )

    @property
    def gone(self) -> frozenset[ClientId]:
        """Clients of the request, and all clients that were forgotten before."""
        clients = self.ledger.clients().items()
        return self.forget | {n for n, entry in clients if entry.state != "active"}


@dataclass(frozen=True, slots=True, kw_only=True)
class UnlearnResult:
    """The cleaned model, and the cost of it.

    Attributes:
        params: Parameters of the cleaned model.
        clients: Clients that the method forgot.
        buffers: Buffers of the cleaned model; None if the method gives none. `measured`
            then takes the mean over the last round's other clients, if they are known.
        delta: The difference, cleaned minus current parameters, if the method has it
            more exactly than a subtraction gives it; None for the subtraction.
        settings: Settings that the call filled in, as JSON values.
        seconds: Time of the call.
        bytes_read: Bytes read from the ledger.
        client_calls: Number of computations that clients had to do.
        warnings: Sentences that a reader of the result should know.
        server: State of the server optimizer without the clients; None if the method
            does not give it. A ledger with an optimizer then refuses the model.
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
    server: ServerState | None = None

    def model(self, current: Model) -> Model:
        """Return the cleaned model; the buffers are current if the result has none."""
        buffers = current.buffers if self.buffers is None else self.buffers
        return Model(self.params, buffers, self.server)

    def change(self, current: Model) -> Params:
        """Return the difference: cleaned minus current parameters."""
        if self.delta is not None:
            return self.delta
        return subtract(self.params, current.params)

    def evidence(self) -> dict[str, object]:
        """Return facts of this result for the log and the certificate, as JSON values.

        A certificate has places of their own for the keys `standard_error`, `bound`,
        `lipschitz` and `bound_source`.
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
      only a run knows.
    - `kept_bytes(ledger) -> int`: bytes that a server must store so that the method
      can forget any client.
    - `check(ledger)`: raises InvalidInputError if the method can forget nobody from
      this ledger.
    - `caveat`: a sentence that stands below every table with the method.
    - `is_retraining`: True for a method that gives the retrained model itself.

    The first line of the docstring is the note that lists of methods show.
    """

    @property
    def name(self) -> str:
        """Name of the method in tables, logs and certificates."""

    @property
    def needs(self) -> Needs:
        """Needs of the method."""

    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        """Return the model without the forgotten clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts of a run that settings of a method may depend on.

    Attributes:
        target_label: Class that the attackers aim at; None without an attack.
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
    """Return the bytes that a server must store for a method; 0 for none."""
    own = getattr(method, "kept_bytes", None)
    return int(own(ledger)) if callable(own) else 0


def needs_help(method: Method) -> bool:
    """Return whether a method needs clients or images besides the ledger."""
    return bool(method.needs.helpers)


def vector_bytes(ledger: Ledger, count: int) -> int:
    """Return the bytes of a number of vectors as long as the model, in float32."""
    return count * encoded_bytes("float32", ledger.settings.layout.size)


def coverage_of(updates: Sequence[UpdateEntry]) -> float:
    """Return the kept part of the clients' share in the model, 0 to 1."""
    entered = math.fsum(u.share for u in updates if u.entered)
    kept = math.fsum(u.share for u in updates if u.entered and (u.kept or u.summed))
    return kept / entered if entered else 1.0


def measured(method: Method, request: UnlearnRequest) -> UnlearnResult:
    """Return a method's result, with its time, client calls and bytes read.

    Buffers that the method does not give come from the ledger.
    """
    counted = CountedLedger(request.ledger)
    clients = request.federation.clients if request.federation else None
    calls = clients.calls if clients else 0
    started = time.perf_counter()
    result = method(replace(request, ledger=counted))
    kind = "a fastfedul.UnlearnResult"
    require_type(f"the result of {method.name}", result, UnlearnResult, kind)
    if result.buffers is None:
        result = replace(result, buffers=buffers_without(counted, request.gone))
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
            "client; use the default method, or record with --keep all"
        )


def require_mean(name: str, ledger: Ledger, *, optimizers: bool = False) -> None:
    """Raise unless a server added weighted means, as a method needs.

    Args:
        name: Name of the method.
        ledger: The ledger.
        optimizers: Whether the method also works with a server optimizer.

    Raises:
        UnlearnRefusedError: If the server did something else.
    """
    optimizer = ledger.settings.optimizer
    if optimizer is not None and not optimizers:
        raise UnlearnRefusedError(
            f"{name} needs a server that adds the mean of the updates, and this "
            f"ledger's server uses {optimizer.name}; use the default method, which "
            "runs the server again"
        )
    if ledger.settings.aggregation != MEAN:
        raise UnlearnRefusedError(
            f"{name} needs weighted means, and this ledger was aggregated by "
            f"{ledger.settings.aggregation!r:.80}; use the default method, which "
            "replays any aggregation"
        )


def rule_of(ledger: Ledger) -> Aggregation | None:
    """Return how the server of a ledger aggregates; None for the weighted mean."""
    return named_rule(ledger.settings.aggregation, ledger.settings.custom)


def require_active(request: UnlearnRequest) -> None:
    """Raise if a client of a request was forgotten before.

    Raises:
        InvalidInputError: If one was.
    """
    clients = request.ledger.clients()
    for name in sorted(request.forget & set(clients)):
        if clients[name].state != "active":
            raise InvalidInputError(
                f"client {name!r:.80} is {clients[name].state} already"
            )


def require_usable(
    method: Method, ledger: Ledger, federation: Federation | None
) -> None:
    """Raise if a method can forget nobody from a ledger, whatever the request.

    Raises:
        InvalidInputError: If it can forget nobody; the message names a way out.
    """
    helpers = method.needs.helpers
    if helpers and federation is None:
        raise InvalidInputError(
            f"{method.name} needs the help of {helpers}, which nobody gives here; use "
            "a method that needs the ledger alone, as the default method"
        )
    check = getattr(method, "check", None)
    if callable(check):
        check(ledger)


def first_model(request: UnlearnRequest, name: str) -> Model:
    """Return the model that the training began with.

    A ledger of rounds gives its first model up with the first erasure. Then the
    federation makes the model again from its seed.

    Raises:
        UnlearnRefusedError: If the ledger has it no more and no federation is there.
    """
    ledger, federation = request.ledger, request.federation
    erased = [n for n, entry in ledger.clients().items() if entry.state == "erased"]
    if not erased or ledger.settings.history == "sums":
        return ledger.initial
    if federation is None:
        raise UnlearnRefusedError(
            f"{name} begins with the first model, which the ledger gave up when it "
            f"erased {erased[0]!r:.80}; use the default method, or pass a federation, "
            "as `fastfedul compare` does for a run"
        )
    return federation.clients.workers.initial(federation.seed)


def federation_of(request: UnlearnRequest, method: Method) -> Federation:
    """Return the federation that helps a method.

    Raises:
        UnlearnRefusedError: If a need of the method is not met.
        InvalidInputError: If a client to forget is not in the federation.
    """
    name, needs = method.name, method.needs
    if needs.history:
        require_rounds_for(name, request.ledger)
    federation = request.federation
    if federation is None:
        raise UnlearnRefusedError(
            f"{name} needs the help of {needs.helpers}, which a ledger alone cannot "
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
