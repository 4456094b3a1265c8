"""The tables of the index as typed rows, and the digest that every row carries."""

from __future__ import annotations

import struct
import types
import typing
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, ClassVar, cast

from blake3 import blake3

from fastfedul.records import (
    ClientState,
    History,
    KeepUse,
    ModelOrigin,
    RequestState,
    StorageDtype,
)

Value = None | int | float | str | bytes

FORMAT = 5
"""Version of the format; a reader refuses any other."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the index; the fields are the columns, in their order.

    Attributes:
        table: Name of the table.
        key: How many columns, from the first, tell the rows apart.
    """

    table: ClassVar[str]
    key: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class LedgerRow(Row):
    """Decisions of the ledger's creation, and its initial model.

    `first` is the digest of the initial model that the ledger was created with. An
    erasure replaces `file` and `initial`.
    """

    table: ClassVar[str] = "ledger"

    id: int
    format: int
    layout: str
    update_dtype: StorageDtype
    step_dtype: StorageDtype
    aggregation: str
    file: int
    initial: bytes
    ledger_id: str
    federation: str | None
    receipt_secret: bytes
    first: bytes
    optimizer: str | None


@dataclass(frozen=True, slots=True)
class ClientRow(Row):
    """A client, with totals over its rows in `updates`, and its sum if there is one.

    `num_dropped` counts the updates that the ledger gave up. `contribution` is the
    sum of share times norm over the updates that are in the client's vectors; it is 0
    in a ledger of rounds.
    """

    table: ClassVar[str] = "clients"

    id: int
    name: str
    state: ClientState
    num_updates: int = 0
    num_kept: int = 0
    num_summed: int = 0
    num_norms: int = 0
    shares: float = 0.0
    norms: float = 0.0
    forgotten_at: int | None = None
    file: int | None = None
    difference: bytes | None = None
    num_dropped: int = 0
    contribution: float = 0.0


@dataclass(frozen=True, slots=True)
class RoundRow(Row):
    """A round.

    The step and the kept updates of a small round are one image, which begins at
    `start` of `file`. For a large round `start` is None: the step is alone in `file`,
    and the updates lie in files of their own. `root` is the Merkle root over the
    participants, and `root_chain` covers all roots and the chain up to here.
    """

    table: ClassVar[str] = "rounds"

    round: int
    num_updates: int
    num_kept: int
    use: KeepUse
    file: int | None
    start: int | None
    step: bytes | None
    step_norm: float | None
    previous_product: float
    lr: float | None
    momentum: float | None
    batch_size: int | None
    epochs: float | None
    clipping_norm: float | None
    noise_stdev: float | None
    next_clipping_norm: float | None
    content: bytes
    chain: bytes
    root: bytes
    root_chain: bytes


@dataclass(frozen=True, slots=True)
class UpdateRow(Row):
    """One client's part in one round."""

    table: ClassVar[str] = "updates"
    key: ClassVar[int] = 2

    client: int
    round: int
    share: float
    keep_probability: float
    file: int | None
    array: bytes | None
    norm: float | None
    step_product: float | None
    summed: int


@dataclass(frozen=True, slots=True)
class PartRow(Row):
    """One round's part of the difference of a client that has no sum yet."""

    table: ClassVar[str] = "parts"
    key: ClassVar[int] = 2

    client: int
    round: int
    file: int
    array: bytes


@dataclass(frozen=True, slots=True)
class PairRow(Row):
    """A kept difference of two clients' updates of one round."""

    table: ClassVar[str] = "pairs"
    key: ClassVar[int] = 3

    round: int
    client: int
    other: int
    priority: float
    odds: float
    file: int
    array: bytes


@dataclass(frozen=True, slots=True)
class FileRow(Row):
    """An array file.

    Bytes of the file that count, bytes of the vectors in it that count, and a checksum
    over the headers of its images, each taken with the checksum before it.
    """

    table: ClassVar[str] = "files"

    file: int
    num_bytes: int
    live_bytes: int
    headers: bytes


@dataclass(frozen=True, slots=True)
class AdjustmentRow(Row):
    """A correction of the model from some round on."""

    table: ClassVar[str] = "adjustments"

    round: int
    file: int
    array: bytes


@dataclass(frozen=True, slots=True)
class StateRow(Row):
    """One vector of the server optimizer's state before a round.

    `steps` counts the steps that led to the state. `given` is 1 if a forgetting set the
    state: it stays. Else it is the state now, and gives way to the next round's.
    """

    table: ClassVar[str] = "states"
    key: ClassVar[int] = 2

    round: int
    number: int
    steps: int
    given: int
    file: int
    array: bytes


@dataclass(frozen=True, slots=True)
class EventRow(Row):
    """An entry of the log."""

    table: ClassVar[str] = "events"

    id: int
    time: str
    kind: str
    clients: str
    details: str
    previous: bytes


@dataclass(frozen=True, slots=True)
class ModelRow(Row):
    """A model that the ledger has or had; it was made from the model before it."""

    table: ClassVar[str] = "models"

    id: int
    model: bytes
    origin: ModelOrigin
    at: int


@dataclass(frozen=True, slots=True)
class HeadRow(Row):
    """Where the ledger stands, and how many rows the other tables have.

    `buffers` says where the buffers of the last round's clients lie in `buffers_file`.
    """

    table: ClassVar[str] = "head"

    id: int
    chain: bytes
    file: int
    model: bytes
    buffers_file: int | None
    buffers: bytes | None
    pair_limit: float
    next_file: int
    open_file: int | None
    array_bytes: int
    live_bytes: int
    num_clients: int
    num_rounds: int
    num_updates: int
    num_parts: int
    num_pairs: int
    num_files: int
    num_adjustments: int
    num_states: int
    num_events: int
    num_models: int


@dataclass(frozen=True, slots=True)
class RequestRow(Row):
    """Somebody asked for a client to be forgotten.

    `client` is None if a filing did not fit the ledger; the request is refused then.
    """

    table: ClassVar[str] = "requests"

    id: int
    client: int | None
    asked: str
    reason: str | None
    state: RequestState
    decided: str | None
    answer: str | None
    event: int | None
    method: str | None
    settings: str | None


@dataclass(frozen=True, slots=True)
class RequestHeadRow(Row):
    """How many requests there are, how many of them wait, and from how many filings."""

    table: ClassVar[str] = "request_head"

    id: int
    num_requests: int
    num_waiting: int
    num_filings: int


@dataclass(frozen=True, slots=True)
class PolicyRow(Row):
    """What the ledger keeps, and how many bytes that may take."""

    table: ClassVar[str] = "policy"

    id: int
    history: History
    budget: int | None
    sums_from: int = 1


@dataclass(frozen=True, slots=True)
class PlaceRow(Row):
    """Where the array files lie: None for the ledger's own folder.

    `owner` is the name of the one folder that may write to that address.
    """

    table: ClassVar[str] = "place"

    id: int
    address: str | None
    owner: str | None


ROWS: tuple[type[Row], ...] = (
    LedgerRow,
    ClientRow,
    RoundRow,
    UpdateRow,
    PartRow,
    PairRow,
    FileRow,
    AdjustmentRow,
    StateRow,
    EventRow,
    ModelRow,
    HeadRow,
    RequestRow,
    RequestHeadRow,
    PolicyRow,
    PlaceRow,
)
"""Every table."""

COUNTED = (
    ClientRow,
    RoundRow,
    UpdateRow,
    PartRow,
    PairRow,
    FileRow,
    AdjustmentRow,
    StateRow,
    EventRow,
    ModelRow,
)
"""Tables whose rows the head counts.

Requests have a head of their own, so that nobody but the one writer ever touches the
writer's head.
"""

_TYPES = {int: "INTEGER", float: "REAL", str: "TEXT", bytes: "BLOB"}

NAMES_AGAIN = "clients_again"
"""A second index of the clients' names.

SQLite finds rows by pointers that have no digest. That a name is in neither index says
that there is no such client, also where one byte of the file was changed.
"""

_INDEXES = (
    "CREATE INDEX updates_by_round ON updates (round, client)",
    f"CREATE INDEX {NAMES_AGAIN} ON clients (name, id)",
    "CREATE INDEX rounds_by_file ON rounds (file)",
    "CREATE INDEX clients_by_file ON clients (file)",
    "CREATE INDEX parts_by_file ON parts (file)",
    "CREATE INDEX pairs_by_file ON pairs (file)",
    "CREATE INDEX files_by_use ON files (live_bytes * 1.0 / num_bytes)",
    "CREATE INDEX clients_by_contribution ON clients (contribution, id)"
    " WHERE num_summed > 0 AND state = 'active'",
    "CREATE INDEX rounds_with_updates ON rounds (round) WHERE num_kept > 0",
    "CREATE INDEX requests_by_state ON requests (state)",
)


_COLUMNS = {row.table: tuple(field.name for field in fields(row)) for row in ROWS}
_GETTERS = {table: attrgetter(*columns) for table, columns in _COLUMNS.items()}


def names(row: type[Row]) -> tuple[str, ...]:
    """Return the column names of a table, without the digest."""
    return _COLUMNS[row.table]


def key_names(row: type[Row]) -> tuple[str, ...]:
    """Return the columns that tell the rows of a table apart."""
    return names(row)[: row.key]


def values_of(row: Row) -> tuple[Value, ...]:
    """Return a row as SQLite will give it back: it has no negative zero."""
    values = _GETTERS[row.table](row)
    return tuple([v + 0.0 if type(v) is float else v for v in values])


def canonical(*values: Any) -> bytes:
    """Return values as unambiguous bytes.

    First how many values there are and a letter for the type of each; then 8 bytes for
    each value that is not None: an integer, a real, or the length of a text or blob;
    then the texts and blobs.
    """
    types_ = tuple(map(type, values))
    known = _FORMS.get(types_)
    if known is None:
        known = _FORMS[types_] = _form_of(types_)
    letters, fixed, present, sized = known
    if not sized:
        return letters + fixed.pack(*[values[i] for i in present])
    taken = list(values)
    data = []
    for i in sized:
        value = taken[i]
        value = value.encode() if type(value) is str else value
        taken[i] = len(value)
        data.append(value)
    return b"".join((letters, fixed.pack(*[taken[i] for i in present]), *data))


_LETTERS = {bytes: "B", int: "I", float: "F", str: "T", types.NoneType: "N"}
_Form = tuple[bytes, struct.Struct, tuple[int, ...], tuple[int, ...]]
_FORMS: dict[tuple[type, ...], _Form] = {}


def _form_of(kinds: tuple[type, ...]) -> _Form:
    """Return letters, layout, and which values are present and which have a length."""
    for kind in kinds:
        if kind not in _LETTERS:
            raise TypeError(f"{kind.__name__} has no canonical form")
    letters = "".join(_LETTERS[kind] for kind in kinds).encode()
    present = tuple(i for i, kind in enumerate(kinds) if kind is not types.NoneType)
    sized = tuple(i for i in present if kinds[i] in (str, bytes))
    fixed = "".join("d" if kinds[i] is float else "q" for i in present)
    prefix = len(kinds).to_bytes(8, "little") + letters
    return prefix, struct.Struct(f"<{fixed}"), present, sized


def digest_of(*values: Value) -> bytes:
    """Return the BLAKE3 digest of values in their canonical form."""
    return blake3(canonical(*values)).digest()


def definitions() -> list[str]:
    """Return the statements that create the tables and indexes."""
    return [*(_definition(row) for row in ROWS), *_INDEXES]


def catalogue() -> set[tuple[str, str, str, str]]:
    """Return the rows of SQLite's catalogue for the tables and indexes."""
    return {_catalogued(statement) for statement in definitions()}


def _definition(row: type[Row]) -> str:
    hints = typing.get_type_hints(row)
    columns = [f"{name} {_sql_type(hints[name])}" for name in names(row)]
    rowid = ""
    if row.key == 1:
        columns[0] += " PRIMARY KEY"
    else:
        columns.append("digest BLOB")
        columns.append(f"PRIMARY KEY ({', '.join(key_names(row))})")
        rowid = " WITHOUT ROWID"
    if row is ClientRow:
        columns[names(row).index("name")] += " UNIQUE"
    if row.key == 1:
        columns.append("digest BLOB")
    return f"CREATE TABLE {row.table} ({', '.join(columns)}){rowid}"


def _sql_type(hint: Any) -> str:
    """Return SQLite's type of a column, given the type of the field."""
    options = typing.get_args(hint) if _is_union(hint) else (hint,)
    [one] = {_plain(option) for option in options if option is not types.NoneType}
    return _TYPES[one]


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _plain(hint: Any) -> type:
    # A literal is one of some texts.
    return str if typing.get_origin(hint) is typing.Literal else cast(type, hint)


def _catalogued(statement: str) -> tuple[str, str, str, str]:
    """Return the row of SQLite's catalogue that a statement creates."""
    _, kind, name, *rest = statement.split()
    table = rest[1] if kind == "INDEX" else name
    return kind.lower(), name, table, statement
