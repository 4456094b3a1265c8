"""What every ledger offers, and what can be read from any of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Protocol

import numpy.typing as npt

from fastfedul.errors import (
    InvalidInputError,
    LedgerError,
    UnknownClientError,
    name_some,
)
from fastfedul.ledger.server_replay import server_steps
from fastfedul.ledger.settings import LedgerSettings
from fastfedul.limits import require_number, show
from fastfedul.params import Array, Flat, Params
from fastfedul.records import (
    ClientEntry,
    ClientId,
    ClientUpdate,
    Combination,
    Event,
    Model,
    PairEntry,
    Round,
    RoundEntry,
    ServerState,
    UpdateEntry,
    VectorRef,
)


class Stack(Protocol):
    """Stored vectors one under the other."""

    def __getitem__(self, places: slice) -> Stack:
        """Return some of the vectors."""

    def read(self, start: int, stop: int, out: Array | None = None) -> Array:
        """Return values from `start` to before `stop` of each vector, a row each.

        They are written to `out` where it is given.
        """


class Ledger(Protocol):
    """The history of a federation, as methods of unlearning read it."""

    @property
    def settings(self) -> LedgerSettings:
        """What was decided when the ledger was created."""

    @property
    def num_rounds(self) -> int:
        """How many rounds are recorded."""

    @property
    def initial(self) -> Model:
        """The model before the first round."""

    @property
    def final(self) -> Model:
        """The model now."""

    def snapshot(self) -> AbstractContextManager[None]:
        """Hold one consistent view for the time of a `with` block."""

    def clients(self) -> Mapping[ClientId, ClientEntry]:
        """Return every client ever seen."""

    def rounds(self) -> Sequence[RoundEntry]:
        """Return every round, without its arrays."""

    def updates_of(self, client: ClientId) -> Sequence[UpdateEntry]:
        """Return the updates of one client; none for a stranger."""

    def updates_in(self, index: int) -> Sequence[UpdateEntry]:
        """Return the updates of a round, sorted by client."""

    def adjustments(self) -> Mapping[int, Flat]:
        """Return corrections of the model by the round from which they count."""

    def server_states(self) -> Mapping[int, ServerState]:
        """Return states of the server that forgettings set, by the next round."""

    def last_buffers(self) -> Mapping[ClientId, Mapping[str, Array]]:
        """Return the buffers that clients sent in the last round, by client."""

    def events(self) -> Sequence[Event]:
        """Return the log of forgettings."""

    def own_difference(self, client: ClientId) -> Flat:
        """Return the difference of forgetting one client alone, over all its rounds."""

    @property
    def chain(self) -> bytes:
        """A digest that changes with every round."""

    def pairs(self) -> Sequence[PairEntry]:
        """Return the kept differences of two clients; none in a ledger of rounds."""

    def combine(
        self,
        vectors: Sequence[VectorRef],
        coefficients: npt.ArrayLike,
        pairs: Sequence[tuple[int, int]] = (),
    ) -> Combination:
        """Return linear combinations and inner products of stored vectors."""

    def stack(self, vectors: Sequence[VectorRef]) -> Stack:
        """Return stored vectors one under the other, to be read by columns."""


class WritableLedger(Ledger, Protocol):
    """A ledger that rounds can be added to and clients taken out of."""

    def append(self, round_: Round) -> Model:
        """Record a round and return the new model."""

    def commit_forgetting(
        self,
        clients: Sequence[ClientId],
        delta: Flat,
        details: Mapping[str, object],
        *,
        erase: bool = False,
        model: Model | None = None,
        request: int | None = None,
        computed_at: LedgerState | None = None,
    ) -> None:
        """Move the model by delta and bar the clients; optionally erase them too.

        Args:
            clients: Clients that are forgotten.
            delta: Cleaned minus current parameters.
            details: What the log keeps of it, as JSON values.
            erase: Whether to rewrite the history as if they had never been there.
            model: The cleaned model; None for the current one moved by delta.
            request: Number of a request that must still be waiting.
            computed_at: State of the ledger that delta was computed from; if it has
                changed since, nothing happens and an error says so.
        """

    def commit_erasure(
        self, clients: Sequence[ClientId], details: Mapping[str, object]
    ) -> None:
        """Rewrite the history as if forgotten clients had never been there."""


LedgerState = tuple[int, bytes, int]
"""Rounds, chain and entries of the log, from which a forgetting is computed."""


def state_of(ledger: Ledger) -> LedgerState:
    """Return a value that changes with every round and every forgetting."""
    with ledger.snapshot():
        return ledger.num_rounds, ledger.chain, len(ledger.events())


def require_state(ledger: Ledger, state: LedgerState | None) -> None:
    """Raise if a ledger is not in a state any more."""
    if state is not None and state_of(ledger) != state:
        raise LedgerError(
            "the ledger has changed since the forgetting was computed, so nothing was "
            "forgotten; forget again, between two rounds"
        )


def require_ledger(ledger: object, *, writable: bool = False) -> None:
    """Raise unless an object is a ledger, and open for writing if that is needed."""
    if not hasattr(ledger, "updates_of"):
        raise InvalidInputError(
            f"{show(ledger)} is no ledger; open one with fastfedul.open_ledger(path)"
        )
    if writable and not hasattr(ledger, "commit_forgetting"):
        raise InvalidInputError(
            "the ledger is open for reading only; open it with "
            "fastfedul.open_ledger(path)"
        )


def vector(ledger: Ledger, ref: VectorRef) -> Flat:
    """Return one stored vector."""
    flat: Flat = ledger.combine([ref], [[1.0]]).sums[0]
    return flat


def models(ledger: Ledger) -> Iterator[Params]:
    """Yield the model before each round and, last, the model now.

    With float32 steps these are the very bits the server had, as long as nobody was
    forgotten. After a forgetting they are the server's models up to rounding. After an
    erasure they lead to the current model without the steps of the erased client.

    Raises:
        LedgerError: If the ledger keeps sums, and with them no steps.
    """
    require_rounds(ledger, "models between the first and the current one")
    adjustments = ledger.adjustments()
    layout = ledger.settings.layout
    flat = ledger.initial.params.flat
    for index, step in enumerate(server_steps(ledger)):
        if index in adjustments:
            flat = flat + adjustments[index]
        yield Params(layout, flat)
        flat = flat + step
    yield ledger.final.params


def params_at(ledger: Ledger, index: int) -> Params:
    """Return the model before a round; the number of rounds gives the model now.

    Raises:
        LedgerError: If the ledger keeps sums, for all but the first and the last.
    """
    require_ledger(ledger)
    require_number("number of a round", index, whole=True)
    if not 0 <= index <= ledger.num_rounds:
        raise InvalidInputError(
            f"there is no model before round {show(index)}; {_rounds(ledger)}"
        )
    if index == 0 and 0 not in ledger.adjustments():
        return ledger.initial.params
    if index == ledger.num_rounds:
        return ledger.final.params
    for position, params in enumerate(models(ledger)):
        if position == index:
            return params
    raise AssertionError("the model now comes last")


def read_round(ledger: Ledger, index: int) -> Round:
    """Return a recorded round with its arrays."""
    require_ledger(ledger)
    require_number("number of a round", index, least=0, whole=True)
    if index >= ledger.num_rounds:
        raise InvalidInputError(f"there is no round {show(index)}; {_rounds(ledger)}")
    require_rounds(ledger, "the vectors of a round")
    entries = ledger.updates_in(index)
    layout = ledger.settings.layout
    sent = ledger.last_buffers() if index == ledger.num_rounds - 1 else {}
    return Round(
        index=index,
        updates=tuple(
            replace(_read_update(ledger, entry), buffers=sent.get(entry.client))
            for entry in entries
        ),
        step=Params(layout, vector(ledger, VectorRef(index))),
        use=ledger.rounds()[index].use,
        local=ledger.rounds()[index].local,
    )


def _rounds(ledger: Ledger) -> str:
    last = ledger.num_rounds - 1
    return f"rounds are 0 to {last}" if last >= 0 else "the ledger has no round yet"


def _read_update(ledger: Ledger, entry: UpdateEntry) -> ClientUpdate:
    delta = None
    if entry.kept:
        flat = vector(ledger, VectorRef(entry.round, entry.client))
        delta = Params(ledger.settings.layout, flat)
    return ClientUpdate(
        entry.client, entry.share, delta, entry.keep_probability, entry.kept
    )


def require_rounds(ledger: Ledger, what: str) -> None:
    """Raise if a ledger does not have what only a history of rounds has."""
    if ledger.settings.history == "sums":
        raise LedgerError(f"this ledger keeps sums per client only: {what} are gone")


def require_known(ledger: Ledger, clients: Sequence[ClientId]) -> None:
    """Raise unless the ledger has seen every one of these clients."""
    known = ledger.clients()
    for client in clients:
        if client not in known:
            near = difflib.get_close_matches(client, known, n=1)
            some = f"; clients are {name_some(known)}" if known else "; it has none yet"
            hint = f"; did you mean {near[0]!r:.80}?" if near else some
            raise UnknownClientError(
                f"no client is called {client!r:.80} in this ledger{hint}"
            )


def now() -> str:
    """Return the time as it stands in the log."""
    return datetime.now(UTC).isoformat(timespec="seconds")
