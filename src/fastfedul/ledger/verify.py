"""Checks a ledger from end to end and says where it is damaged.

It finds what was changed by accident or by somebody who does not recompute the
digests. Against somebody who does, the end of the chain must be kept elsewhere.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from fastfedul.errors import LedgerDamagedError, LedgerError
from fastfedul.ledger.chain import content_of, link
from fastfedul.ledger.changes.rewrite import first_link
from fastfedul.ledger.reader import LedgerReader
from fastfedul.ledger.roots import Roots, first_root_link, root_link
from fastfedul.ledger.store import arrays
from fastfedul.ledger.store.array_files import ArrayFile, file_name
from fastfedul.ledger.store.arrays import Source, Stored, digest_in
from fastfedul.ledger.store.differences import part_place, sum_place
from fastfedul.ledger.store.entries import BUFFERS_PLACE, local_values, state_place
from fastfedul.ledger.store.index import Index
from fastfedul.ledger.store.request_files import filing_problems
from fastfedul.ledger.store.request_rows import (
    digest_of_event,
    read_log,
    read_requests,
)
from fastfedul.ledger.store.schema import (
    COUNTED,
    ROWS,
    AdjustmentRow,
    ClientRow,
    EventRow,
    FileRow,
    HeadRow,
    LedgerRow,
    ModelRow,
    PairRow,
    PartRow,
    PolicyRow,
    RequestHeadRow,
    RoundRow,
    StateRow,
    UpdateRow,
)
from fastfedul.limits import require_type
from fastfedul.records import ClientState

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Verification:
    """What a check found.

    Attributes:
        problems: One line for each damage, with round and client where it has them.
        num_rounds: Rounds checked.
        num_files: Array files checked.
        num_bytes: Their bytes.
        num_strays: Files that belong to no round, left by an interrupted writer.
        chain: End of the hash chain, in hexadecimal.
        foreign: Names in the folder of arrays that are not the ledger's; they stay.
    """

    problems: tuple[str, ...]
    num_rounds: int
    num_files: int
    num_bytes: int
    num_strays: int
    chain: str
    foreign: tuple[str, ...] = ()


def verify(ledger: LedgerReader, progress: Progress | None = None) -> Verification:
    """Read every byte of a ledger and compare it with its digest.

    Args:
        ledger: An open ledger.
        progress: Called with bytes done and bytes in all.
    """
    require_type("a ledger to verify", ledger, LedgerReader, "an open ledger on disk")
    index = ledger.index
    with index.reading():
        problems = list(_index_problems(index))
        if problems:
            return Verification(tuple(problems), 0, 0, 0, 0, "")
        head = ledger.head
        contents = _Contents(ledger)
        problems += contents.problems
        problems += _chain_problems(index, head, contents)
        problems += _lineage_problems(index, head)
        problems += _request_problems(index)
        problems += _departure_problems(index, contents)
        files = index.rows(FileRow)
        problems += _file_problems(files, head, contents)
        strays, foreign = ledger.files.unnamed({row.file for row in files})
    # What is committed never changes, so it is read without keeping the writer waiting.
    total = sum(row.num_bytes for row in files)
    done = 0
    checked = ledger.files.each(lambda row: list(contents.damages(row)), files)
    for row, damages in zip(files, checked, strict=True):
        if damages:
            problems += _unless_removed(index, row, damages)
        done += row.num_bytes
        if progress:
            progress(done, total)
    return Verification(
        tuple(problems),
        head.num_rounds,
        len(files),
        total,
        len(strays),
        head.chain.hex(),
        tuple(foreign),
    )


def _unless_removed(index: Index, row: FileRow, damages: list[str]) -> Iterator[str]:
    """Yield the damage of a file that still belongs to the ledger."""
    with index.reading():
        if index.rows(FileRow, None, file=row.file):
            yield from damages


class _Contents:
    """What lies in which array file, by the rows of the index."""

    def __init__(self, ledger: LedgerReader) -> None:
        index, settings = ledger.index, ledger.settings
        self._files = ledger.files
        self.problems: list[str] = []
        self.clients = {row.id: row for row in index.rows(ClientRow)}
        self.rounds = index.rows(RoundRow)
        self.updates: dict[int, list[UpdateRow]] = {}
        self.size = settings.layout.size
        self._settings = settings
        self._models: dict[int, tuple[str, Stored]] = {}
        self._sources: dict[int, list[Source]] = {}
        for update in index.rows(UpdateRow):
            if update.client not in self.clients:
                self.problems.append(
                    f"round {update.round}: client number {update.client} is lost"
                )
            else:
                self.updates.setdefault(update.round, []).append(update)
        row, head = index.one(LedgerRow, id=1), ledger.head
        self._models[head.file] = ("the current model", Stored.unpacked(head.model))
        initial = Stored.unpacked(row.initial)
        self._models[row.file] = ("the initial model", initial)
        if head.buffers_file is not None and head.buffers is not None:
            sent = Stored.unpacked(head.buffers)
            self._models[head.buffers_file] = (BUFFERS_PLACE, sent)
        self._collect_rounds()
        self.num_parts: Counter[int] = Counter()
        for part in index.rows(PartRow):
            self.num_parts[part.client] += 1
            known = self.clients.get(part.client)
            place = part_place(known.name if known else str(part.client), part.round)
            self._add(part.file, part.array, settings.update_dtype, place)
        for pair in index.rows(PairRow):
            names = " and ".join(self._name(c) for c in (pair.client, pair.other))
            place = f"round {pair.round}, pair {names}"
            self._add(pair.file, pair.array, settings.update_dtype, place)
        for client in self.clients.values():
            if client.difference is not None:
                place = sum_place(client.name)
                self._add(client.file, client.difference, "float32", place)
        for row_ in index.rows(AdjustmentRow):
            place = f"adjustment at round {row_.round}"
            self._add(row_.file, row_.array, "float32", place)
        for state in index.rows(StateRow):
            self._add(state.file, state.array, "float32", state_place(state))

    def _name(self, number: int) -> str:
        known = self.clients.get(number)
        return f"{known.name!r:.80}" if known else f"number {number}"

    def _collect_rounds(self) -> None:
        settings = self._settings
        for round_ in self.rounds:
            index = round_.round
            if round_.file is not None and round_.step is not None:
                self._add(
                    round_.file,
                    round_.step,
                    settings.step_dtype,
                    f"round {index}, step",
                )
            for update in self.updates.get(index, ()):
                if update.array is not None:
                    place = f"round {index}, client {self._name(update.client)}"
                    self._add(update.file, update.array, settings.update_dtype, place)

    def _add(self, file: int | None, column: bytes, dtype: Any, place: str) -> None:
        if file is None:
            self.problems.append(f"{place} refers to a file that is lost")
            return
        source = Source(file, Stored.unpacked(column), dtype, self.size, place)
        self._sources.setdefault(file, []).append(source)

    def files(self) -> dict[int, str]:
        """Return every file that something lies in, with one thing that does."""
        found = {file: place for file, (place, _) in self._models.items()}
        return {f: str(own[0].place) for f, own in self._sources.items()} | found

    def _place_in(self, file: int) -> str:
        if file in self._models:
            return self._models[file][0]
        own = self._sources.get(file)
        return str(own[0].place) if own else f"file {file}"

    def live_bytes(self, file: int) -> int | None:
        """Return the bytes of the vectors in a file; None for a model."""
        if file in self._models:
            return None
        return sum(source.num_bytes for source in self._sources.get(file, ()))

    def damages(self, row: FileRow) -> Iterator[str]:
        """Yield a line for each wrong byte range of a file."""
        name, place = file_name(row.file), self._place_in(row.file)
        model = self._models.get(row.file)
        try:
            with self._files.opened_whole(row.file, row.num_bytes, place) as file:
                size = file.num_bytes()
                if size < row.num_bytes or (model and size > row.num_bytes):
                    yield f"{place}: the file {name} has the wrong size"
                elif model:
                    if arrays.whole_digest(file, place) != model[1].digest:
                        yield f"{place}: the file {name} was changed"
                else:
                    yield from self._damaged_vectors(file, row)
        except LedgerError as error:
            yield str(error)

    def _damaged_vectors(self, file: ArrayFile, row: FileRow) -> Iterator[str]:
        for source in self._sources.get(row.file, ()):
            damage = arrays.damage_of(file, source)
            if damage:
                yield damage
        around = arrays.header_damage(file, row)
        if around:
            yield f"{self._place_in(row.file)}: {around} in {file_name(row.file)}"


def _index_problems(index: Index) -> Iterator[str]:
    try:
        verdict = index.integrity()
        if verdict != "ok":
            yield f"{index.path}: {verdict.splitlines()[-1]}"
        if not index.is_as_defined():
            yield f"{index.path}: the definition of a table was changed"
        for row in ROWS:
            yield from index.changed_rows(row)
        head = index.one(HeadRow, id=1)
        index.one(PolicyRow, id=1)
        index.one(RequestHeadRow, id=1)
    except LedgerDamagedError as error:
        yield str(error)
        return
    for row in COUNTED:
        found, expected = index.count(row), getattr(head, f"num_{row.table}")
        if found != expected:
            yield f"the table {row.table} has {found} rows in place of {expected}"


def _lineage_problems(index: Index, head: HeadRow) -> Iterator[str]:
    """Yield where the models do not lead from the initial one to the current one."""
    models = index.rows(ModelRow)
    ledger = index.one(LedgerRow, id=1)
    ends = [models[0].model, models[-1].model] if models else []
    # Only an erasure may replace the initial model.
    erased = any("erase" in entry.event.kind for entry in read_log(index))
    kept = erased or digest_in(ledger.initial) == ledger.first
    if not kept or ends != [ledger.first, digest_in(head.model)]:
        yield "the lineage does not lead from the initial model to the current one"
    if [row.id for row in models] != list(range(1, len(models) + 1)):
        yield "a model of the lineage is missing"
    rounds = [row.at for row in models if row.origin == "round"]
    if rounds != list(range(head.num_rounds)):
        yield "the lineage has not one model for each round"
    made = {
        row.at: (before.model.hex(), row.model.hex())
        for before, row in itertools.pairwise(models)
        if row.origin == "forgetting"
    }
    said = {
        entry.number: (
            entry.event.details["model_before"],
            entry.event.details["model_after"],
        )
        for entry in read_log(index)
        if entry.event.kind.startswith("forget")
    }
    if made != said:
        yield "the lineage and the log differ about the models of a forgetting"


def _chain_problems(index: Index, head: HeadRow, contents: _Contents) -> Iterator[str]:
    ledger = index.one(LedgerRow, id=1)
    chain, roots = first_link(ledger), Roots(ledger)
    root_chain = first_root_link(ledger.ledger_id)
    for position, round_ in enumerate(contents.rounds):
        updates = contents.updates.get(round_.round, [])
        participants = sorted(
            (
                contents.clients[u.client].name,
                u.share,
                u.keep_probability,
                digest_in(u.array),
            )
            for u in updates
        )
        content = content_of(
            round_.round,
            round_.use,
            digest_in(round_.step),
            local_values(round_),
            participants,
        )
        chain = link(chain, content)
        kept = sum(u.array is not None for u in updates)
        counts = (round_.num_updates, round_.num_kept)
        if round_.round != position or (len(participants), kept) != counts:
            yield f"round {position}: a row is missing or too many"
        elif content != round_.content or chain != round_.chain:
            yield f"round {position}: the hash chain is broken"
        names = [name for name, *_ in participants]
        root_chain = root_link(root_chain, chain, round_.root)
        if (roots.root(round_.round, names), root_chain) != (
            round_.root,
            round_.root_chain,
        ):
            yield f"round {position}: the root over its participants is another"
    if chain != head.chain:
        yield "the end of the hash chain is not the one recorded"
    yield from _total_problems(contents)
    previous = b""
    for row in index.rows(EventRow):
        if row.previous != previous:
            yield f"event {row.id!r} of the log does not follow the one before"
        previous = digest_of_event(row)


def _total_problems(contents: _Contents) -> Iterator[str]:
    """Compare the totals of each client with its rows."""
    of_client: dict[int, list[UpdateRow]] = {}
    for updates in contents.updates.values():
        for update in updates:
            of_client.setdefault(update.client, []).append(update)
    for number, client in contents.clients.items():
        own = of_client.get(number, [])
        if len(own) != client.num_updates:
            yield f"client {client.name!r:.80} has lost or gained a round"
            continue
        norms = [u.norm for u in own if u.norm is not None]
        counts = (
            sum(u.array is not None for u in own),
            sum(u.summed for u in own),
            len(norms),
        )
        told = (client.num_kept, client.num_summed, client.num_norms)
        sums = (
            math.fsum(u.share for u in own),
            math.fsum(norms),
            math.fsum(u.share * (u.norm or 0.0) for u in own if u.summed),
        )
        told_sums = (client.shares, client.norms, client.contribution)
        near = all(
            math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
            for a, b in zip(sums, told_sums, strict=True)
        )
        if counts != told or not near:
            yield f"client {client.name!r:.80} has totals that its rounds do not have"
            continue
        parts = 0 if client.difference is not None else client.num_summed
        if contents.num_parts[number] != parts:
            yield f"client {client.name!r:.80} has lost or gained a part of its sum"


def _departure_problems(index: Index, contents: _Contents) -> Iterator[str]:
    """Compare the clients' states with the log: an old row brings a client back."""
    states: dict[str, ClientState] = {}
    for entry in read_log(index):
        erases = "erase" in entry.event.kind
        if not erases and not entry.event.kind.startswith("forget"):
            continue
        for name in entry.event.clients:
            gone = erases or states.get(name) == "erased"
            states[name] = "erased" if gone else "forgotten"
    for client in contents.clients.values():
        logged = states.get(client.name, "active")
        if client.state != logged:
            yield (
                f"client {client.name!r:.80} is {client.state}, and {logged} by the log"
            )


def _file_problems(
    files: list[FileRow], head: HeadRow, contents: _Contents
) -> Iterator[str]:
    """Compare the table of files with what lies in them."""
    known = {row.file for row in files}
    for file, place in contents.files().items():
        if file not in known:
            yield f"{place} refers to a file that is lost"
    for row in files:
        live = contents.live_bytes(row.file)
        if live is not None and live != row.live_bytes:
            yield f"file {row.file} in the index does not hold what it says"
    totals = (sum(r.num_bytes for r in files), sum(r.live_bytes for r in files))
    if totals != (head.array_bytes, head.live_bytes):
        yield "the index does not know how many bytes its files have"


def _request_problems(index: Index) -> Iterator[str]:
    """Compare the requests with the log: each one applied is named by its entry."""
    try:
        requests = read_requests(index)
    except LedgerDamagedError as error:
        yield str(error)
        return
    head = index.one(RequestHeadRow, id=1)
    own = index.one(LedgerRow, id=1)
    yield from filing_problems(index.path.parent, own, head.num_filings)
    applied = {
        (request.number, request.event)
        for request in requests
        if request.state == "applied"
    }
    logged = {
        (asked["request"], entry.number)
        for entry in read_log(index)
        for asked in cast(Any, entry.event.details.get("requests", ()))
    }
    for number, _ in sorted(applied ^ logged):
        yield f"request {number}: the table and the log disagree on its outcome"
