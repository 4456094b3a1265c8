"""How a ledger on disk is kept small: sums in place of rounds, and a budget.

Everything that changes something here happens inside a transaction of the caller's:
files are written first, and those no longer needed are removed after the commit, so
that a crash at any moment leaves the ledger as it was or as it shall be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

import numpy as np

from fastfedul.errors import LedgerError, UnlearnRefusedError
from fastfedul.federation.aggregation import MEAN
from fastfedul.ledger.own_sums import own_difference
from fastfedul.ledger.pairs import RESERVOIR, OfferedPair, offered_pairs
from fastfedul.ledger.participation import (
    Participation,
    joint_factors,
    participation,
)
from fastfedul.ledger.protocol import Ledger
from fastfedul.ledger.rewriting import RewritingWriter
from fastfedul.ledger.store import arrays
from fastfedul.ledger.store.entries import fields
from fastfedul.ledger.store.transaction import Change
from fastfedul.ledger.sums_erasure import correction
from fastfedul.params import norm
from fastfedul.records import ClientId, UpdateEntry, VectorRef

Progress = Callable[[int, int], None]

LOST = (
    "skew scalar and none, which damp round by round or not at all, and any bound",
    "FedEraser, FedAccum, FedRecover and distillation, which need updates of rounds",
    "the models between the first and the current one (params_at)",
    "exactness of forgetting several clients, unless shares never vary: it becomes "
    "approximate and says how far off it may be",
    "the hash chain's hold on what was sent: it covers who took part, and how much",
    "erasing one client after the other where shares vary: each erasure adds to the "
    "possible error, and beyond a quarter forgetting is refused",
    "the age of marks, by which forgetting from rounds comes nearer to retraining",
)
"""What a ledger of sums does not have any more."""

_SPARE_BYTES = 16_384
"""Room that the log of what was dropped may take in the index."""


@dataclass(frozen=True, slots=True)
class Compaction:
    """What compacting does to a ledger.

    Attributes:
        bytes_before: Bytes of its array files with the rounds.
        bytes_after: Bytes of its array files with the sums.
        lost: What is not possible any more, in words.
        notes: What is not exact in the sums, in words.
    """

    bytes_before: int
    bytes_after: int
    lost: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(slots=True)
class Dropped:
    """Stored updates that had to give way to a budget.

    Attributes:
        rounds: Rounds that lost some.
        clients: Names of those whose they were.
        num_updates: How many.
        num_bytes: Their bytes.
    """

    rounds: list[int] = field(default_factory=list)
    clients: set[ClientId] = field(default_factory=set)
    num_updates: int = 0
    num_bytes: int = 0


def num_dropped(ledger: Ledger) -> int:
    """Return how many updates a ledger's budget had no room for, by its log."""
    counts = [e.details["updates"] for e in ledger.events() if e.kind == "drop"]
    return sum(count for count in counts if isinstance(count, int))


class ShrinkingWriter(RewritingWriter):
    """A ledger on disk that can turn into one of sums, and keeps to a budget."""

    def compaction(self) -> Compaction:
        """Return what compacting this ledger would do; nothing is changed.

        Raises:
            LedgerError: If it cannot be compacted.
        """
        with self.index.reading():
            self._check_compactable()
            settings = self._settings
            clients = [c for c in self.clients().values() if c.state != "erased"]
            size = settings.layout.size
            models = {self._initial, self._head()["model"]}
            after = sum(self._info(digest).num_bytes for digest in models)
            after += len(clients) * arrays.vector_bytes("float32", size)
            pair = arrays.vector_bytes(settings.update_dtype, size)
            after += min(len(self._offered()), RESERVOIR) * pair
            return Compaction(self.num_array_bytes(), after, LOST, self._not_exact())

    def _check_compactable(self) -> None:
        if self._settings.history == "sums":
            raise LedgerError(f"{self.path} keeps sums only already")
        problem = None
        if self._settings.aggregation != MEAN:
            problem = (
                f"it was aggregated by {self._settings.aggregation!r:.40}, which can "
                "only be replayed from every update"
            )
        for round_ in self.rounds():
            if round_.use == "aggregate":
                problem = (
                    f"in round {round_.index} only the updates that were kept count, "
                    "so sums over all of them do not say what is in the model"
                )
        if problem:
            raise LedgerError(f"{self.path} cannot be compacted: {problem}")

    def _not_exact(self) -> tuple[str, ...]:
        notes = []
        dtypes = (self._settings.update_dtype, self._settings.step_dtype)
        rows = self.index.rows("updates")
        dropped = sum(fields("updates", row)["array"] is None for row in rows)
        if dropped:
            notes.append(
                f"{dropped} of {len(rows)} updates were not kept: the sums have them "
                "only as far as those that were kept stand for them"
            )
        if dtypes != ("float32", "float32"):
            notes.append(
                f"updates are stored as {dtypes[0]} and steps as {dtypes[1]}: the sums "
                "are as exact as these"
            )
        return tuple(notes)

    def _to_sums(self, change: Change, progress: Progress | None) -> None:
        """Write everybody's sum and some pairs, and let go of all vectors of rounds."""
        rows = [fields("clients", row) for row in self.index.rows("clients")]
        clients = [row for row in rows if row["state"] != "erased"]
        for done, client in enumerate(clients):
            if progress:
                progress(done + 1, len(clients) + 1)
            self._put_sum(change, client, own_difference(self, client["name"]))
        offered = self._offered()
        if len(offered) > RESERVOIR:
            change.head["pair_limit"] = offered[RESERVOIR][1].priority
        for index, pair, left, right in offered[:RESERVOIR]:
            refs = [VectorRef(index, left.client), VectorRef(index, right.client)]
            difference = self.combine(refs, [[1.0, -1.0]]).sums[0]
            # A sampled pair stands for those that were not kept, too.
            odds = pair.odds / (left.keep_probability * right.keep_probability or 1.0)
            self._put_pair(
                change,
                replace(pair, odds=odds),
                (index, left.client, right.client),
                difference,
            )
        self._let_go(change)
        self.index.put_policy("sums", self._policy()["budget"])
        for row in self._round_rows():
            row["content"] = self._content(row, without=set())
            change.replace("rounds", row)
        change.head["chain"] = self._relink(change)

    def _offered(
        self,
    ) -> list[tuple[int, OfferedPair, UpdateEntry, UpdateEntry]]:
        """Return the pairs of kept updates that all rounds offer, lowest first."""
        chain = self._head()["chain"]
        offered = []
        for round_ in self.rounds():
            kept = [u for u in self.updates_in(round_.index) if u.kept]
            offered += [
                (round_.index, pair, kept[pair.left], kept[pair.right])
                for pair in offered_pairs(chain, round_.index, len(kept))
            ]
        return sorted(offered, key=lambda one: one[1].priority)

    def _let_go(self, change: Change) -> None:
        for found in self.index.rows("rounds"):
            row = fields("rounds", found)
            change.release(row["step"])
            change.replace("rounds", {**row, "step": None, "previous_product": 0.0})
        for found in self.index.rows("updates"):
            row = fields("updates", found)
            change.release(row["array"])
            row.update(array=None, summed=int(row["array"] is not None))
            change.replace("updates", row)
        rows = self.index.rows("adjustments")
        change.release(*(fields("adjustments", row)["array"] for row in rows))
        self.index.delete("adjustments", "1")

    def _erase_from_sums(self, change: Change, clients: Sequence[ClientId]) -> float:
        """Correct everybody's sums for the erasure of some clients.

        Returns:
            How far off a client's difference may be by it at worst, relative to its
            norm.
        """
        gone = frozenset(clients)
        here = participation(self)
        names = [
            name
            for name, client in self.clients().items()
            if name not in gone and client.state != "erased"
        ]
        corrections = {name: correction(here, gone, name) for name in names}
        of_difference = joint_factors(here, gone)
        joint = np.zeros(self._settings.layout.size, np.float32)
        for name in sorted(gone):
            joint += np.float32(of_difference[name].value) * self.own_difference(name)
        worst = 0.0
        for name, change_of in corrections.items():
            if change_of.is_none:
                continue
            difference = np.float32(change_of.of_own.value) * self.own_difference(name)
            difference += np.float32(change_of.of_joint.value) * joint
            self._put_sum(change, self._known(name), difference)
            off = change_of.of_own.off + change_of.of_joint.off
            if not math.isfinite(off):
                raise UnlearnRefusedError(
                    f"the length of an update of client {name!r:.80} was never known, "
                    "so its sum cannot be corrected; forget without erasing"
                )
            worst = max(worst, off / (norm(difference) or 1.0))
        self._take_out(change, clients, here)
        return worst

    def _take_out(
        self, change: Change, clients: Sequence[ClientId], here: Participation
    ) -> None:
        """Rewrite the rows of the rounds that some clients took part in."""
        numbers = {self._numbers[client] for client in clients}
        gone: dict[int, list[float]] = {}
        for client in clients:
            for update in self.updates_of(client):
                gone.setdefault(update.round, []).append(update.share)
        for index, shares in sorted(gone.items()):
            row = fields("rounds", self.index.one("rounds", round=index))
            row["num_updates"] -= len(shares)
            removed = row["removed_share"] + sum(shares)
            row["removed_share"] = removed if row["num_updates"] else 1.0
            # Only the sums know the new step itself.
            length = math.sqrt(here.step_square(frozenset(clients), index))
            row.update(products=0, step_norm=length, previous_product=0.0)
            row["content"] = self._content(row, without=numbers)
            change.replace("rounds", row)
        change.head["chain"] = self._relink(change)

    def _make_room(self, change: Change) -> Dropped | None:
        """Drop stored updates until the ledger fits its budget.

        The oldest rounds go first, and in a round the smallest contributions. Steps
        and sums stay.

        Raises:
            LedgerError: If it does not fit even so.
        """
        budget = self._settings.budget
        if budget is None or change.num_bytes() <= budget:
            return None
        dropped = Dropped()
        while (excess := change.num_bytes() + _SPARE_BYTES - budget) > 0:
            if self._drop_some(change, excess, dropped) or self._drop_last_pair(change):
                continue
            small = self._settings.history == "sums"
            advice = "" if small else ", or keep sums only: `fastfedul ledger compact`"
            raise LedgerError(
                f"the budget of {budget:,} bytes has no room for another round in "
                f"{self.path}, by {excess:,} bytes, and nothing is left that can be "
                f"dropped; raise it, as with `train --resume --budget`{advice}"
            )
        if not dropped.num_updates:
            return None
        change.save_head()
        for index in dropped.rounds:
            row = fields("rounds", self.index.one("rounds", round=index))
            row["content"] = self._content(row, without=set())
            change.replace("rounds", row)
        change.head["chain"] = self._relink(change)
        return dropped

    def _drop_last_pair(self, change: Change) -> bool:
        """Drop the kept pair of the highest priority; return whether there was one."""
        pairs = [fields("pairs", row) for row in self.index.rows("pairs")]
        if pairs:
            last = max(pairs, key=itemgetter("priority"))
            self._drop_pair(change, last)
            change.head["pair_limit"] = last["priority"]
        return bool(pairs)

    def _drop_some(self, change: Change, excess: int, dropped: Dropped) -> bool:
        """Drop updates of about so many bytes; return whether there were any."""
        first = self.index.first_kept_round()
        before = dropped.num_updates
        names = {number: name for name, number in self._numbers.items()}
        names |= {number: name for name, number in change.new_clients.items()}
        last = self.index.count("rounds")
        for index in range(last if first is None else first, last):
            round_ = fields("rounds", self.index.one("rounds", round=index))
            if round_["use"] == "aggregate":
                continue  # There, being kept says that it counts.
            found = self.index.rows("updates", round=index)
            rows = [fields("updates", row) for row in found]
            stored = [row for row in rows if row["array"] is not None]
            for row in sorted(stored, key=lambda row: row["share"] * row["norm"]):
                if excess <= 0:
                    return True
                num_bytes = self._info(row["array"]).num_bytes
                change.release(row["array"])
                row.update(array=None, keep_probability=0.0)
                change.replace("updates", row)
                excess -= num_bytes
                dropped.num_updates += 1
                dropped.num_bytes += num_bytes
                dropped.clients.add(names[row["client"]])
                if index not in dropped.rounds:
                    dropped.rounds.append(index)
        return dropped.num_updates > before
