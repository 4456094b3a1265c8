"""A reader written from docs/ledger-format.md alone, and what it finds in ledgers."""

from __future__ import annotations

import hmac
import json
import math
import sqlite3
import struct
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from blake3 import blake3
from xxhash import xxh3_64_digest

from fastfedul import DiskLedger, LedgerReader, add_request, cancel_request, forget
from fastfedul.federation.server_optimizers import ServerOptimizer
from fastfedul.ledger.protocol import vector as stored_vector
from fastfedul.ledger.store.codec import STORAGE_DTYPES
from fastfedul.ledger.verify import verify
from fastfedul.params import Layout
from fastfedul.records import History, StorageDtype, VectorRef
from tests.support.disk_ledgers import (
    initial_model,
    round_of,
    round_with_buffers,
    with_buffers,
)

Row = dict[str, Any]
PAGE = (Path(__file__).parents[2] / "docs" / "ledger-format.md").read_text()


def canonical(*values: object) -> bytes:
    letters, fixed, data = b"", b"", b""
    for value in values:
        if value is None:
            letters += b"N"
        elif isinstance(value, int):
            letters, fixed = letters + b"I", fixed + struct.pack("<q", value)
        elif isinstance(value, float):
            letters, fixed = letters + b"F", fixed + struct.pack("<d", value)
        else:
            raw = value.encode() if isinstance(value, str) else value
            assert isinstance(raw, bytes)
            letters += b"T" if isinstance(value, str) else b"B"
            fixed += struct.pack("<q", len(raw))
            data += raw
    return struct.pack("<q", len(values)) + letters + fixed + data


def digest(*values: object) -> bytes:
    return blake3(canonical(*values)).digest()


def columns_on_the_page() -> dict[str, list[str]]:
    """The columns of each table, in their order, from the table of tables."""
    found = {}
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and cells[1].startswith("**"):
            names = [part.split("=")[0].strip(" *") for part in cells[1].split(",")]
            found[cells[0].strip("`")] = names
    return found


class PageReader:
    """Reads and checks a ledger as the page says, with no code of the library."""

    def __init__(self, path: Path) -> None:
        self.path = path
        connection = sqlite3.connect(path / "index.sqlite")
        self.tables: dict[str, list[Row]] = {}
        for table, names in columns_on_the_page().items():
            cursor = connection.execute(f"SELECT * FROM {table}")
            assert [column[0] for column in cursor.description] == [*names, "digest"]
            self.tables[table] = []
            for *values, found in cursor:
                assert found == digest(table, *values), table
                self.tables[table].append(dict(zip(names, values, strict=True)))
        connection.close()
        [self.ledger] = self.tables["ledger"]
        [self.head] = self.tables["head"]
        assert self.ledger["format"] == 5
        for table, rows in self.tables.items():
            if f"num_{table}" in self.head:
                assert self.head[f"num_{table}"] == len(rows)
        layout = json.loads(self.ledger["layout"])
        self.size = sum(math.prod(shape) for _, shape, _ in layout)

    def content(self, number: int) -> bytes:
        return (self.path / "arrays" / f"{number:08d}.safetensors").read_bytes()

    def vector(
        self, number: int, column: bytes, dtype: StorageDtype
    ) -> npt.NDArray[np.float32]:
        """A stored vector, its digest and every checksum compared."""
        [start] = struct.unpack_from("<q", column)
        width = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}[dtype]
        num_scales = -(-self.size // 1024) if dtype in ("float16", "int8") else 0
        stop = start + 4 * num_scales + self.size * width
        data = self.content(number)[start:stop]
        assert blake3(data).digest() == column[8:40]
        scales, values = data[: 4 * num_scales], data[4 * num_scales :]
        for block in range(-(-self.size // 65_536)):
            own = scales[256 * block : 256 * (block + 1)] if num_scales else b""
            first = 65_536 * width * block
            own += values[first : first + 65_536 * width]
            assert xxh3_64_digest(own) == column[40 + 8 * block : 48 + 8 * block]
        assert len(column) == 40 + 8 * -(-self.size // 65_536)
        if dtype == "float32":
            return np.frombuffer(values, "<f4")
        if dtype == "bfloat16":
            wide = np.frombuffer(values, "<u2").astype(np.uint32) << 16
            floats: npt.NDArray[np.float32] = wide.view(np.float32)
            return floats
        stored = np.frombuffer(values, "<f2" if dtype == "float16" else "i1")
        factors = np.repeat(np.frombuffer(scales, "<f4"), 1024)[: self.size]
        decoded: npt.NDArray[np.float32] = stored.astype(np.float32) * factors
        return decoded

    def buffers(self) -> dict[str, npt.NDArray[Any]]:
        """The buffers of the last round's clients; digest and checksums compared."""
        number, column = self.head["buffers_file"], self.head["buffers"]
        data = self.content(number)
        assert column[:8] == bytes(8)
        assert blake3(data).digest() == column[8:40]
        begin = 8 + int.from_bytes(data[:8], "little")
        checksums = map(xxh3_64_digest, (data[:begin], data[begin:]))
        assert b"".join(checksums) == column[40:]
        dtypes = {"F32": "<f4", "I64": "<i8"}
        return {
            name: np.frombuffer(
                data[slice(*(begin + at for at in entry["data_offsets"]))],
                dtypes[entry["dtype"]],
            ).reshape(entry["shape"])
            for name, entry in json.loads(data[8:begin]).items()
        }

    def model(self, number: int, column: bytes) -> npt.NDArray[np.float32]:
        """The flat vector of a model; its digest and checksums compared."""
        data = self.content(number)
        assert column[:8] == bytes(8)
        assert blake3(data).digest() == column[8:40]
        begin = 8 + int.from_bytes(data[:8], "little")
        assert begin % 64 == 0
        end = begin + 4 * self.size
        pieces = [data[:begin]]
        for first in range(begin, end, 4 * 65_536):
            pieces.append(data[first : min(end, first + 4 * 65_536)])
        pieces += [data[end:]] if data[end:] else []
        assert b"".join(map(xxh3_64_digest, pieces)) == column[40:]
        return np.frombuffer(data[begin:end], "<f4")

    def chains(self) -> Iterator[bytes]:
        """The chain before the first round, and after each."""
        ledger = self.ledger
        dtypes = (ledger["update_dtype"], ledger["step_dtype"])
        names = {row["id"]: row["name"] for row in self.tables["clients"]}
        chain = digest(
            "genesis",
            ledger["layout"],
            *dtypes,
            ledger["aggregation"],
            *filter(None, [ledger["optimizer"]]),
            ledger["initial"][8:40],
        )
        roots = digest("roots", ledger["ledger_id"])
        yield chain
        for row in self.tables["rounds"]:
            participants = sorted(
                (names[u["client"]], u["share"], u["keep_probability"], inner(u))
                for u in self.tables["updates"]
                if u["round"] == row["round"]
            )
            content = digest(
                "round",
                *(row[name] for name in ("round", "use")),
                row["step"] and row["step"][8:40],
                *(row[name] for name in ("lr", "momentum", "batch_size", "epochs")),
                *(part for participant in participants for part in participant),
            )
            chain = digest("link", chain, content)
            assert (content, chain) == (row["content"], row["chain"])
            tags = sorted(self.tag(name, row["round"]) for name, *_ in participants)
            assert row["root"] == root(tags)
            roots = digest("root", roots, chain, row["root"])
            assert roots == row["root_chain"]
            yield chain

    def tag(self, client: str, index: int) -> bytes:
        """A client's tag in a round."""
        secret = hmac.digest(self.ledger["receipt_secret"], client.encode(), "sha256")
        text = f"fastfedul participation {self.ledger['ledger_id']} {index}"
        return hmac.digest(secret, text.encode(), "sha256")


def root(tags: list[bytes]) -> bytes:
    """The root over sorted tags, by docs/reference/certificate-format.md."""

    def top(some: list[bytes]) -> bytes:
        if len(some) == 1:
            return sha256(b"\0" + some[0]).digest()
        half = 1
        while 2 * half < len(some):
            half *= 2
        return sha256(b"\1" + top(some[:half]) + top(some[half:])).digest()

    size = len(tags).to_bytes(8, "big")
    return sha256(b"\2" + size + (top(tags) if tags else b"")).digest()


def inner(update: Row) -> bytes | None:
    array: bytes | None = update["array"]
    return None if array is None else array[8:40]


def tensors_of(content: bytes) -> Iterator[tuple[int, str, int, int]]:
    """Start of each image, and name, begin and end of each of its tensors."""
    start = 0
    while start < len(content):
        data = start + 8 + int.from_bytes(content[start : start + 8], "little")
        header = json.loads(content[start + 8 : data])
        end = data
        for name, entry in header.items():
            begin, end = (data + at for at in entry["data_offsets"])
            yield start, name, begin, end
        start = -(-end // 4096) * 4096


def build(path: Path, layout: Layout, **options: Any) -> None:
    start = initial_model(layout)
    with DiskLedger.create(path, start, sums_from=2, **options) as ledger:
        for index in range(5):
            dropped = frozenset({"d"} if index == 2 else ())
            ledger.append(round_of(index, layout=layout, dropped=dropped))
        add_request(path, "b", "consent withdrawn")
        forget(ledger, ["b"], erase=True)
        ledger.append(round_of(5, layout=layout, clients=("a", "c", "d", "new")))


@pytest.mark.parametrize("history", ["rounds", "sums"])
@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
@pytest.mark.parametrize(
    "size", [37, 300_000, pytest.param(2_500, marks=pytest.mark.slow)]
)
def test_a_reader_by_the_page_finds_what_the_library_finds(
    size: int, dtype: StorageDtype, history: History, tmp_path: Path
) -> None:
    """Of small rounds and, with 300,000 values, of large ones."""
    layout = Layout.of({"weight": np.zeros((size - 7,)), "bias": np.zeros(7)})
    path = tmp_path / "ledger"
    build(path, layout, update_dtype=dtype, step_dtype=dtype, history=history)
    page = PageReader(path)
    assert page.size == size
    with LedgerReader(path) as reader:
        [*_, last] = page.chains()
        assert last == reader.chain == page.head["chain"]
        final = page.model(page.head["file"], page.head["model"])
        np.testing.assert_array_equal(final, reader.final.params.flat)
        first = page.model(page.ledger["file"], page.ledger["initial"])
        np.testing.assert_array_equal(first, reader.initial.params.flat)
        assert page.ledger["file"] != 1
        assert page.tables["adjustments"] == []
        names = {row["id"]: row["name"] for row in page.tables["clients"]}
        found = []
        for row in page.tables["rounds"]:
            if row["step"] is not None:
                ref = VectorRef(row["round"])
                found.append((ref, row["file"], row["step"], f"{row['round']}.step"))
        for row in page.tables["updates"]:
            if row["array"] is not None:
                ref = VectorRef(row["round"], names[row["client"]])
                name = f"{row['round']}.update.{row['client']}"
                found.append((ref, row["file"], row["array"], name))
        for row in page.tables["pairs"]:
            ref = VectorRef(row["round"], names[row["client"]], names[row["other"]])
            name = f"{row['round']}.pair.{row['client']}.{row['other']}"
            found.append((ref, row["file"], row["array"], name))
        assert len(found) > 10
        for ref, file, column, name in found:
            own = page.vector(file, column, dtype)
            np.testing.assert_array_equal(own, stored_vector(reader, ref))
            assert name in names_at(page, file, column)
        for row in page.tables["clients"]:
            if row["difference"] is not None:
                own = page.vector(row["file"], row["difference"], "float32")
                same = reader.own_difference(row["name"])
                np.testing.assert_array_equal(own, same)
                assert f"sum.{row['id']}" in names_at(
                    page, row["file"], row["difference"]
                )

        for row in page.tables["parts"]:
            own = page.vector(row["file"], row["array"], dtype)
            same = reader.own_difference(names[row["client"]])
            np.testing.assert_array_equal(own, same)
            name = f"{row['round']}.part.{row['client']}"
            assert name in names_at(page, row["file"], row["array"])
        parted = {names[row["client"]] for row in page.tables["parts"]}
        assert parted == ({"new"} if history == "sums" else set())


def names_at(page: PageReader, file: int, column: bytes) -> set[str]:
    """What the header of an image calls the vector that begins where a column says."""
    [start] = struct.unpack_from("<q", column)
    found = {
        name.removesuffix(".scales")
        for _, name, begin, _ in tensors_of(page.content(file))
        if begin == start
    }
    assert len(found) == 1
    return found


def test_the_events_are_a_chain_as_the_page_says(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    build(path, Layout.of({"w": np.zeros(37)}))
    with DiskLedger(path) as ledger:
        forget(ledger, ["a"], erase=False)
    events = PageReader(path).tables["events"]
    assert [event["kind"] for event in events] == ["forget and erase", "forget"]
    assert events[0]["previous"] == b""
    assert events[1]["previous"] == digest(*events[0].values())
    [asked] = PageReader(path).tables["requests"]
    assert (asked["state"], asked["event"]) == ("applied", 1)


def test_a_reader_by_the_page_finds_the_filings(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    build(path, Layout.of({"w": np.zeros(37)}))
    add_request(path, "c", "moved away", method="fast-fedul")
    cancel_request(path, 2)
    page = PageReader(path)
    [head] = page.tables["request_head"]
    numbers = {row["id"]: row["name"] for row in page.tables["clients"]}

    def keyed(*values: object) -> str:
        key = page.ledger["receipt_secret"]
        return blake3(canonical(*values), key=key).hexdigest()

    found = []
    for number, file in enumerate(sorted((path / "requests").iterdir()), 1):
        assert file.name == f"{number:08d}.json"
        text, own = file.read_text().splitlines()
        assert own == keyed("filing", page.ledger["ledger_id"], number, text)
        found.append(json.loads(text))
    assert [one["kind"] for one in found] == ["ask", "answer", "ask", "cancel"]
    assert (found[1]["requests"], found[3]["request"]) == ([1], 2)
    assert head["num_filings"] == 2
    [*_, asked, _] = found
    assert (numbers[asked["client"]], asked["reason"]) == ("c", "moved away")
    assert asked["method"] == "fast-fedul"
    assert asked["who"] == keyed("client", page.ledger["ledger_id"], "c")
    assert asked["who"] == found[3]["who"]


@pytest.mark.parametrize("history", ["rounds", "sums"])
def test_after_an_erasure_exactly_what_the_page_says_remains(
    history: History, tmp_path: Path
) -> None:
    path = tmp_path / "ledger"
    build(path, Layout.of({"w": np.zeros(37)}), history=history)
    page = PageReader(path)
    [row] = [row for row in page.tables["clients"] if row["name"] == "b"]
    rest = {k: v for k, v in row.items() if k not in ("id", "name")}
    assert rest.pop("state") == "erased"
    assert rest.pop("forgotten_at") == 5
    assert not any(rest.values())
    places = {
        (table, column)
        for table, rows in page.tables.items()
        for one in rows
        for column, value in one.items()
        if (isinstance(value, str) and '"b"' in value) or value == "b"
    }
    assert places == {("clients", "name"), ("events", "clients")}
    numbered = {
        (table, column)
        for table, rows in page.tables.items()
        for one in rows
        for column in ("client", "other")
        if one.get(column) == row["id"]
    }
    assert numbered == {("requests", "client")}
    for index in range(6):
        shares = [u["share"] for u in page.tables["updates"] if u["round"] == index]
        assert sum(shares) == pytest.approx(1, abs=1e-12)
    own = [f'.update.{row["id"]}"', f'sum.{row["id"]}"', f'.{row["id"]}"']
    for file in (path / "arrays").iterdir():
        content = file.read_bytes()
        assert not any(name.encode() in content for name in own), file.name


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_a_reader_by_the_page_finds_the_states_of_the_server(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / "ledger"
    optimizer = ServerOptimizer.make(name, lr=0.1)
    with DiskLedger.create(path, initial_model(), optimizer=optimizer) as ledger:
        for index in range(3):
            ledger.append(round_of(index))
        forget(ledger, ["b"])
        ledger.append(round_of(3, clients=("a", "c")))
    page = PageReader(path)
    with LedgerReader(path) as reader:
        [*_, last] = page.chains()
        assert last == reader.chain
        now, given = reader.final.server, reader.server_states()[3]
        rows = page.tables["states"]
        assert now is not None
        assert len(rows) == 2 * optimizer.num_vectors
        for row in rows:
            wanted = given if row["given"] else now
            own = page.vector(row["file"], row["array"], "float32")
            np.testing.assert_array_equal(own, wanted.vectors[row["number"]])
            assert row["steps"] == wanted.steps
            tensor = f"{row['round']}.state.{row['number']}"
            assert tensor in names_at(page, row["file"], row["array"])
        assert verify(reader).problems == ()


@pytest.mark.parametrize("history", ["rounds", "sums"])
def test_a_reader_by_the_page_finds_the_buffers_of_the_last_clients(
    history: History, tmp_path: Path
) -> None:
    path = tmp_path / "ledger"
    with DiskLedger.create(path, with_buffers(), history=history) as ledger:
        for index in range(3):
            ledger.append(round_with_buffers(index))
        forget(ledger, ["b"])
    page = PageReader(path)
    numbers = {row["name"]: row["id"] for row in page.tables["clients"]}
    wanted = {
        f"{numbers[u.client]}.{name}": buffer
        for u in round_with_buffers(2).updates
        for name, buffer in (u.buffers or {}).items()
        if u.client != "b"
    }
    found = page.buffers()
    assert found.keys() == wanted.keys()
    assert list(found) == sorted(found, key=lambda n: int(n.partition(".")[0]))
    for name, buffer in wanted.items():
        np.testing.assert_array_equal(found[name], buffer)
        assert found[name].shape == np.shape(buffer)
    with LedgerReader(path) as reader:
        assert verify(reader).problems == ()
