"""Rewrites recorded rounds: their files, their rows, and the hash chain from there on.

A file is rewritten if a vector in it changes or goes; every other vector of the file is
copied as it is. All other files stay as they are. Most files of a large round hold one
vector each, so that little is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from fastfedul.errors import LedgerError
from fastfedul.ledger.chain import content_of, genesis, link
from fastfedul.ledger.erasure import shares_anew
from fastfedul.ledger.roots import Roots, first_root_link, root_link
from fastfedul.ledger.store.arrays import Part, Source, digest_in
from fastfedul.ledger.store.entries import local_values
from fastfedul.ledger.store.schema import (
    ClientRow,
    FileRow,
    LedgerRow,
    RoundRow,
    UpdateRow,
)
from fastfedul.ledger.store.transaction import SHARED_BYTES, Transaction
from fastfedul.params import Flat
from fastfedul.records import VectorRef


@dataclass(frozen=True, slots=True)
class RoundChange:
    """How a recorded round changes.

    Attributes:
        row: The round's row with its new numbers; file, start, step, count of kept
            updates, content and chain are filled in here.
        step: The new step; None if it stays.
        erased: Numbers of the clients that were never in it.
        dropped: Numbers of the clients whose updates are not kept any more.
    """

    row: RoundRow
    step: Flat | None = None
    erased: frozenset[int] = frozenset()
    dropped: frozenset[int] = frozenset()

    @property
    def moves(self) -> bool:
        """Whether a vector of the round changes or goes."""
        return self.step is not None or bool(self.erased or self.dropped)


def step_name(index: int) -> str:
    """Return the name of a round's step in its file."""
    return f"{index}.step"


def update_name(index: int, client: int) -> str:
    """Return the name of an update in its file, with the client's number."""
    return f"{index}.update.{client}"


def rewrite_rounds(
    change: Transaction, rounds: Iterable[RoundChange]
) -> dict[int, RoundRow]:
    """Change recorded rounds, given in order; return their rows, to be linked anew."""
    staying = Staying(change)
    rows: dict[int, RoundRow] = {}
    open_file = change.head.open_file
    with ExitStack() as stack:
        current: _Rewriting | None = None
        for one in rounds:
            if not one.moves:
                # Should its file be rewritten, the row is taken from here.
                rows[one.row.round] = one.row
                continue
            if one.row.start is None:
                rows[one.row.round] = _rewrite_apart(change, one, staying)
                continue
            if current is None or current.file != one.row.file:
                if current is not None:
                    rows |= current.finish()
                assert one.row.file is not None
                current = _Rewriting(change, one.row.file, stack, staying, rows)
            current.put(one)
        if current is not None:
            rows |= current.finish()
            if current.file == open_file:
                change.set(open_file=current.number)
    staying.save()
    return rows


class Staying:
    """The clients that stay while rounds are rewritten: names, totals and roots."""

    def __init__(self, change: Transaction) -> None:
        self._change = change
        self._names: dict[int, str] = {}
        self._gains: dict[int, tuple[float, float]] = {}
        self._roots = Roots(change.ledger_row)

    def share_anew(self, index: int, updates: Sequence[UpdateRow]) -> list[UpdateRow]:
        """Return the rows of a round's remaining participants with their new shares.

        The products with the old step go, because an erased client is in that step.
        """
        found = []
        shares = shares_anew(index, [update.share for update in updates])
        for update, share in zip(updates, shares, strict=True):
            gain = share - update.share
            summed = gain * (update.norm or 0.0) if update.summed else 0.0
            before = self._gains.get(update.client, (0.0, 0.0))
            self._gains[update.client] = (before[0] + gain, before[1] + summed)
            # Not dataclasses.replace, which takes longer than everything else here.
            found.append(
                UpdateRow(
                    update.client,
                    update.round,
                    share,
                    update.keep_probability,
                    update.file,
                    update.array,
                    update.norm,
                    None,
                    update.summed,
                )
            )
        return found

    def save(self) -> None:
        """Write the new totals of the clients."""
        rows = self._change.index.rows_by_key(ClientRow, "id", set(self._gains))
        self._change.index.replace(
            *(
                replace(
                    row,
                    shares=row.shares + self._gains[number][0],
                    contribution=row.contribution + self._gains[number][1],
                )
                for number, row in rows.items()
            )
        )

    def sealed(self, row: RoundRow, updates: Sequence[UpdateRow]) -> RoundRow:
        """Return the row of a round with the digests of its contents."""
        names = [self._name(update.client) for update in updates]
        participants = [
            (name, update.share, update.keep_probability, digest_in(update.array))
            for name, update in zip(names, updates, strict=True)
        ]
        content = content_of(
            row.round,
            row.use,
            digest_in(row.step),
            local_values(row),
            sorted(participants),
        )
        return replace(row, content=content, root=self._roots.root(row.round, names))

    def _name(self, number: int) -> str:
        if number not in self._names:
            found = self._change.index.one(ClientRow, id=number).name
            self._names[number] = found
        return self._names[number]


class _Rewriting:
    """One file that is being rewritten, round by round."""

    def __init__(
        self,
        change: Transaction,
        file: int,
        stack: ExitStack,
        staying: Staying,
        changed: Mapping[int, RoundRow],
    ) -> None:
        self._change = change
        self._staying = staying
        self._changed = changed
        self._left = change.index.rows(RoundRow, None, file=file)
        span = (self._left[0].round, self._left[-1].round)
        self._updates: dict[int, list[UpdateRow]] = {}
        self._new: list[UpdateRow] = []
        for update in change.index.rows(UpdateRow, span):
            self._updates.setdefault(update.round, []).append(update)
        self._data = _small_file(change, file)
        self._open = stack.enter_context(ExitStack())
        self._writer = self._open.enter_context(change.writing())
        self._rows: dict[int, RoundRow] = {}
        self.file = file
        self.number = self._writer.number

    def put(self, one: RoundChange) -> None:
        """Write a changed round, and before it those that stay as they are."""
        while self._left[0].round < one.row.round:
            self._copy(self._left.pop(0))
        self._left.pop(0)
        self._write(one)

    def finish(self) -> dict[int, RoundRow]:
        """Write the rest and let go of the old file; return the new rows."""
        for row in self._left:
            self._copy(row)
        self._open.close()
        self._change.index.replace(*self._new)
        self._change.remove_file(self.file)
        return self._rows

    def _copy(self, row: RoundRow) -> None:
        self._write(RoundChange(self._changed.get(row.round, row)))

    def _write(self, one: RoundChange) -> None:
        change, row = self._change, one.row
        settings, index = change.settings, row.round
        updates = self._updates.get(index, [])
        updates = [u for u in updates if u.client not in one.erased]
        assert row.step is not None
        name = step_name(index)
        parts: list[Part] = []
        if one.step is None:
            source = change.source(
                self.file, row.step, settings.step_dtype, VectorRef(index)
            )
            parts.append(change.copied(name, source, self._bytes(source)))
        else:
            parts.append(change.new(name, one.step, settings.step_dtype))
        kept = [u for u in updates if u.array and u.client not in one.dropped]
        for update in kept:
            assert update.array is not None
            own = update_name(index, update.client)
            source = change.source(self.file, update.array, settings.update_dtype, own)
            parts.append(change.copied(own, source, self._bytes(source)))
        start, stored = self._writer.add(parts)
        places = {
            update.client: (self.number, own.packed())
            for update, own in zip(kept, stored[1:], strict=True)
        }
        new = [_rewritten(update, places, one) for update in updates]
        if one.erased:
            new = self._staying.share_anew(index, new)
        self._new += new
        row = replace(
            row,
            file=self.number,
            start=start,
            step=stored[0].packed(),
            num_kept=len(kept),
        )
        if one.moves:
            row = self._staying.sealed(row, new)
        self._rows[index] = row

    def _bytes(self, source: Source) -> memoryview | None:
        """Return the stored bytes of a vector, if the file is at hand."""
        if self._data is None:
            return None
        offset = source.stored.offset
        return self._data[offset : offset + source.num_bytes]


def _rewrite_apart(change: Transaction, one: RoundChange, staying: Staying) -> RoundRow:
    """Change a round whose vectors lie in files of their own; return its row."""
    row, index, settings = one.row, one.row.round, change.settings
    if one.step is not None:
        part = change.new(step_name(index), one.step, settings.step_dtype)
        [(file, [step])] = change.write_apart([[part]])
        assert row.file is not None
        change.remove_file(row.file)
        row = replace(row, file=file, step=step.packed())
    places: dict[int, tuple[int, bytes]] = {}
    by_file: dict[int, list[UpdateRow]] = {}
    updates = change.index.rows(UpdateRow, None, round=index)
    for update in updates:
        if update.file is not None and update.array is not None:
            by_file.setdefault(update.file, []).append(update)
            places[update.client] = (update.file, update.array)
    gone = one.erased | one.dropped
    for file, own in by_file.items():
        left = [update for update in own if update.client not in gone]
        if len(left) == len(own):
            continue
        change.remove_file(file)
        parts = [_copied(change, file, update) for update in left]
        for new_file, stored in change.write_apart([parts] if parts else []):
            for update, place in zip(left, stored, strict=True):
                places[update.client] = (new_file, place.packed())
    left = [update for update in updates if update.client not in one.erased]
    new = [_rewritten(update, places, one) for update in left]
    if one.erased:
        new = staying.share_anew(index, new)
    change.index.replace(*new)
    row = replace(row, num_kept=sum(update.array is not None for update in new))
    return staying.sealed(row, new)


def _copied(change: Transaction, file: int, update: UpdateRow) -> Part:
    assert update.array is not None
    name = update_name(update.round, update.client)
    dtype = change.settings.update_dtype
    return change.copied(name, change.source(file, update.array, dtype, name))


def _small_file(change: Transaction, file: int) -> memoryview | None:
    """Return the bytes of a file that many rounds may share; None for a large one."""
    row = change.index.one(FileRow, file=file)
    if row.num_bytes > SHARED_BYTES:
        return None
    try:
        with change.files.opened(file, "a shared file") as opened:
            return memoryview(opened.read(row.num_bytes, 0, "a shared file"))
    except LedgerError:
        return None  # A reader of its vectors finds the damage.


def _rewritten(
    update: UpdateRow, places: Mapping[int, tuple[int, bytes]], one: RoundChange
) -> UpdateRow:
    """Return the row of an update after its round was rewritten."""
    if update.client in one.dropped:
        # Probability 0 says that it was not left out at random.
        return replace(update, file=None, array=None, keep_probability=0.0)
    file, array = places.get(update.client, (None, None))
    # Not dataclasses.replace, which takes longer than everything else here.
    return UpdateRow(
        update.client,
        update.round,
        update.share,
        update.keep_probability,
        file,
        array,
        update.norm,
        update.step_product,
        update.summed,
    )


def relink(
    change: Transaction, rows: Mapping[int, RoundRow], *, whole: bool = False
) -> None:
    """Write rows of rounds that changed, and the chains anew.

    Args:
        change: The transaction.
        rows: The rows, by round.
        whole: Whether to link all rounds anew, and not only from the first row on.
    """
    if not rows and not whole:
        return
    first = 0 if whole else min(rows)
    index = change.index
    if first:
        before = index.one(RoundRow, round=first - 1)
        chain, root_chain = before.chain, before.root_chain
    else:
        ledger = change.ledger_row
        chain, root_chain = first_link(ledger), first_root_link(ledger.ledger_id)
    last = index.counts[RoundRow.table] - 1
    linked = []
    for row in index.rows(RoundRow, (first, last)):
        new = rows.get(row.round, row)
        chain = link(chain, new.content)
        root_chain = root_link(root_chain, chain, new.root)
        linked.append(replace(new, chain=chain, root_chain=root_chain))
    index.replace(*linked)
    change.set(chain=chain)


def first_link(row: LedgerRow) -> bytes:
    """Return the chain before the first round."""
    initial = digest_in(row.initial)
    assert initial is not None
    dtypes = (row.update_dtype, row.step_dtype)
    return genesis(row.layout, *dtypes, row.aggregation, initial, row.optimizer)
