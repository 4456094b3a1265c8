"""A ledger seen through something: as if less had been kept, or with a counter."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from fastfedul.errors import InvalidInputError
from fastfedul.ledger.keeping import Keep
from fastfedul.ledger.protocol import Ledger, Stack
from fastfedul.ledger.settings import LedgerSettings
from fastfedul.ledger.store.codec import VALUE_BYTES
from fastfedul.params import Array, Flat
from fastfedul.records import (
    ClientEntry,
    ClientId,
    Combination,
    Event,
    Model,
    PairEntry,
    RoundEntry,
    ServerState,
    UpdateEntry,
    VectorRef,
)


@dataclass(slots=True)
class LedgerView:
    """A ledger that passes everything on to another one."""

    ledger: Ledger

    @property
    def settings(self) -> LedgerSettings:
        """What was decided when the ledger was created."""
        return self.ledger.settings

    @property
    def num_rounds(self) -> int:
        """How many rounds are recorded."""
        return self.ledger.num_rounds

    @property
    def initial(self) -> Model:
        """The model before the first round."""
        return self.ledger.initial

    @property
    def final(self) -> Model:
        """The model now."""
        return self.ledger.final

    def snapshot(self) -> AbstractContextManager[None]:
        """Hold one consistent view for the time of a `with` block."""
        return self.ledger.snapshot()

    def clients(self) -> Mapping[ClientId, ClientEntry]:
        """Return every client ever seen."""
        return self.ledger.clients()

    def rounds(self) -> Sequence[RoundEntry]:
        """Return every round, without its arrays."""
        return self.ledger.rounds()

    def updates_of(self, client: ClientId) -> Sequence[UpdateEntry]:
        """Return the updates of one client; none for a stranger."""
        return self.ledger.updates_of(client)

    def updates_in(self, index: int) -> Sequence[UpdateEntry]:
        """Return the updates of a round, sorted by client."""
        return self.ledger.updates_in(index)

    def adjustments(self) -> Mapping[int, Flat]:
        """Return corrections of the model by the round from which they count."""
        return self.ledger.adjustments()

    def server_states(self) -> Mapping[int, ServerState]:
        """Return states of the server that forgettings set, by the next round."""
        return self.ledger.server_states()

    def last_buffers(self) -> Mapping[ClientId, Mapping[str, Array]]:
        """Return the buffers that clients sent in the last round, by client."""
        return self.ledger.last_buffers()

    def events(self) -> Sequence[Event]:
        """Return the log of forgettings."""
        return self.ledger.events()

    def own_difference(self, client: ClientId) -> Flat:
        """Return the difference of forgetting one client alone, over all its rounds."""
        return self.ledger.own_difference(client)

    @property
    def chain(self) -> bytes:
        """A digest that changes with every round."""
        return self.ledger.chain

    def pairs(self) -> Sequence[PairEntry]:
        """Return the kept differences of two clients; none in a ledger of rounds."""
        return self.ledger.pairs()

    def combine(
        self,
        vectors: Sequence[VectorRef],
        coefficients: npt.ArrayLike,
        pairs: Sequence[tuple[int, int]] = (),
    ) -> Combination:
        """Return linear combinations and inner products of stored vectors."""
        return self.ledger.combine(vectors, coefficients, pairs)

    def stack(self, vectors: Sequence[VectorRef]) -> Stack:
        """Return stored vectors one under the other, to be read by columns."""
        return self.ledger.stack(vectors)


@dataclass(slots=True)
class KeptView(LedgerView):
    """A ledger that shows only the updates that a policy would have kept.

    One run recorded in full then serves every keeping policy, with the same training.

    Attributes:
        ledger: A ledger that kept every update.
        keep: The policy; `store` only, because the training has already happened.
    """

    keep: Keep

    def __post_init__(self) -> None:
        if self.keep.use != "store":
            raise InvalidInputError(
                "a recorded run can only be seen as if less had been stored; to "
                "aggregate a sample, train with that policy"
            )

    def rounds(self) -> Sequence[RoundEntry]:
        """Return every round; only its participants tell which updates are kept."""
        return tuple(replace(entry, num_kept=None) for entry in self.ledger.rounds())

    def updates_of(self, client: ClientId) -> Sequence[UpdateEntry]:
        """Return the updates of one client, and which of them would have been kept."""
        rounds = [update.round for update in self.ledger.updates_of(client)]
        found = (u for index in rounds for u in self.updates_in(index))
        return tuple(update for update in found if update.client == client)

    def updates_in(self, index: int) -> Sequence[UpdateEntry]:
        """Return the updates of a round, and which of them would have been kept."""
        entries = self.ledger.updates_in(index)
        magnitudes = np.array([u.share * u.norm for u in entries])
        probabilities, kept = self.keep.choose(magnitudes, index)
        return tuple(
            replace(u, keep_probability=float(p), kept=bool(k) and u.kept)
            for u, p, k in zip(entries, probabilities, kept, strict=True)
        )


@dataclass(slots=True)
class PastView(LedgerView):
    """A ledger as it was some rounds ago; only the model is the one of today.

    Attributes:
        ledger: A ledger from which nobody was erased since.
        stop: How many rounds there were.
        gone: Clients that had been forgotten by then.
        chain_then: End of the hash chain at that time.
    """

    stop: int
    gone: frozenset[ClientId]
    chain_then: bytes

    @property
    def chain(self) -> bytes:
        """The digest of that time."""
        return self.chain_then

    @property
    def num_rounds(self) -> int:
        """How many rounds there were."""
        return self.stop

    def clients(self) -> Mapping[ClientId, ClientEntry]:
        """Return every client seen; a client forgotten later is active again."""
        return {
            name: entry
            if name in self.gone
            else replace(entry, state="active", forgotten_at=None)
            for name, entry in self.ledger.clients().items()
        }

    def rounds(self) -> Sequence[RoundEntry]:
        """Return the rounds of that time."""
        return self.ledger.rounds()[: self.stop]

    def server_states(self) -> Mapping[int, ServerState]:
        """Return the states of that time."""
        states = self.ledger.server_states().items()
        return {index: state for index, state in states if index < self.stop}

    def last_buffers(self) -> Mapping[ClientId, Mapping[str, Array]]:
        """Return the buffers of the last round of that time; none once it is past."""
        now = self.stop == self.ledger.num_rounds
        return self.ledger.last_buffers() if now else {}

    def updates_of(self, client: ClientId) -> Sequence[UpdateEntry]:
        """Return the updates of one client up to that time."""
        updates = self.ledger.updates_of(client)
        return tuple(update for update in updates if update.round < self.stop)


@dataclass(slots=True)
class CountedLedger(LedgerView):
    """A ledger that counts the bytes read of its arrays.

    Attributes:
        ledger: The ledger.
        bytes_read: Bytes of stored vectors read so far.
    """

    bytes_read: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def count(self, num_bytes: int) -> None:
        """Add the bytes of one reading; several threads may read at once."""
        with self._lock:
            self.bytes_read += num_bytes

    def own_difference(self, client: ClientId) -> Flat:
        """Return the difference of forgetting one client alone, over all its rounds."""
        found = self.ledger.own_difference(client)
        self.count(found.nbytes)
        return found

    def combine(
        self,
        vectors: Sequence[VectorRef],
        coefficients: npt.ArrayLike,
        pairs: Sequence[tuple[int, int]] = (),
    ) -> Combination:
        """Return linear combinations and inner products of stored vectors."""
        found = self.ledger.combine(vectors, coefficients, pairs)
        self.count(found.bytes_read)
        return found

    def stack(self, vectors: Sequence[VectorRef]) -> Stack:
        """Return stored vectors one under the other, to be read by columns."""
        settings = self.ledger.settings
        widths = tuple(
            VALUE_BYTES[settings.update_dtype if r.client else settings.step_dtype]
            for r in vectors
        )
        return _CountedStack(self, self.ledger.stack(vectors), widths)


@dataclass(slots=True)
class _CountedStack:
    """Stacked vectors that count the bytes read of them.

    Attributes:
        counter: Where the bytes are added up.
        stack: The vectors.
        widths: Bytes of a stored value of each vector.
    """

    counter: CountedLedger
    stack: Stack
    widths: tuple[int, ...]

    def __getitem__(self, places: slice) -> _CountedStack:
        """Return some of the vectors."""
        return _CountedStack(self.counter, self.stack[places], self.widths[places])

    def read(self, start: int, stop: int, out: Array | None = None) -> Array:
        """Return values from `start` to before `stop` of each vector, a row each."""
        self.counter.count((stop - start) * sum(self.widths))
        return self.stack.read(start, stop, out)
