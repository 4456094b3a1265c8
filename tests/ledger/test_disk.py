from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    FastFedUL,
    FastFedULError,
    Kronecker,
    LedgerDamagedError,
    LedgerError,
    LedgerLockedError,
    LedgerReader,
    LocalSGD,
    Model,
    NoSkew,
    Params,
    Round,
    Scalar,
    UnlearnRequest,
    add_request,
    forget,
    params_at,
    verify,
)
from fastfedul.ledger.protocol import models
from fastfedul.ledger.protocol import vector as stored_vector
from fastfedul.ledger.store import codec
from fastfedul.ledger.store.index import Index
from fastfedul.ledger.store.schema import COLUMNS, digest_of, key_of, names
from fastfedul.params import Array, Flat, Layout
from fastfedul.records import History, StorageDtype, VectorRef
from fastfedul.rng import stream

LAYOUT = Layout.of({"weight": np.zeros((5, 6)), "bias": np.zeros(7)})
CLIENTS = ("a", "b", "c", "d")
LOCAL = LocalSGD(lr=0.1, momentum=0.9, batch_size=32, epochs=2)


def vector(*key: int, size: int = LAYOUT.size) -> Flat:
    return stream(5, "disk", *key).normal(size=size).astype(np.float32)


def initial_model(layout: Layout = LAYOUT) -> Model:
    return Model(Params(layout, vector(0, size=layout.size)), {"seen": np.arange(3)})


def round_of(
    index: int,
    *,
    layout: Layout = LAYOUT,
    clients: tuple[str, ...] = CLIENTS,
    dropped: frozenset[str] = frozenset(),
) -> Round:
    """The round with this number: always the same, in every process.

    How the clients trained is known of every other round.
    """
    updates = tuple(
        ClientUpdate(
            name,
            1 / len(clients),
            Params(layout, vector(1, index, i, size=layout.size)),
            keep_probability=0.5 if name in dropped else 1.0,
            kept=name not in dropped,
        )
        for i, name in enumerate(clients)
    )
    return Round(index, updates, local=None if index % 2 else LOCAL)


def answer(ledger: LedgerReader, *clients: str) -> tuple[object, ...]:
    """What forgetting says, to the bit.

    From rounds by the paper's method, which reads nobody else's updates.
    """
    of_sums = ledger.settings.history == "sums"
    return details_of(
        ledger, FastFedUL(skew=Kronecker() if of_sums else Scalar(0.07)), *clients
    )


def details_of(
    ledger: LedgerReader, method: FastFedUL, *clients: str
) -> tuple[object, ...]:
    result = method(UnlearnRequest(ledger, frozenset(clients or ("a",))))
    return (
        result.params.flat.tobytes(),
        result.delta.flat.tobytes(),
        result.coverage,
        result.gamma_norms,
        result.standard_error,
        result.bound,
        result.rounds,
    )


def assert_one_line(caught: pytest.ExceptionInfo[FastFedULError], *named: str) -> None:
    message = str(caught.value)
    assert "\n" not in message
    for word in named:
        assert word in message, message


def snapshot_of(folder: Path) -> dict[str, bytes]:
    """Every file of a ledger nobody has open."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed ledger of three rounds."""
    with DiskLedger.create(tmp_path / "ledger", initial_model()) as ledger:
        for index in range(3):
            ledger.append(round_of(index))
    return tmp_path / "ledger"


# What is read is what was written.


@pytest.mark.parametrize("dtype", codec.STORAGE_DTYPES)
@pytest.mark.parametrize(
    "size", [1, 1023, 1025, 65_535, 65_536, 65_537, 70_000, 131_073, 17 * 65_536 + 1]
)
def test_vectors_come_back_as_their_storage_dtype_has_them(
    dtype: StorageDtype, size: int, tmp_path: Path
) -> None:
    # Not above: this file is also run as a program, and knows no tests there.
    from tests.conftest import through

    layout = Layout.of({"w": np.zeros(size)})
    with DiskLedger.create(
        tmp_path / "ledger",
        initial_model(layout),
        update_dtype=dtype,
        step_dtype=dtype,
    ) as ledger:
        ledger.append(round_of(0, layout=layout, clients=("a", "b")))
        final = ledger.final.params.flat
    rows = [vector(1, 0, i, size=size) for i in range(2)]
    step: Flat = rows[0] * np.float32(0.5) + rows[1] * np.float32(0.5)
    with LedgerReader(tmp_path / "ledger") as reader:
        np.testing.assert_array_equal(reader.final.params.flat, final)
        np.testing.assert_array_equal(final, vector(0, size=size) + step)
        round_ = reader.updates_in(0)
        assert [u.client for u in round_] == ["a", "b"]
        np.testing.assert_array_equal(
            list(models(reader))[-1].flat, reader.final.params.flat
        )
        for expected, client in ((step, None), (rows[0], "a"), (rows[1], "b")):
            found = stored(reader, 0, client)
            np.testing.assert_array_equal(found, through(expected, dtype))


def stored(reader: LedgerReader, index: int, client: str | None) -> Array:
    return stored_vector(reader, VectorRef(index, client))


@pytest.mark.parametrize(
    "buffer",
    [
        np.array(7),
        np.array([True, False]),
        np.arange(6, dtype=np.uint8).reshape(2, 3).T,
        np.array([1, -2], np.int16),
        np.array([1.5, math.nan], np.float64),
        np.zeros((0, 3), np.float32),
        np.array([1, 2], ">i4"),
        np.array([1.5, -2], ">f8"),
    ],
    ids=lambda buffer: f"{buffer.dtype.str}{buffer.shape}",
)
def test_buffers_come_back_with_their_values(buffer: Array, tmp_path: Path) -> None:
    initial = Model(Params.zeros(LAYOUT), {"state": buffer, "more": np.array([1.0])})
    DiskLedger.create(tmp_path / "ledger", initial).close()
    with LedgerReader(tmp_path / "ledger") as reader:
        np.testing.assert_array_equal(reader.final.buffers["state"], buffer)
        assert reader.final.buffers["state"].dtype.name == buffer.dtype.name
        np.testing.assert_array_equal(reader.final.buffers["more"], [1.0])


@pytest.mark.parametrize("dtype", codec.STORAGE_DTYPES)
def test_the_safetensors_library_reads_the_same_values(
    dtype: StorageDtype, tmp_path: Path
) -> None:
    with DiskLedger.create(
        tmp_path / "ledger", initial_model(), update_dtype=dtype, step_dtype=dtype
    ) as ledger:
        ledger.append(round_of(0))
        model = load_file(ledger.model_path)
        final = ledger.final
    assert set(model) == {"weight", "bias", "seen"}
    np.testing.assert_array_equal(model["weight"], final.params["weight"])
    np.testing.assert_array_equal(model["bias"], final.params["bias"])
    np.testing.assert_array_equal(model["seen"], np.arange(3))
    index = sqlite3.connect(tmp_path / "ledger" / "index.sqlite")
    found = index.execute(
        "SELECT clients.name, updates.array FROM updates "
        "JOIN clients ON clients.id = updates.client"
    ).fetchall()
    index.close()
    assert len(found) == len(CLIENTS)
    for name, digest in found:
        file = tmp_path / "ledger" / "arrays" / f"{digest.hex()}.safetensors"
        tensors = deserialized(file)
        encoded = codec.encode(vector(1, 0, CLIENTS.index(name)), dtype)
        values = tensors["values"]
        assert values["shape"] == [LAYOUT.size]
        assert values["dtype"] == codec.SAFETENSORS_NAMES[dtype]
        assert bytes(values["data"]) == encoded.values.tobytes()
        if encoded.scales is not None:
            assert bytes(tensors["scales"]["data"]) == encoded.scales.tobytes()
        if dtype == "float32":
            loaded = load_file(file)
            assert list(loaded) == ["values"]
            np.testing.assert_array_equal(
                loaded["values"], vector(1, 0, CLIENTS.index(name))
            )


def deserialized(file: Path) -> dict[str, Any]:
    deserialize: Callable[[bytes], Any] = safetensors.deserialize
    return dict(deserialize(file.read_bytes()))


@pytest.mark.parametrize(
    "name",
    ["a/b", "..", "é😀", 'quo"te', "two\nlines", "", " ", "__metadata__", "\ud800"],
)
def test_a_model_with_odd_parameter_names_is_readable_or_refused(
    name: str, tmp_path: Path
) -> None:
    refused = False
    try:
        initial = Model(Params.of({name: np.arange(4.0), "plain": np.ones(2)}))
        DiskLedger.create(tmp_path / "ledger", initial).close()
    except FastFedULError as error:
        refused = "\n" not in str(error)
    if refused:
        assert not (tmp_path / "ledger").exists()
        return
    with LedgerReader(tmp_path / "ledger") as reader:
        np.testing.assert_array_equal(reader.final.params[name], np.arange(4.0))
        loaded = load_file(reader.model_path)
    np.testing.assert_array_equal(loaded[name], np.arange(4.0))


# A ledger that is not whole.


def test_nothing_at_a_path_is_said_to_be_nothing(tmp_path: Path) -> None:
    for open_ledger in (LedgerReader, DiskLedger):
        with pytest.raises(LedgerError) as caught:
            open_ledger(tmp_path / "missing")
        assert_one_line(caught, "missing", "nothing")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_an_index_is_no_ledger(path: Path) -> None:
    (path / "index.sqlite").unlink()
    before = snapshot_of(path)
    for open_ledger in (LedgerReader, DiskLedger):
        with pytest.raises(LedgerError) as caught:
            open_ledger(path)
        assert_one_line(caught, "index.sqlite")
    assert snapshot_of(path) == before


def test_a_ledger_without_its_folder_of_arrays_is_refused(path: Path) -> None:
    shutil.rmtree(path / "arrays")
    for open_ledger in (LedgerReader, DiskLedger):
        with pytest.raises(LedgerError) as caught:
            open_ledger(path)
        assert_one_line(caught, "arrays")


def test_an_empty_folder_of_arrays_is_never_taken_for_an_answer(path: Path) -> None:
    for file in (path / "arrays").iterdir():
        file.unlink()
    with LedgerReader(path) as reader:
        for read in READINGS.values():
            if read in (*INDEX_ONLY, READINGS["pairs"]):
                continue  # A ledger of rounds has no pairs.
            with pytest.raises(LedgerDamagedError) as caught:
                read(reader)
            assert_one_line(caught, "missing")
        problems = verify(reader).problems
    assert any("round 1, client 'b'" in problem for problem in problems)
    assert any("round 2, step" in problem for problem in problems)


def test_a_missing_array_is_named_by_round_and_client(path: Path) -> None:
    array_of(path, round_=1, client="c").unlink()
    with LedgerReader(path) as reader:
        assert answer(reader, "a")
        with pytest.raises(LedgerDamagedError) as caught:
            answer(reader, "c")
        assert_one_line(caught, "round 1", "'c'", "missing")
        [problem] = verify(reader).problems
    assert "round 1, client 'c'" in problem


def array_of(path: Path, *, round_: int, client: str) -> Path:
    index = sqlite3.connect(path / "index.sqlite")
    [(digest,)] = index.execute(
        "SELECT array FROM updates JOIN clients ON clients.id = updates.client "
        "WHERE round = ? AND name = ?",
        (round_, client),
    ).fetchall()
    index.close()
    return path / "arrays" / f"{digest.hex()}.safetensors"


@pytest.mark.parametrize(
    "keep", [0, 1, 15, 16, 99, 100, 512, 4095, 4096, 0.5, -4096, -512, -1]
)
def test_a_truncated_index_is_refused_and_nothing_else_is_touched(
    path: Path, keep: float
) -> None:
    index = path / "index.sqlite"
    data = index.read_bytes()
    cut = data[: int(len(data) * keep) if keep == 0.5 else int(keep)]
    index.write_bytes(cut)
    before = snapshot_of(path)
    for open_ledger in (LedgerReader, DiskLedger):
        with pytest.raises(LedgerError) as caught:
            open_ledger(path)
        assert_one_line(caught, "index.sqlite")
    assert snapshot_of(path) == before
    index.write_bytes(data)
    with DiskLedger(path) as ledger:
        assert verify(ledger).problems == ()


@pytest.mark.parametrize(
    "garbage",
    [b"not a database", b"\0" * 8192, bytes(range(256)) * 64, b"SQLite format 3\0"],
    ids=["text", "zeros", "bytes", "magic"],
)
def test_garbage_in_place_of_the_index_is_refused(path: Path, garbage: bytes) -> None:
    (path / "index.sqlite").write_bytes(garbage)
    before = snapshot_of(path)
    for open_ledger in (LedgerReader, DiskLedger):
        with pytest.raises(LedgerError) as caught:
            open_ledger(path)
        assert_one_line(caught, "index.sqlite")
    assert snapshot_of(path) == before


def test_another_database_in_place_of_the_index_is_refused(path: Path) -> None:
    (path / "index.sqlite").unlink()
    other = sqlite3.connect(path / "index.sqlite")
    other.execute("CREATE TABLE ledger (format INTEGER)")
    other.execute("INSERT INTO ledger VALUES (1)")
    other.commit()
    other.close()
    before = snapshot_of(path)
    for open_ledger in (LedgerReader, DiskLedger):
        with pytest.raises(LedgerError) as caught:
            open_ledger(path)
        assert_one_line(caught, "index.sqlite")
    assert snapshot_of(path) == before


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("version", [2, 3, 1000, 0])
def test_another_format_is_refused_by_name(
    path: Path, version: int, signed: bool
) -> None:
    index = sqlite3.connect(path / "index.sqlite")
    index.execute("UPDATE ledger SET format = ?", (version,))
    if signed:
        resign(index, "ledger")
    index.commit()
    index.close()
    before = snapshot_of(path)
    for open_ledger in (LedgerReader, DiskLedger):
        with pytest.raises(LedgerError) as caught:
            open_ledger(path)
        assert_one_line(caught, f"format {version}")
        assert not isinstance(caught.value, LedgerDamagedError)
    assert snapshot_of(path) == before


def resign(index: sqlite3.Connection, table: str) -> None:
    """Give every row of a table the digest that fits it."""
    columns = [column.split()[0] for column in COLUMNS[table]]
    for row in index.execute(f"SELECT {', '.join(columns)} FROM {table}").fetchall():
        index.execute(
            f"UPDATE {table} SET digest = ? WHERE {columns[0]} = ?",
            (digest_of(table, *row), row[0]),
        )


# One writer, many readers.


def test_a_second_writer_is_refused_and_told_who_is_first(path: Path) -> None:
    with holder(path) as pid:
        with pytest.raises(LedgerLockedError) as caught:
            DiskLedger(path)
        assert_one_line(caught, f"process {pid} ")
        with LedgerReader(path) as one, LedgerReader(path) as other:
            assert one.num_rounds == other.num_rounds == 3
            assert answer(one) == answer(other)
    with DiskLedger(path) as ledger:
        ledger.append(round_of(3))


def test_a_second_writer_in_the_same_process_is_refused_too(path: Path) -> None:
    with DiskLedger(path):
        with pytest.raises(LedgerLockedError) as caught:
            DiskLedger(path)
        assert_one_line(caught, f"process {os.getpid()} ")
    DiskLedger(path).close()


def test_the_lock_of_a_killed_writer_is_free(path: Path) -> None:
    with holder(path) as pid:
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while True:
            try:
                DiskLedger(path).close()
                break
            except LedgerLockedError:
                assert time.monotonic() < deadline
                time.sleep(0.01)


@contextlib.contextmanager
def holder(path: Path) -> Iterator[int]:
    """Another process that has the ledger open for writing."""
    with process("hold", path) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        yield other.pid


@contextlib.contextmanager
def process(*arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """This file run as a program; it is gone when the block ends."""
    other = subprocess.Popen(
        [sys.executable, __file__, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield other
    finally:
        other.kill()
        other.communicate()


def test_readers_see_whole_rounds_while_another_process_writes(path: Path) -> None:
    num_rounds = 25
    expected = list(itertools.islice(models_by_hand(), num_rounds + 1))
    seen = set()
    with LedgerReader(path) as kept_open, process("append", path, num_rounds) as other:
        while other.poll() is None:
            with LedgerReader(path) as fresh:
                for reader in (kept_open, fresh):
                    with reader.snapshot():
                        count = reader.num_rounds
                        assert len(reader.rounds()) == count
                        np.testing.assert_array_equal(
                            reader.final.params.flat, expected[count]
                        )
                        at = params_at(reader, count // 2)
                        np.testing.assert_array_equal(at.flat, expected[count // 2])
                        result = FastFedUL(skew=NoSkew())(
                            UnlearnRequest(reader, frozenset({"b"}))
                        )
                        assert result.rounds == count
                    seen.add(count)
        assert other.returncode == 0
        assert kept_open.num_rounds == num_rounds
        assert verify(kept_open).problems == ()
    assert len(seen) >= 2, "the readers never ran beside the writer"


def models_by_hand() -> Iterator[Array]:
    """The model after 0, 1, 2... rounds."""
    flat = vector(0)
    for index in itertools.count():
        yield flat
        step = np.zeros(LAYOUT.size, np.float32)
        for i in range(len(CLIENTS)):
            step += vector(1, index, i) * np.float32(1 / len(CLIENTS))
        flat = flat + step


def own_by_hand(client: int, num_rounds: int) -> Array:
    """What forgetting one client alone takes after so many rounds, nobody reacting."""
    own = np.zeros(LAYOUT.size)
    for index in range(num_rounds):
        deltas = [vector(1, index, i) for i in range(len(CLIENTS))]
        own += (np.mean(deltas, axis=0) - deltas[client]) / (len(CLIENTS) - 1)
    return own


# What a crash leaves behind.


def test_files_that_belong_to_nothing_are_swept_by_the_next_writer(path: Path) -> None:
    before = snapshot_of(path)
    orphans = [f"{'0' * 64}.safetensors", ".new-0123"]
    for name in orphans:
        (path / "arrays" / name).write_bytes(b"orphan")
    with LedgerReader(path) as reader:
        found = verify(reader)
        assert found.problems == ()
        assert found.num_strays == len(orphans)
    assert {p.name for p in (path / "arrays").iterdir()} >= set(orphans)
    with DiskLedger(path) as ledger:
        assert verify(ledger).num_strays == 0
    assert snapshot_of(path) == before


@pytest.mark.parametrize("kind", ["rounds", "sums"])
def test_a_killed_writer_loses_nothing_it_acknowledged(
    kind: History, tmp_path: Path
) -> None:
    path = tmp_path / "ledger"
    with DiskLedger.create(path, initial_model(), history=kind) as ledger:
        for index in range(3):
            ledger.append(round_of(index))
    expected = list(itertools.islice(models_by_hand(), 400))
    rng = random.Random(4)
    at_least = 3
    for _ in range(4):
        with process("append", path, 399) as other:
            assert other.stdout is not None
            for _ in range(rng.randrange(1, 6)):
                acknowledged = int(other.stdout.readline())
            time.sleep(rng.uniform(0, 0.03))
            other.kill()
            rest = other.stdout.read().split()
            acknowledged = int(rest[-1]) if rest else acknowledged
        with LedgerReader(path) as reader:
            assert reader.num_rounds >= acknowledged
            assert reader.num_rounds > at_least
            at_least = reader.num_rounds
            assert verify(reader).problems == ()
            np.testing.assert_array_equal(
                reader.final.params.flat, expected[reader.num_rounds]
            )
            np.testing.assert_allclose(
                reader.own_difference("b"),
                own_by_hand(1, reader.num_rounds),
                rtol=1e-4,
                atol=1e-4,
            )
        with DiskLedger(path) as ledger:
            assert ledger.num_rounds == at_least
            assert verify(ledger).num_strays == 0
            ledger.append(round_of(at_least))


@pytest.mark.parametrize("kind", ["rounds", "sums"])
def test_a_writer_killed_while_erasing_leaves_all_or_nothing(
    kind: History, tmp_path: Path
) -> None:
    full = tmp_path / "full"
    with DiskLedger.create(full, initial_model(), history=kind) as ledger:
        for index in range(30):
            ledger.append(round_of(index))
        before = ledger.final.params.flat.tobytes()
    shutil.copytree(tmp_path / "full", tmp_path / "erased")
    with DiskLedger(tmp_path / "erased") as ledger:
        forget(ledger, ["b"], erase=True)
        after = ledger.final.params.flat.tobytes()
        chain = ledger.chain
    rng = random.Random(9)
    states = set()
    for number in range(4):
        path = tmp_path / f"killed-{number}"
        shutil.copytree(tmp_path / "full", path)
        with process("erase", path) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0, 0.12))
            other.kill()
            acknowledged = other.stdout.read() == b"done\n"
        with DiskLedger(path) as reopened:
            state = reopened.clients()["b"].state
            states.add(state)
            assert state == "erased" or not acknowledged
            assert state in ("active", "erased")
            assert verify(reopened).problems == ()
            assert verify(reopened).num_strays == 0
            final = reopened.final.params.flat.tobytes()
            assert final == (after if state == "erased" else before)
            assert (reopened.chain == chain) == (state == "erased")
            assert len(reopened.updates_of("b")) == (0 if state == "erased" else 30)
            if state == "active":
                forget(reopened, ["b"], erase=True)
                assert reopened.chain == chain
                assert reopened.final.params.flat.tobytes() == after


def test_what_a_killed_creation_left_does_not_stop_the_next(tmp_path: Path) -> None:
    left = tmp_path / f".ledger.creating-{os.getpid()}"
    (left / "arrays").mkdir(parents=True)
    with DiskLedger.create(tmp_path / "ledger", initial_model()) as ledger:
        ledger.append(round_of(0))
    assert (tmp_path / "ledger" / "index.sqlite").is_file()


# Disks that do not let themselves be written to.


def test_a_read_only_ledger_can_be_read_and_is_not_written_to() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder, "ledger")
        with DiskLedger.create(path, initial_model()) as ledger:
            for index in range(3):
                ledger.append(round_of(index))
            expected = answer(ledger)
        before = snapshot_of(path)
        for entry in (path, *path.rglob("*")):
            entry.chmod(0o555 if entry.is_dir() else 0o444)
        Path(folder).chmod(0o555)
        report = report_of("unprivileged", path)
        Path(folder).chmod(0o755)
        for entry in (path, path / "arrays"):
            entry.chmod(0o755)
        assert report["num_rounds"] == 3
        assert report["answer"] == repr(expected)
        assert report["problems"] == []
        for what in ("open for writing", "create"):
            kind, message = report[what]
            assert kind == "LedgerError", report
            assert "\n" not in message
        assert str(path) in report["open for writing"][1]
        assert snapshot_of(path) == before
        assert {entry.name for entry in Path(folder).iterdir()} == {"ledger"}


def test_a_folder_that_turns_read_only_costs_nothing_that_was_recorded() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ledger")
        DiskLedger.create(path, initial_model()).close()
        for entry in (Path(folder), *Path(folder).rglob("*")):
            entry.chmod(0o777 if entry.is_dir() else 0o666)
        report = report_of("turns-read-only", path)
        for what in ("arrays", "folder"):
            kind, message, found = report[what]
            assert kind == "LedgerError", report
            assert "\n" not in message
            assert found == [1, [], 0], report
        assert report["num_rounds"] == 2
        assert report["problems"] == []


def report_of(*arguments: object) -> dict[str, Any]:
    """Run this file as a program and return the object it prints."""
    done = subprocess.run(
        [sys.executable, __file__, *map(str, arguments)],
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_a_file_size_limit_stops_a_round_and_loses_nothing(path: Path) -> None:
    report = report_of("limited", path)
    assert report["limits"], "no limit was tried"
    for limit, outcome in report["limits"].items():
        kind, message, num_rounds, same_chain, problems = outcome
        assert kind == "LedgerError", (limit, kind, message)
        assert "\n" not in message
        assert (num_rounds, same_chain, problems) == (3, True, []), (limit, outcome)
    assert report["num_rounds"] == 4
    with DiskLedger(path) as ledger:
        assert verify(ledger).problems == ()
        ledger.append(round_of(4))


def test_a_ledger_that_cannot_be_opened_for_want_of_space_is_not_locked(
    path: Path,
) -> None:
    report = report_of("no-room-for-lock", path)
    kind, message = report["open"]
    assert kind == "LedgerError", report
    assert "\n" not in message
    assert report["again"] == 3


@pytest.mark.parametrize("kind", ["rounds", "sums"])
def test_a_full_disk_stops_a_change_and_loses_nothing(
    kind: str, tmp_path: Path
) -> None:
    if not can_mount(tmp_path):
        pytest.skip("no file system can be mounted here")
    done = subprocess.run(
        ["unshare", "-m", sys.executable, __file__, "full", str(tmp_path), kind],
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    report = json.loads(done.stdout)
    assert {what for what, *_ in report["failures"]} == {"append", "erase", "create"}
    for what, room, kind, message, unchanged, problems in report["failures"]:
        assert kind == "LedgerError", (what, room, kind, message)
        assert "\n" not in message
        assert "disk is full" in message, (what, room, message)
        assert unchanged, (what, room)
        assert problems == [], (what, room)
    assert report["appended"] > 3
    assert report["state of b"] == "erased"
    assert report["problems"] == []
    assert report["read-only"]["num_rounds"] == report["appended"]
    kind, message = report["read-only"]["open for writing"]
    assert kind == "LedgerError"
    assert "\n" not in message


def can_mount(folder: Path) -> bool:
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return False
    tried = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "none", str(folder)],
        capture_output=True,
        check=False,
    )
    return tried.returncode == 0


@pytest.mark.parametrize(
    ("kind", "limit"), [("rounds", 300), ("sums", 40), ("sums", 64)]
)
def test_forgetting_needs_no_more_open_files_than_a_process_may_have(
    path: Path, limit: int, kind: str
) -> None:
    """Of rounds it has 256 open at once, of sums no more than a few."""
    report = report_of("few-files", path, limit, kind)
    assert report["num_rounds"] == limit // 2 + 20
    assert report["error"] == ""


# The order of the system calls.


class Call:
    """One system call of a trace: when it began and ended, and on which file."""

    def __init__(self, name: str, text: str, start: int) -> None:
        self.name = name
        self.start = self.end = start
        descriptor = re.match(r"\d+<([^>]*)>", text)
        quoted = re.findall(r'"([^"]*)"', text)
        self.paths = [descriptor.group(1)] if descriptor else quoted
        self.text = text

    def on(self, ending: str) -> bool:
        return self.paths[-1].endswith(ending)


def traced_calls(log: str) -> list[Call]:
    """Parse a trace; lines of several threads may be cut in two."""
    calls: list[Call] = []
    open_calls: dict[str, Call] = {}
    for number, line in enumerate(log.splitlines()):
        thread, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if resumed := re.match(r"<\.\.\. (\w+) resumed>", rest):
            call = open_calls.pop(thread)
            assert call.name == resumed.group(1)
            call.end = number
        elif called := re.match(r"(\w+)\((.*)", rest):
            call = Call(called.group(1), called.group(2), number)
            calls.append(call)
            if "<unfinished" in rest:
                open_calls[thread] = call
    return calls


@pytest.fixture(scope="module", params=["rounds", "sums"])
def trace(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Call]:
    """A ledger is created, four rounds are appended, a client is erased."""
    if shutil.which("strace") is None:
        if os.environ.get("CI"):
            pytest.fail("strace is needed here and is not installed")
        pytest.skip("strace is not installed")
    folder = tmp_path_factory.mktemp("strace")
    log = folder / "log"
    calls = "write,pwrite64,fsync,fdatasync,?rename,?renameat,?renameat2"
    calls += ",?unlink,?unlinkat,?mkdir,?mkdirat,?ftruncate"
    tracing = ["strace", "-f", "-y", "-s", "0", "-o", str(log), "-e", f"trace={calls}"]
    done = subprocess.run(
        [*tracing, sys.executable, __file__, "traced", str(folder), request.param],
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return traced_calls(log.read_text())


def between(trace: list[Call], what: str) -> list[Call]:
    """The calls from one marker to the other; the markers are folders made."""
    [begin] = [c for c in trace if c.name.startswith("mkdir") and c.on(f"{what}-begin")]
    [end] = [c for c in trace if c.name.startswith("mkdir") and c.on(f"{what}-end")]
    return [call for call in trace if begin.end < call.start and call.end < end.start]


def last(calls: list[Call]) -> int:
    return max(call.end for call in calls)


def first(calls: list[Call]) -> int:
    return min(call.start for call in calls)


CHANGES = ["append-0", "append-1", "append-2", "append-3", "forget", "erase"]


@pytest.mark.parametrize("what", CHANGES)
def test_data_then_folder_then_commit_is_the_order_on_disk(
    trace: list[Call], what: str
) -> None:
    calls = between(trace, what)
    commits = [
        c
        for c in calls
        if c.name.startswith("unlink") and c.on("/index.sqlite-journal")
    ]
    [commit] = commits
    everything = [c for c in calls if c.name.startswith("rename")]
    renames = [c for c in everything if "/arrays/" in c.text]
    # The certificate comes after the commit, and its folder is synced too.
    for rename in everything:
        if rename not in renames:
            assert commit.end < rename.start
            folders = [c for c in calls if c.name == "fsync" and c.on("/certificates")]
            assert any(rename.end < c.start for c in folders)
    assert renames
    for rename in renames:
        temporary = rename.paths[-2].rsplit("/", 1)[1]
        written = [c for c in calls if c.name == "write" and c.on(temporary)]
        synced = [c for c in calls if c.name == "fdatasync" and c.on(temporary)]
        assert written, rename.text
        assert synced, rename.text
        assert last(written) < first(synced)
        assert last(synced) < rename.start
    folder_synced = [c for c in calls if c.name == "fsync" and c.on("/arrays")]
    assert any(last(renames) < c.start and c.end < commit.start for c in folder_synced)
    index_written = [c for c in calls if c.name == "pwrite64" and c.on("/index.sqlite")]
    journal_synced = synced_file(calls, "/index.sqlite-journal")
    index_synced = synced_file(calls, "/index.sqlite")
    assert index_written
    assert first(journal_synced) < first(index_written)
    assert any(
        last(index_written) < c.start and c.end < commit.start for c in index_synced
    )


def synced_file(calls: list[Call], ending: str) -> list[Call]:
    found = [c for c in calls if c.name in ("fsync", "fdatasync") and c.on(ending)]
    assert found, f"{ending} was never synced"
    return found


@pytest.mark.parametrize("what", CHANGES)
def test_the_commit_itself_is_on_disk_before_the_call_returns(
    trace: list[Call], what: str
) -> None:
    calls = between(trace, what)
    [commit] = [c for c in calls if "unlink" in c.name and c.on("-journal")]
    synced = synced_file(calls, "/ledger")
    assert any(commit.end < call.start for call in synced)


@pytest.mark.parametrize("what", ["append-1", "append-3", "erase"])
def test_no_file_is_removed_before_the_commit_that_makes_it_superfluous(
    trace: list[Call], what: str
) -> None:
    calls = between(trace, what)
    [commit] = [c for c in calls if "unlink" in c.name and c.on("-journal")]
    removed = [c for c in calls if "unlink" in c.name and c.on(".safetensors")]
    assert removed
    assert commit.end < first(removed)
    if what == "erase":
        synced = [c for c in calls if c.name == "fsync" and c.on("/arrays")]
        assert any(last(removed) < call.start for call in synced)


def test_a_new_ledger_appears_only_once_it_is_on_disk(trace: list[Call]) -> None:
    calls = between(trace, "create")
    [appearance] = [c for c in calls if c.name.startswith("rename") and c.on("/ledger")]
    building = appearance.paths[-2].rsplit("/", 1)[1]
    for ending in (
        f"{building}/arrays",
        f"{building}/index.sqlite",
        building,
    ):
        synced = [c for c in calls if "sync" in c.name and c.on(ending)]
        assert any(call.end < appearance.start for call in synced), ending
    parent = [c for c in calls if c.name == "fsync" and c.start > appearance.end]
    assert any(not call.on("/ledger") and not call.on("/arrays") for call in parent)


# Damage is found and named, and never becomes an answer.


KINDS: tuple[History, ...] = ("rounds", "sums")
BOTH_KINDS = pytest.mark.parametrize("kind", KINDS)
"""Ledgers of rounds and of sums: together they have every kind of row and of file."""


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[History, Path]:
    """Two closed ledgers; but for pairs and adjustments, each has rows everywhere."""
    return {
        kind: build(tmp_path_factory.mktemp(kind) / "ledger", kind) for kind in KINDS
    }


def build(path: Path, kind: History) -> Path:
    with DiskLedger.create(
        path, initial_model(), update_dtype="float16", history=kind
    ) as ledger:
        for index in range(4):
            clients = (*CLIENTS, "gone", "left")
            ledger.append(
                round_of(index, clients=clients, dropped=frozenset({CLIENTS[index]}))
            )
        add_request(path, "gone", "consent withdrawn")
        forget(ledger, ["gone"], erase=True)
        ledger.append(round_of(4, clients=(*CLIENTS, "left")))
        forget(ledger, ["left"], erase=False)
        ledger.append(round_of(5, clients=(*CLIENTS, "late"), dropped=frozenset({"d"})))
        add_request(path, "b")
    return path


@pytest.fixture
def kind() -> History:
    """A ledger of rounds, where a test asks for nothing else."""
    return "rounds"


@pytest.fixture
def template(templates: dict[History, Path], kind: History) -> Path:
    return templates[kind]


@pytest.fixture
def damaged(template: Path, tmp_path: Path) -> Path:
    shutil.copytree(template, tmp_path / "ledger")
    return tmp_path / "ledger"


READINGS: dict[str, Callable[[LedgerReader], object]] = {
    "answer": answer,
    "answer for two": lambda ledger: answer(ledger, "b", "d"),
    "usual answer": lambda ledger: details_of(ledger, FastFedUL()),
    "final": lambda ledger: (
        ledger.final.params.flat.tobytes(),
        ledger.final.buffers["seen"].tobytes(),
    ),
    "initial": lambda ledger: ledger.initial.params.flat.tobytes(),
    "models": lambda ledger: [params.flat.tobytes() for params in models(ledger)],
    "own differences": lambda ledger: [
        ledger.own_difference(name).tobytes() for name in CLIENTS
    ],
    "pairs": lambda ledger: [
        (pair, stored_vector(ledger, VectorRef(*key)).tobytes())
        for pair in ledger.pairs()
        for key in [(pair.round, pair.client, pair.other)]
    ],
    "clients": lambda ledger: dict(ledger.clients()),
    "rounds": lambda ledger: ledger.rounds(),
    "events": lambda ledger: ledger.events(),
    "requests": lambda ledger: ledger.requests(),
    "updates of": lambda ledger: [ledger.updates_of(name) for name in CLIENTS],
    "updates in": lambda ledger: [
        ledger.updates_in(index) for index in range(ledger.num_rounds)
    ],
    "number of bytes": lambda ledger: ledger.num_array_bytes(),
    "chain": lambda ledger: (ledger.chain, ledger.num_rounds),
}
NOT_OF_SUMS = ("models", "answer for two")
"""What sums do not tell, and what they refuse where shares vary as much as here."""
INDEX_ONLY = [
    READINGS[name]
    for name in (
        "clients",
        "rounds",
        "events",
        "requests",
        "updates of",
        "updates in",
        "number of bytes",
        "chain",
    )
]


@pytest.fixture(scope="module")
def truths(templates: dict[History, Path]) -> dict[History, dict[str, object]]:
    found = {}
    for kind, path in templates.items():
        with LedgerReader(path) as reader:
            assert verify(reader).problems == ()
            found[kind] = {
                name: read(reader)
                for name, read in READINGS.items()
                if kind == "rounds" or name not in NOT_OF_SUMS
            }
    return found


@pytest.fixture
def truth(truths: dict[History, dict[str, object]], kind: History) -> dict[str, object]:
    return truths[kind]


def test_together_the_ledgers_under_test_have_rows_in_every_table(
    templates: dict[History, Path],
) -> None:
    for table in COLUMNS:
        kinds = {kind for kind, path in templates.items() if has_rows(path, table)}
        assert kinds == set(KINDS_OF.get(table, KINDS)), table


def has_rows(path: Path, table: str) -> bool:
    index = sqlite3.connect(path / "index.sqlite")
    [(count,)] = index.execute(f"SELECT count(*) FROM {table}").fetchall()
    index.close()
    return bool(count)


KINDS_OF: dict[str, tuple[History, ...]] = {
    "adjustments": ("rounds",),
    "pairs": ("sums",),
}
"""Tables that only one kind of ledger uses."""


def assert_no_wrong_answer(path: Path, truth: dict[str, object]) -> None:
    """Every reading fails in one line or gives what the sound ledger gives."""
    try:
        reader = LedgerReader(path)
    except LedgerError as error:
        opening = str(error)
        assert "\n" not in opening
        return
    with reader:
        for name in truth:
            try:
                found = READINGS[name](reader)
            except LedgerError as error:
                assert "\n" not in str(error)  # noqa: PT017
            else:
                assert found == truth[name], name


def problems_of(path: Path) -> tuple[str, ...]:
    """What verify says, or what the ledger says when it does not even open."""
    try:
        with LedgerReader(path) as reader:
            return verify(reader).problems
    except LedgerError as error:
        return (str(error),)


def changed(value: object) -> object:
    """Another value of the same kind, as near as can be."""
    if value is None:
        return 1
    if isinstance(value, int):
        return value + 1000
    if isinstance(value, float):
        return math.nextafter(value, math.inf)
    if isinstance(value, str):
        return value + "x"
    assert isinstance(value, bytes)
    return bytes([*value[:-1], value[-1] ^ 1]) if value else b"\1"


EVERY_TABLE = [(t, kind) for t in COLUMNS for kind in KINDS_OF.get(t, KINDS)]
EVERY_COLUMN = [
    (table, column, kind)
    for table, kind in EVERY_TABLE
    for column in (*names(table), "digest")
]


@pytest.mark.parametrize("position", ["first", "last"])
@pytest.mark.parametrize(("table", "column", "kind"), EVERY_COLUMN)
def test_any_changed_value_of_the_index_is_found_and_never_believed(
    table: str, column: str, position: str, damaged: Path, truth: dict[str, object]
) -> None:
    index = sqlite3.connect(damaged / "index.sqlite")
    keys = keys_of(table)
    rows = index.execute(
        f"SELECT {column}, {', '.join(keys)} FROM {table} ORDER BY {', '.join(keys)}"
    ).fetchall()
    assert rows, f"the table {table} has no row to change"
    value, *key = rows[0 if position == "first" else -1]
    name = client_name(index, key[0]) if keys[0] == "client" else ""
    where = " AND ".join(f"{k} = ?" for k in keys)
    done = index.execute(
        f"UPDATE {table} SET {column} = ? WHERE {where}", (changed(value), *key)
    )
    assert done.rowcount == 1
    index.commit()
    index.close()
    problems = problems_of(damaged)
    assert problems
    assert all("\n" not in problem for problem in problems)
    if table == "updates" and column not in keys:
        assert any(f"round {key[1]}, client {name!r}" in p for p in problems), problems
    if table == "rounds" and column != "round":
        assert any(f"round {key[0]}" in p for p in problems), problems
    if table == "clients" and column != "name":
        [named] = [row[0] for row in client_rows(damaged) if row[1] == key[0]] or [""]
        assert column == "id" or any(repr(named) in p for p in problems), problems
    assert_no_wrong_answer(damaged, truth)


def keys_of(table: str) -> list[str]:
    """The columns that tell the rows of a table apart."""
    return [names(table)[place] for place in key_of(table)]


def client_name(index: sqlite3.Connection, number: int) -> str:
    [(name,)] = index.execute("SELECT name FROM clients WHERE id = ?", (number,))
    return str(name)


def client_rows(path: Path) -> list[tuple[str, int]]:
    index = sqlite3.connect(path / "index.sqlite")
    rows = index.execute("SELECT name, id FROM clients").fetchall()
    index.close()
    return rows


@pytest.mark.parametrize("value", [None, "text", b"bytes", 1.5, -1, 2**62])
@pytest.mark.parametrize(("table", "kind"), EVERY_TABLE)
def test_a_value_of_another_kind_is_found_and_never_believed(
    table: str, value: object, damaged: Path, truth: dict[str, object]
) -> None:
    for column in names(table)[1:]:
        index = sqlite3.connect(damaged / "index.sqlite", isolation_level=None)
        before = index.execute(f"SELECT {column} FROM {table}").fetchall()
        index.execute("BEGIN")
        with contextlib.suppress(sqlite3.IntegrityError):
            index.execute(f"UPDATE {table} SET {column} = ?", (value,))
        after = index.execute(f"SELECT {column} FROM {table}").fetchall()
        index.execute("COMMIT")
        index.close()
        if after != before:
            assert problems_of(damaged), (table, column)
            assert_no_wrong_answer(damaged, truth)


@pytest.mark.parametrize(("table", "kind"), EVERY_TABLE)
def test_a_lost_row_is_found_and_never_believed(
    table: str, damaged: Path, truth: dict[str, object]
) -> None:
    index = sqlite3.connect(damaged / "index.sqlite")
    keys = keys_of(table)
    row = index.execute(f"SELECT {', '.join(keys)} FROM {table} LIMIT 1").fetchone()
    where = " AND ".join(f"{key} = ?" for key in keys)
    done = index.execute(f"DELETE FROM {table} WHERE {where}", row)
    assert done.rowcount == 1
    index.commit()
    index.close()
    assert problems_of(damaged)
    assert_no_wrong_answer(damaged, truth)


@pytest.mark.parametrize(("table", "kind"), EVERY_TABLE)
def test_an_added_row_is_found_and_never_believed(
    table: str, damaged: Path, truth: dict[str, object]
) -> None:
    index = sqlite3.connect(damaged / "index.sqlite")
    columns = ", ".join(names(table))
    row = list(index.execute(f"SELECT {columns} FROM {table}").fetchone())
    unique = [0, 1] if table in ("updates", "clients") else [0]
    for position in unique:
        row[position] = changed(row[position])
    marks = ", ".join("?" * (len(row) + 1))
    index.execute(
        f"INSERT INTO {table} VALUES ({marks})", (*row, digest_of(table, *row))
    )
    index.commit()
    index.close()
    # These have one row, and only that one is read.
    if table in ("ledger", "head", "request_head", "policy"):
        assert_no_wrong_answer(damaged, truth)
        return
    assert problems_of(damaged)
    assert_no_wrong_answer(damaged, truth)


@pytest.mark.parametrize(
    ("table", "column", "named"),
    [
        ("updates", "share", "round 0"),
        ("updates", "keep_probability", "round 0"),
        ("rounds", "removed_share", "round 0"),
        ("rounds", "use", "round 0"),
        ("rounds", "lr", "round 0"),
        ("rounds", "momentum", "round 0"),
        ("rounds", "batch_size", "round 0"),
        ("rounds", "epochs", "round 0"),
        ("ledger", "layout", "round 0"),
        ("ledger", "aggregation", "round 0"),
        ("events", "details", "event"),
        ("events", "clients", "event"),
        ("events", "time", "event"),
    ],
)
def test_a_row_with_a_digest_that_fits_still_breaks_the_chain(
    table: str, column: str, named: str, damaged: Path
) -> None:
    index = sqlite3.connect(damaged / "index.sqlite")
    columns = [c.split()[0] for c in COLUMNS[table]]
    keys = columns[:2] if table == "updates" else columns[:1]
    order = "round, client" if table == "updates" else keys[0]
    row = index.execute(
        f"SELECT {', '.join(columns)} FROM {table} ORDER BY {order}"
    ).fetchone()
    values = dict(zip(columns, row, strict=True))
    old = values[column]
    values[column] = old + " " if isinstance(old, str) else changed(old)
    if column == "use":
        values[column] = "aggregate"
    where = " AND ".join(f"{key} = ?" for key in keys)
    index.execute(
        f"UPDATE {table} SET {column} = ?, digest = ? WHERE {where}",
        (
            values[column],
            digest_of(table, *values.values()),
            *(values[key] for key in keys),
        ),
    )
    index.commit()
    index.close()
    problems = problems_of(damaged)
    assert any(named in problem for problem in problems), problems


def array_files(path: Path) -> list[Path]:
    return sorted((path / "arrays").iterdir())


def flip(file: Path, position: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << bit
    file.write_bytes(bytes(data))


@BOTH_KINDS
def test_a_changed_byte_of_any_array_file_is_found_and_never_believed(
    template: Path, damaged: Path, truth: dict[str, object], kind: History
) -> None:
    for number, file in enumerate(array_files(damaged)):
        sound = file.read_bytes()
        header = 8 + int.from_bytes(sound[:8], "little")
        positions = (0, 7, 9, header - 1, header, len(sound) - 1)
        places = (positions[number % 6], header + number % 70)
        # Of sums there are many files, so one of the two has to do for each.
        for position in places if kind == "rounds" else places[number % 2 :][:1]:
            flip(file, position, bit=number % 8)
            problems = problems_of(damaged)
            assert any(file.name in problem for problem in problems), position
            assert_no_wrong_answer(damaged, truth)
            file.write_bytes(sound)
    assert problems_of(damaged) == ()
    assert snapshot_of(damaged) == snapshot_of(template)


@pytest.mark.parametrize("kind", ["sums"])
def test_every_byte_of_a_pair_counts(damaged: Path) -> None:
    index = sqlite3.connect(damaged / "index.sqlite")
    [(digest, round_)] = index.execute(
        "SELECT array, round FROM pairs ORDER BY priority LIMIT 1"
    ).fetchall()
    index.close()
    file = damaged / "arrays" / f"{digest.hex()}.safetensors"
    sound = file.read_bytes()
    for position in range(len(sound)):
        flip(file, position, bit=(position * 5) % 8)
        with LedgerReader(damaged) as reader:
            if position % 16 == 0:
                [problem] = verify(reader).problems
                assert f"round {round_}" in problem
            with pytest.raises(LedgerDamagedError) as caught:
                READINGS["pairs"](reader)
            assert_one_line(caught, f"round {round_}, pair")
        file.write_bytes(sound)


def test_every_byte_of_an_update_counts(damaged: Path) -> None:
    file = array_of(damaged, round_=4, client="b")
    sound = file.read_bytes()
    for position in range(len(sound)):
        flip(file, position, bit=(position * 5) % 8)
        with LedgerReader(damaged) as reader:
            [problem] = verify(reader).problems
            assert "round 4, client 'b'" in problem
            with pytest.raises(LedgerDamagedError) as caught:
                answer(reader, "b")
            assert_one_line(caught, "round 4, client 'b'")
        file.write_bytes(sound)


@pytest.mark.parametrize(
    ("length", "kind"), [(0, "rounds"), (-1, "rounds"), (1000, "rounds"), (-1, "sums")]
)
def test_an_array_file_of_another_length_is_found_and_never_believed(
    damaged: Path, truth: dict[str, object], length: int
) -> None:
    for file in array_files(damaged):
        sound = file.read_bytes()
        other = sound + b"\0" * 1000 if length == 1000 else sound[:length]
        file.write_bytes(other)
        assert any(file.name in problem for problem in problems_of(damaged))
        assert_no_wrong_answer(damaged, truth)
        file.write_bytes(sound)


@pytest.mark.parametrize("size", [70_000, 131_073, 200_000])
@pytest.mark.parametrize("dtype", codec.STORAGE_DTYPES)
def test_damage_in_the_last_block_of_a_large_model_is_found(
    dtype: StorageDtype, size: int, tmp_path: Path
) -> None:
    layout = Layout.of({"w": np.zeros(size)})
    path = tmp_path / "ledger"
    with DiskLedger.create(path, initial_model(layout), update_dtype=dtype) as ledger:
        ledger.append(round_of(0, layout=layout, clients=("a", "b")))
    file = array_of(path, round_=0, client="b")
    flip(file, file.stat().st_size - 1)
    with LedgerReader(path) as reader:
        assert answer(reader, "a")
        with pytest.raises(LedgerDamagedError) as caught:
            answer(reader, "b")
        assert_one_line(caught, "round 0, client 'b'")
        [problem] = verify(reader).problems
        assert "round 0, client 'b'" in problem


def test_two_files_that_changed_places_are_found(damaged: Path) -> None:
    one = array_of(damaged, round_=4, client="b")
    other = array_of(damaged, round_=4, client="c")
    one_data, other_data = one.read_bytes(), other.read_bytes()
    assert len(one_data) == len(other_data)
    one.write_bytes(other_data)
    other.write_bytes(one_data)
    with LedgerReader(damaged) as reader:
        assert len(verify(reader).problems) == 2
        with pytest.raises(LedgerDamagedError):
            answer(reader, "b")


def test_verifying_does_not_keep_the_writer_waiting(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastfedul.ledger.store.index._TIMEOUT_SECONDS", 0.1)
    with DiskLedger(path) as writer, LedgerReader(path) as reader:

        def work(done: int, _total: int) -> None:
            if writer.num_rounds == 3:
                writer.append(round_of(3))
                forget(writer, ["a"], erase=True)

        assert verify(reader, work).problems == ()
        assert writer.num_rounds == 4
        assert verify(reader).problems == ()


def test_a_commit_while_a_reader_opens_is_not_taken_for_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger"
    measure, rounds = Index.num_bytes, iter(range(200))
    with DiskLedger.create(path, initial_model()) as writer:

        def commit_first(index: Index) -> int:
            # Enough rounds that the file grows by a page.
            size = index.path.stat().st_size
            while index is not writer.index and index.path.stat().st_size == size:
                writer.append(round_of(next(rounds)))
            return measure(index)

        monkeypatch.setattr(Index, "num_bytes", commit_first)
        with LedgerReader(path) as reader:
            monkeypatch.undo()
            assert reader.num_rounds == next(rounds)


@BOTH_KINDS
def test_flipped_bits_of_the_index_never_give_a_wrong_answer(
    damaged: Path, truth: dict[str, object]
) -> None:
    index = damaged / "index.sqlite"
    sound = index.read_bytes()
    rng = random.Random(12)
    used = [i for i, byte in enumerate(sound) if byte]
    positions = [*range(0, 100, 2), *rng.sample(used, 100)]
    for position in positions:
        flip(index, position, bit=rng.randrange(8))
        assert_no_wrong_answer(damaged, truth)
        for side in ("-journal", "-wal", "-shm"):
            Path(f"{index}{side}").unlink(missing_ok=True)
        index.write_bytes(sound)


@pytest.mark.parametrize(
    "error",
    [
        OverflowError("math range error"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        sqlite3.DatabaseError("another database is malformed"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_the_callers_own_is_no_damage(
    template: Path, error: Exception
) -> None:
    with LedgerReader(template) as reader:
        with pytest.raises(type(error)) as caught, reader.snapshot():
            raise error
        assert caught.value is error
        assert verify(reader).problems == ()


def test_a_statement_that_fails_in_a_snapshot_is_damage(damaged: Path) -> None:
    connection = sqlite3.connect(damaged / "index.sqlite")
    connection.execute("DROP TABLE adjustments")
    connection.commit()
    connection.close()
    with (
        LedgerReader(damaged) as reader,
        pytest.raises(LedgerDamagedError, match="no such table"),
        reader.snapshot(),
    ):
        reader.adjustments()


def test_an_index_in_use_is_not_taken_for_damage(
    template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(index: Index) -> str:
        raise LedgerError(f"{index.path} is in use by another program; try again")

    monkeypatch.setattr(Index, "integrity", busy)
    with LedgerReader(template) as reader, pytest.raises(LedgerError, match="in use"):
        verify(reader)


def test_damaged_text_is_quoted_on_one_line(damaged: Path) -> None:
    connection = sqlite3.connect(damaged / "index.sqlite")
    connection.execute("UPDATE head SET chain = CAST(X'600A1BFF26' AS TEXT)")
    connection.commit()
    connection.close()
    with LedgerReader(damaged) as reader:
        [problem] = verify(reader).problems
    assert problem.isprintable()
    assert "`\\n\\x1b" in problem


def test_a_flipped_bit_of_a_lookup_table_never_swaps_participants(
    damaged: Path, truth: dict[str, object]
) -> None:
    """A row found by a damaged lookup table is genuine, but not the one asked for."""
    index = damaged / "index.sqlite"
    sound = index.read_bytes()
    connection = sqlite3.connect(index)
    [(page,)] = connection.execute(
        "SELECT rootpage FROM sqlite_master WHERE name = 'updates_by_round'"
    ).fetchall()
    connection.close()
    size = int.from_bytes(sound[16:18], "big")
    used = [i for i in range((page - 1) * size, page * size) if sound[i]]
    for position in used:
        flip(index, position, bit=position % 3)
        with LedgerReader(damaged) as reader:
            try:
                found = READINGS["updates in"](reader)
            except LedgerError:
                pass
            else:
                assert found == truth["updates in"], position
        index.write_bytes(sound)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"clients (id INTEGER", b"clients (il INTEGER"),
        (b"rounds (round INTEGER", b"rounds (sound INTEGER"),
        (b"rounds (round INTEGER", b"rounds (\xf2ound INTEGER"),
        (b"name TEXT UNIQUE", b"name TEXT\xe3UNIQUE"),
    ],
)
def test_a_changed_definition_of_a_table_is_found(
    old: bytes, new: bytes, damaged: Path, truth: dict[str, object]
) -> None:
    index = damaged / "index.sqlite"
    sound = index.read_bytes()
    assert sound.count(old) == 1
    index.write_bytes(sound.replace(old, new))
    assert problems_of(damaged)
    assert_no_wrong_answer(damaged, truth)


@BOTH_KINDS
def test_a_sound_ledger_has_no_problems_and_its_numbers_are_right(
    template: Path,
) -> None:
    seen: list[tuple[int, int]] = []
    with LedgerReader(template) as reader:
        found = verify(reader, lambda done, total: seen.append((done, total)))
        assert found.chain == reader.chain.hex()
    files = array_files(template)
    assert found.problems == ()
    assert found.num_rounds == 6
    assert found.num_files == len(files)
    assert found.num_bytes == sum(file.stat().st_size for file in files)
    assert found.num_strays == 0
    assert seen[-1] == (found.num_bytes, found.num_bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


# The log.


def test_the_log_is_a_chain_from_the_first_event(template: Path) -> None:
    index = sqlite3.connect(template / "index.sqlite")
    columns = ", ".join(column.split()[0] for column in COLUMNS["events"])
    rows = index.execute(f"SELECT {columns} FROM events ORDER BY id").fetchall()
    chains = dict(index.execute("SELECT round, chain FROM rounds").fetchall())
    [(head,)] = index.execute("SELECT chain FROM head").fetchall()
    index.close()
    assert [row[0] for row in rows] == [1, 2]
    assert [row[2] for row in rows] == ["forget and erase", "forget"]
    assert [json.loads(row[3]) for row in rows] == [["gone"], ["left"]]
    assert rows[0][5] == b""
    assert rows[1][5] == digest_of(*rows[0])
    first_event, second_event = (json.loads(row[4]) for row in rows)
    assert first_event["chain_before"] != first_event["chain_after"]
    assert first_event["chain_after"] == chains[3].hex()
    assert second_event["chain_before"] == second_event["chain_after"]
    assert second_event["chain_after"] == chains[4].hex()
    assert first_event["model_before"] != first_event["model_after"]
    assert second_event["model_before"] != first_event["model_after"]
    assert chains[5] == head


# This file as a program: what the tests above run in processes of their own.


def error_of(action: Callable[[], object]) -> tuple[str, str]:
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def hold(path: Path) -> None:
    with DiskLedger(path):
        print("ready", flush=True)
        sys.stdin.read()


def append_rounds(path: Path, num_rounds: str) -> None:
    with DiskLedger(path) as ledger:
        for index in range(ledger.num_rounds, int(num_rounds)):
            ledger.append(round_of(index))
            os.write(1, b"%d\n" % (index + 1))


def erase_a_client(path: Path) -> None:
    with DiskLedger(path) as ledger:
        os.write(1, b"ready\n")
        forget(ledger, ["b"], erase=True)
        os.write(1, b"done\n")


def drop_privileges() -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)


def read_unprivileged(path: Path) -> None:
    drop_privileges()
    report: dict[str, object] = {}
    with LedgerReader(path) as reader:
        report["num_rounds"] = reader.num_rounds
        report["answer"] = repr(answer(reader))
        report["problems"] = verify(reader).problems
    report["open for writing"] = error_of(lambda: DiskLedger(path))
    report["create"] = error_of(
        lambda: DiskLedger.create(path.parent / "other", initial_model())
    )
    print(json.dumps(report))


def turn_read_only(path: Path) -> None:
    owner = os.getuid()
    if owner == 0:
        for entry in (path, *path.rglob("*")):
            os.chown(entry, 65534, 65534)
    drop_privileges()
    report: dict[str, object] = {}
    with DiskLedger(path) as ledger:
        ledger.append(round_of(0))
        for what, folder in (("arrays", path / "arrays"), ("folder", path)):
            folder.chmod(0o555)
            kind, message = error_of(lambda: ledger.append(round_of(1)))
            found = verify(ledger)
            report[what] = (
                kind,
                message,
                (found.num_rounds, found.problems, found.num_strays),
            )
            folder.chmod(0o777)
        ledger.append(round_of(1))
        report["num_rounds"] = ledger.num_rounds
        report["problems"] = verify(ledger).problems
    print(json.dumps(report))


def append_limited(path: Path) -> None:
    import resource

    def limit(size: int) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    many = tuple(f"client-{i}" for i in range(60))
    outcomes: dict[int, object] = {}
    with DiskLedger(path) as ledger:
        chain = ledger.chain
        full = (path / "index.sqlite").stat().st_size
        # Below the size of an array, of the index, and of the index after the round.
        for size in (0, 100, 300, 4096, full // 2, full, full + 4096):
            limit(size)
            kind, message = error_of(lambda: ledger.append(round_of(3, clients=many)))
            limit(resource.RLIM_INFINITY)
            outcomes[size] = (
                kind,
                message,
                ledger.num_rounds,
                ledger.chain == chain,
                verify(ledger).problems,
            )
        ledger.append(round_of(3, clients=many))
        print(json.dumps({"limits": outcomes, "num_rounds": ledger.num_rounds}))


def open_without_room(path: Path) -> None:
    import resource

    (path / "lock").unlink()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    refused = error_of(lambda: DiskLedger(path))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
    again: object = error_of(lambda: DiskLedger(path).close())
    if again == ("", ""):
        with DiskLedger(path) as ledger:
            again = ledger.num_rounds
    print(json.dumps({"open": refused, "again": again}))


def append_with_few_files(path: Path, limit: str, kind: History) -> None:
    import resource

    number = int(limit)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    other = path.parent / "other"
    num_rounds = 0
    error = ""
    try:
        with DiskLedger.create(other, initial_model(), history=kind) as ledger:
            for index in range(number // 2 + 20):
                ledger.append(round_of(index, clients=("a", "b", "c")))
                num_rounds = ledger.num_rounds
            ledger.own_difference("a")
            details_of(ledger, FastFedUL(skew=Kronecker("all")))
    except FastFedULError as failure:
        error = str(failure)
    print(json.dumps({"num_rounds": num_rounds, "error": error}))


def fill_a_disk(folder: Path, kind: History) -> None:
    """Fill a small file system a little less each time until a change goes through."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    subprocess.run(mount, check=True)
    path = disk / "ledger"
    failures: list[tuple[object, ...]] = []

    def until_it_works(what: str, action: Callable[[], object]) -> None:
        for room in range(0, 1_000_000, 8192):
            ballast = disk / "ballast"
            with ballast.open("wb", buffering=0) as file:
                with contextlib.suppress(OSError):
                    while file.write(b"\0" * 4096):
                        pass
                file.truncate(max(0, ballast.stat().st_size - room))
            exists = (path / "index.sqlite").exists()
            before, files = state() if exists else None, arrays()
            kind, message = error_of(action)
            ballast.unlink()
            files.remove(ballast.name)
            if not kind:
                return
            after = state() if (path / "index.sqlite").exists() else None
            problems = problems_of(path) if exists else ()
            same = before == after and arrays() == files
            failures.append((what, room, kind, message, same, problems))

    def arrays() -> list[str]:
        """Array files, and whatever a failed creation left beside its place."""
        left = [entry.name for entry in disk.iterdir() if entry != path]
        return sorted([*left, *(file.name for file in path.glob("arrays/*"))])

    def state() -> tuple[object, ...]:
        with LedgerReader(path) as reader:
            return (
                reader.num_rounds,
                reader.chain,
                reader.final.params.flat.tobytes(),
                reader.clients()["b"].state if "b" in reader.clients() else "",
            )

    until_it_works(
        "create",
        lambda: DiskLedger.create(path, initial_model(), history=kind).close(),
    )
    with DiskLedger(path) as ledger:
        for index in range(4):
            until_it_works("append", partial(ledger.append, round_of(index)))
        until_it_works("erase", lambda: forget(ledger, ["b"], erase=True))
        report: dict[str, object] = {
            "failures": failures,
            "appended": ledger.num_rounds,
            "state of b": ledger.clients()["b"].state,
            "problems": verify(ledger).problems,
        }
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with LedgerReader(path) as reader:
        report["read-only"] = {
            "num_rounds": reader.num_rounds,
            "open for writing": error_of(lambda: DiskLedger(path)),
        }
    print(json.dumps(report))


def run_traced(folder: Path, kind: History) -> None:
    def marked(what: str, action: Callable[[], object]) -> None:
        (folder / f"{what}-begin").mkdir()
        action()
        (folder / f"{what}-end").mkdir()

    path = folder / "ledger"
    marked(
        "create",
        lambda: DiskLedger.create(path, initial_model(), history=kind).close(),
    )
    with DiskLedger(path) as ledger:
        for index in range(4):
            marked(
                f"append-{index}",
                partial(ledger.append, round_of(index, dropped=frozenset({"d"}))),
            )
        marked("forget", lambda: forget(ledger, ["a"], erase=False))
        marked("erase", lambda: forget(ledger, ["b"], erase=True))


PROGRAMS: dict[str, Callable[..., None]] = {
    "hold": hold,
    "append": append_rounds,
    "erase": erase_a_client,
    "unprivileged": read_unprivileged,
    "turns-read-only": turn_read_only,
    "limited": append_limited,
    "no-room-for-lock": open_without_room,
    "few-files": append_with_few_files,
    "full": fill_a_disk,
    "traced": run_traced,
}

if __name__ == "__main__":
    program, place, *others = sys.argv[1:]
    PROGRAMS[program](Path(place), *others)
