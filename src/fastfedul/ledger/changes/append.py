"""Adds a round: one image of its step and kept updates, the new model, and its rows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fastfedul.ledger.chain import content_of, link
from fastfedul.ledger.changes.adjust import add_adjustment
from fastfedul.ledger.changes.buffers import put_buffers
from fastfedul.ledger.changes.garbage import collect_garbage, surplus
from fastfedul.ledger.changes.pairs import keep_pairs
from fastfedul.ledger.changes.rewrite import step_name, update_name
from fastfedul.ledger.changes.server_state import put_state
from fastfedul.ledger.changes.sums import add_round
from fastfedul.ledger.checks import RecordedRound, RecordedUpdate
from fastfedul.ledger.roots import Roots, first_root_link, root_link
from fastfedul.ledger.store.arrays import Part, Stored
from fastfedul.ledger.store.entries import local_values, privacy_values
from fastfedul.ledger.store.schema import ClientRow, RoundRow, UpdateRow
from fastfedul.ledger.store.transaction import (
    SHARED_BYTES,
    Transaction,
    bytes_of,
    in_groups,
)
from fastfedul.records import ClientId

_FILES_OF_A_ROUND = 64
"""Into so many files, at most about, a round of very many clients is cut."""


def append_round(change: Transaction, recorded: RecordedRound) -> None:
    """Add a checked round to the ledger."""
    clients = _count_updates(change, recorded)
    numbers = {client.name: client.id for client in clients}
    with change.writing_model(recorded.model, "round"):
        if change.settings.history == "sums":
            placed = _Placed()
            keep_pairs(change, recorded, numbers)
            add_round(change, recorded, clients)
            collect_garbage(change, surplus(change))
        else:
            placed = _write_vectors(change, recorded, numbers)
            if recorded.noise is not None:
                add_adjustment(change, recorded.index + 1, recorded.noise)
        put_state(change, recorded.model.server, recorded.index + 1, given=False)
        put_buffers(change, recorded.buffers)
    sums_only = change.settings.history == "sums"
    rows = [
        UpdateRow(
            numbers[update.client],
            recorded.index,
            update.share,
            update.keep_probability,
            *placed.columns_of(update),
            None if update.vector is None else update.norm,
            update.step_product,
            int(sums_only),
        )
        for update in recorded.updates
    ]
    change.index.add(*rows)
    local = local_values(recorded.local)
    content = content_of(
        recorded.index,
        recorded.use,
        placed.step.digest if placed.step else None,
        local,
        [
            (u.client, u.share, u.keep_probability, placed.digest_of(u))
            for u in recorded.updates
        ],
    )
    chain = link(change.head.chain, content)
    ledger = change.ledger_row
    root = Roots(ledger).root(recorded.index, numbers)
    before = (
        change.index.one(RoundRow, round=recorded.index - 1).root_chain
        if recorded.index
        else first_root_link(ledger.ledger_id)
    )
    lr, momentum, batch_size, epochs = local
    change.index.add(
        RoundRow(
            round=recorded.index,
            num_updates=len(rows),
            num_kept=len(placed.updates),
            use=recorded.use,
            file=placed.file,
            start=placed.start,
            step=placed.step.packed() if placed.step else None,
            step_norm=recorded.step_norm,
            previous_product=recorded.previous_product,
            lr=lr,  # type: ignore[arg-type]
            momentum=momentum,  # type: ignore[arg-type]
            batch_size=batch_size,  # type: ignore[arg-type]
            epochs=epochs,  # type: ignore[arg-type]
            **privacy_values(recorded.privacy),
            content=content,
            chain=chain,
            root=root,
            root_chain=root_link(before, chain, root),
        )
    )
    change.set(chain=chain)


@dataclass(slots=True)
class _Placed:
    """Where the vectors of a round lie.

    Attributes:
        file: File of the step.
        start: Where the round's image begins in it; None if the step is alone there.
        step: The step.
        updates: File and place of each kept update.
    """

    file: int | None = None
    start: int | None = None
    step: Stored | None = None
    updates: dict[ClientId, tuple[int, Stored]] = field(default_factory=dict)

    def columns_of(self, update: RecordedUpdate) -> tuple[int | None, bytes | None]:
        if update.client not in self.updates:
            return None, None
        file, stored = self.updates[update.client]
        return file, stored.packed()

    def digest_of(self, update: RecordedUpdate) -> bytes | None:
        found = self.updates.get(update.client)
        return found[1].digest if found else None


def _count_updates(change: Transaction, recorded: RecordedRound) -> list[ClientRow]:
    """Return the rows of the clients that take part, with one round more."""
    found: list[ClientRow] = []
    new: list[ClientRow] = []
    for update in recorded.updates:
        row = change.index.client(update.client)
        if row is None:
            number = change.index.counts[ClientRow.table] + len(new) + 1
            row = ClientRow(number, update.client, "active")
            new.append(row)
        known = update.vector is not None
        row = replace(
            row,
            num_updates=row.num_updates + 1,
            num_kept=row.num_kept + int(update.kept),
            num_norms=row.num_norms + int(known),
            shares=row.shares + update.share,
            norms=row.norms + (update.norm if known else 0.0),
        )
        found.append(row)
    added = {row.id for row in new}
    change.index.add(*(row for row in found if row.id in added))
    change.index.replace(*(row for row in found if row.id not in added))
    return found


def _write_vectors(
    change: Transaction, recorded: RecordedRound, numbers: dict[ClientId, int]
) -> _Placed:
    settings, index = change.settings, recorded.index
    parts: list[Part] = [
        change.new(step_name(index), recorded.step, settings.step_dtype)
    ]
    kept = sorted(
        (u for u in recorded.updates if u.kept), key=lambda u: numbers[u.client]
    )
    for update in kept:
        assert update.vector is not None
        name = update_name(index, numbers[update.client])
        parts.append(change.new(name, update.vector, settings.update_dtype))
    names = [update.client for update in kept]
    whole = bytes_of(parts)
    if whole <= SHARED_BYTES:
        file, start, [step, *rest] = change.write_shared(parts)
        places = {name: (file, one) for name, one in zip(names, rest, strict=True)}
        return _Placed(file, start, step, places)
    most = max(SHARED_BYTES, whole // _FILES_OF_A_ROUND)
    images = ([parts[0]], *in_groups(parts[1:], most))
    (file, [step]), *others = change.write_apart(images)
    found = [(other, stored) for other, own in others for stored in own]
    return _Placed(file, None, step, dict(zip(names, found, strict=True)))
