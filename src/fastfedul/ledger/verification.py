"""Checks a ledger from end to end and says where it is damaged.

It finds what was changed by accident or by somebody who does not recompute the
digests. Against somebody who does, the end of the chain must be kept elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fastfedul.errors import LedgerDamagedError
from fastfedul.ledger.chain import content_of, genesis, link
from fastfedul.ledger.reader import LedgerReader
from fastfedul.ledger.store import arrays
from fastfedul.ledger.store.entries import fields, local_values
from fastfedul.ledger.store.folder import ARRAYS, unnamed
from fastfedul.ledger.store.index import Index
from fastfedul.ledger.store.request_rows import read_log, read_requests
from fastfedul.ledger.store.schema import COUNTED, REFERENCES, REQUEST_TABLES, digest_of

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
    index = ledger.index
    with index.reading():
        problems = list(_index_problems(index))
        if problems:
            return Verification(tuple(problems), 0, 0, 0, 0, "")
        head = fields("head", index.one("head", id=1))
        problems += _chain_problems(index, head)
        problems += _request_problems(index)
        problems += _reference_problems(index)
        rows = [fields("arrays", row) for row in index.rows("arrays")]
        folder = ledger.path / ARRAYS
        known = {arrays.file_name(row["array"]) for row in rows}
        strays, foreign = unnamed(ledger.path, known)
    # Files never change, so they are read without keeping the writer waiting.
    total = sum(row["num_bytes"] for row in rows)
    done = 0
    for row in rows:
        damage = _file_damage(folder, row)
        if damage:
            problems += _unless_removed(index, row["array"], damage)
        done += row["num_bytes"]
        if progress:
            progress(done, total)
    return Verification(
        tuple(problems),
        head["num_rounds"],
        len(rows),
        total,
        len(strays),
        head["chain"].hex(),
        tuple(foreign),
    )


def _unless_removed(index: Index, array: bytes, damage: str) -> Iterator[str]:
    """Yield the damage of a file that still belongs to the ledger."""
    with index.reading():
        if index.rows("arrays", None, array=array):
            yield f"{index.user_of(array)}: {damage}"


def _index_problems(index: Index) -> Iterator[str]:
    try:
        verdict = index.integrity()
        if verdict != "ok":
            yield f"{index.path}: {verdict.splitlines()[-1]}"
        if not index.is_as_defined():
            yield f"{index.path}: the definition of a table was changed"
        for table in ("ledger", "head", "policy", *COUNTED, *REQUEST_TABLES):
            yield from index.changed_rows(table)
        head = fields("head", index.one("head", id=1))
        index.one("policy", id=1)
    except LedgerDamagedError as error:
        yield str(error)
        return
    for table in COUNTED:
        found = index.count(table)
        if found != head[f"num_{table}"]:
            yield (
                f"the table {table} has {found} rows in place of {head[f'num_{table}']}"
            )


def _chain_problems(index: Index, head: dict[str, Any]) -> Iterator[str]:
    ledger = fields("ledger", index.one("ledger", id=1))
    found = [fields("clients", row) for row in index.rows("clients")]
    clients = {client["id"]: client for client in found}
    by_round: dict[int, list[tuple[str, float, float, bytes | None]]] = {}
    counts: dict[int, int] = {}
    for row in index.rows("updates"):
        update = fields("updates", row)
        if update["client"] not in clients:
            yield f"round {update['round']}: client number {update['client']} is lost"
            continue
        counts[update["client"]] = counts.get(update["client"], 0) + 1
        by_round.setdefault(update["round"], []).append(
            (
                clients[update["client"]]["name"],
                update["share"],
                update["keep_probability"],
                update["array"],
            )
        )
    chain = genesis(
        ledger["layout"],
        ledger["update_dtype"],
        ledger["step_dtype"],
        ledger["aggregation"],
        ledger["initial"],
    )
    for position, row in enumerate(index.rows("rounds")):
        round_ = fields("rounds", row)
        participants = sorted(by_round.get(round_["round"], []))
        content = content_of(
            round_["round"],
            round_["removed_share"],
            round_["use"],
            round_["step"],
            local_values(round_),
            participants,
        )
        chain = link(chain, content)
        if round_["round"] != position or len(participants) != round_["num_updates"]:
            yield f"round {position}: a row is missing or too many"
        elif content != round_["content"] or chain != round_["chain"]:
            yield f"round {position}: the hash chain is broken"
    if chain != head["chain"]:
        yield "the end of the hash chain is not the one recorded"
    for number, client in clients.items():
        if counts.get(number, 0) != client["num_updates"]:
            yield f"client {client['name']!r:.80} has lost or gained a round"
    previous = b""
    for row in index.rows("events"):
        if fields("events", row)["previous"] != previous:
            yield f"event {row[0]!r} of the log does not follow the one before"
        previous = digest_of(*row)


def _request_problems(index: Index) -> Iterator[str]:
    """Compare the requests with the log: each one applied is named by its entry."""
    try:
        requests = read_requests(index)
    except LedgerDamagedError as error:
        yield str(error)
        return
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
        yield f"request {number}: the table and the log disagree on what became of it"


def _reference_problems(index: Index) -> Iterator[str]:
    known = {row[0] for row in index.rows("arrays")}
    for table, column in REFERENCES:
        for row in index.rows(table):
            array = fields(table, row)[column]
            if array is not None and array not in known:
                yield f"{index.describe(table, row)} refers to an array that is lost"


def _file_damage(folder: Path, row: dict[str, Any]) -> str | None:
    path = folder / arrays.file_name(row["array"])
    try:
        if path.stat().st_size != row["num_bytes"]:
            return f"the file {path.name} has the wrong size"
        if arrays.file_digest(path) != row["array"]:
            return f"the file {path.name} was changed"
    except FileNotFoundError:
        return f"the file {path.name} is missing"
    except OSError as error:
        return f"the file {path.name} cannot be read: {error.strerror}"
    return None
