"""How much disk and time a ledger will take, before there is one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastfedul.errors import InvalidInputError
from fastfedul.ledger.changes.garbage import SPARE_BYTES
from fastfedul.ledger.keeping import Floats, Keep
from fastfedul.ledger.pairs import RESERVOIR
from fastfedul.ledger.settings import LedgerSettings
from fastfedul.ledger.store.arrays import page_end
from fastfedul.ledger.store.codec import STORAGE_DTYPES, encoded_bytes
from fastfedul.ledger.store.transaction import SHARED_BYTES
from fastfedul.records import StorageDtype

WRITE_RATE, READ_RATE = 500e6, 2e9
"""Bytes a second of a usual disk, and of files that the system has in memory."""

_APPEND_OVER_WRITE = 1.3
_FORGET_OVER_READ = 1.2
_ALGEBRA_SECONDS = 1e-6
"""From `benchmarks/scale.py`: an append over a plain write of its bytes; bytes that a
forgetting reads over the bytes it needs, because checking is faster than a disk;
seconds of linear algebra for each parameter with 64 updates, on two cores."""

_SAMPLED = 64
"""Updates of the others that forgetting reads, three times."""

_ROW_BYTES, _INDEX_BYTES = 400, 100_000
"""Bytes of the index for a participant of a round, and of an empty index."""

_FIRST_INDEX_BYTES = 128 * 1024
"""Bytes of the index after a first round: 112 KiB, and 16 KiB for the log."""

ENTRY_BYTES = 90
"""Bytes of a file's header for each vector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FederationSize:
    """The sizes on which disk and time depend.

    Attributes:
        parameters: Values of the model.
        clients: Clients over all rounds.
        rounds: Rounds to record.
        per_round: Participants of a round; None for all clients.
        keep: Which updates the ledger keeps: `all`, `optimal:5`, `sums`, `sums:3`.
    """

    parameters: int
    clients: int
    rounds: int
    per_round: int | None = None
    keep: str = "all"

    def __post_init__(self) -> None:
        for name, value in (
            ("parameters", self.parameters),
            ("clients", self.clients),
            ("rounds", self.rounds),
            ("per round", self.drawn),
        ):
            if value < 1:
                raise InvalidInputError(f"{name} is {value}; choose 1 or more")
        if self.drawn > self.clients:
            raise InvalidInputError(
                f"{self.drawn} of {self.clients} clients cannot take part; choose fewer"
            )
        Keep.parse(self.keep)

    @property
    def drawn(self) -> int:
        """Participants of a round."""
        return self.clients if self.per_round is None else self.per_round

    @property
    def policy(self) -> Keep:
        """Policy by which the ledger keeps updates."""
        return Keep.parse(self.keep)

    @property
    def kept(self) -> int:
        """Updates kept of a round."""
        if self.policy.history == "sums":
            return 0
        return min(self.drawn, self.policy.count or self.drawn)

    @property
    def pairs(self) -> int:
        """Differences of two clients that a ledger of sums keeps."""
        of_round = self.drawn * (self.drawn - 1) // 2
        return min(RESERVOIR, self.rounds * of_round)

    def appearances(self) -> Floats:
        """Return the probability that a client takes part 0, 1, 2, ... times.

        Every round draws its participants anew, each client with the same probability.
        """
        rounds, odds = self.rounds, self.drawn / self.clients
        if odds == 1:
            return np.append(np.zeros(rounds), 1.0)
        counts = np.arange(rounds + 1)
        logs = np.append(0.0, np.cumsum(np.log(np.arange(1, rounds + 1))))
        ways = logs[-1] - logs - logs[::-1]
        chances = counts * np.log(odds) + (rounds - counts) * np.log1p(-odds)
        found: Floats = np.exp(ways + chances)
        return found

    def vector_bytes(self, dtype: StorageDtype) -> int:
        """Return the expected bytes of the vectors of all clients, in sums."""
        stored = np.arange(self.rounds + 1) * float(
            encoded_bytes(dtype, self.parameters)
        )
        stored[self.policy.sums_from :] = encoded_bytes("float32", self.parameters)
        return round(self.clients * float(self.appearances() @ stored))


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes on disk, and seconds.

    Attributes:
        update: Bytes of one stored update.
        per_round: Bytes that every round adds for good.
        constant: Bytes that are there whatever the number of rounds.
        index: Bytes of the index after the last round.
        total: Bytes after the last round.
        headroom: Bytes needed beyond the total at the worst moment: new files are
            written before old ones are removed.
        append_seconds: Time to record a round.
        forget_seconds: Time to forget a client, without erasing its updates.
    """

    update: int
    per_round: int
    constant: int
    index: int
    total: int
    headroom: int
    append_seconds: float
    forget_seconds: float


def require_room(settings: LedgerSettings, num_rounds: int = 1) -> None:
    """Raise unless a budget has room for all bytes that a ledger cannot give up.

    These are the models, the index, and in a ledger of rounds the steps.

    Args:
        settings: Settings of the ledger.
        num_rounds: Rounds that the ledger will have.

    Raises:
        InvalidInputError: If the budget is too small.
    """
    if settings.budget is None:
        return
    size = settings.layout.size
    least = 2 * encoded_bytes("float32", size) + _FIRST_INDEX_BYTES
    contents, advice = "the models of this ledger", "choose more"
    if settings.history == "rounds":
        least += num_rounds * encoded_bytes(settings.step_dtype, size)
        rounds = "a round" if num_rounds == 1 else f"{num_rounds} rounds"
        contents = f"the models and the steps of {rounds}"
        fewer = "" if num_rounds == 1 else "fewer rounds, "
        advice = f"choose more, {fewer}or keep sums"
    if settings.budget < least:
        raise InvalidInputError(
            f"the budget is {settings.budget:,} bytes, and {contents} take at least "
            f"{least:,}, which the ledger cannot give up; {advice}"
        )


def _rewritten_bytes(per_round: int, update: int, exact: int) -> int:
    """Return the bytes that an erasure writes for a round.

    These are the step, and the updates that share a file with an erased update.
    """
    if per_round <= SHARED_BYTES:
        return per_round
    shared = 0 if update >= SHARED_BYTES else max(SHARED_BYTES, per_round // 64)
    return exact + shared


def estimate(
    federation: FederationSize,
    dtype: StorageDtype,
    *,
    write_rate: float = WRITE_RATE,
    read_rate: float = READ_RATE,
) -> Estimate:
    """Return the disk and time that the ledger of a federation takes.

    Args:
        federation: Sizes of the federation.
        dtype: How updates are stored; steps are float32.
        write_rate: Bytes a second that the disk writes and syncs.
        read_rate: Bytes a second that the disk reads.
    """
    if dtype not in STORAGE_DTYPES:
        raise InvalidInputError(
            f"unknown dtype {dtype!r}; choose {', '.join(STORAGE_DTYPES)}"
        )
    size, rounds = federation.parameters, federation.rounds
    exact, update = encoded_bytes("float32", size), encoded_bytes(dtype, size)
    models = 2 * exact
    index = _INDEX_BYTES + _ROW_BYTES * (federation.drawn + 1) * rounds
    appearances = max(1, round(federation.drawn * rounds / federation.clients))
    sampled = min(_SAMPLED, federation.kept * rounds or _SAMPLED)
    if federation.policy.history == "sums":
        pairs = federation.pairs
        live = federation.vector_bytes(dtype) + pairs * update + models
        whole = appearances >= federation.policy.sums_from
        written = federation.drawn * (exact if whole else update) + exact
        # Sums are replaced in new files. So many bytes may not count any more.
        dead = min(live + SPARE_BYTES, rounds * (written + pairs * update))
        per_round, constant, headroom = 0, live + dead, live
        read = exact + 3 * pairs * update
    else:
        per_round = federation.kept * (update + ENTRY_BYTES) + exact + ENTRY_BYTES
        if per_round <= SHARED_BYTES:
            per_round = page_end(per_round)
        constant = models
        headroom = appearances * _rewritten_bytes(per_round, update, exact) + exact
        written = per_round + exact
        share = federation.kept / federation.drawn
        read = appearances * exact + round(appearances * share) * update
        read += 3 * sampled * (update + exact)
    return Estimate(
        update,
        per_round,
        constant,
        index,
        rounds * per_round + constant + index,
        headroom,
        _APPEND_OVER_WRITE * written / write_rate,
        _FORGET_OVER_READ * read / read_rate + _ALGEBRA_SECONDS * size,
    )
