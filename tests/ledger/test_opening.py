"""Folders that hold no whole ledger are refused by name."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from fastfedul import DiskLedger, LedgerDamagedError, LedgerReader, verify
from fastfedul.ledger.store.schema import FORMAT
from fastfedul.params import Layout
from tests.support.damage import INDEX_ONLY, READINGS, array_of, resign
from tests.support.disk_ledgers import (
    answer,
    assert_one_line,
    assert_refused,
    initial_model,
    round_of,
)


def test_nothing_at_a_path_is_said_to_be_nothing(tmp_path: Path) -> None:
    assert_refused(tmp_path / "missing", "missing", "nothing")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_an_index_is_no_ledger(path: Path) -> None:
    (path / "index.sqlite").unlink()
    assert_refused(path, "index.sqlite")


def test_a_ledger_without_its_folder_of_arrays_is_refused(path: Path) -> None:
    shutil.rmtree(path / "arrays")
    assert_refused(path, "arrays")


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
    assert len(problems) == 3
    assert all("is missing" in problem for problem in problems)
    for place in ("the initial model", "the current model", "round 0, step"):
        assert any(place in problem for problem in problems), place


def test_a_missing_file_is_named_by_round_and_client(tmp_path: Path) -> None:
    layout = Layout.of({"w": np.zeros(400_000)})
    path = tmp_path / "ledger"
    with DiskLedger.create(path, initial_model(layout)) as ledger:
        for index, clients in enumerate((("a", "b"), ("b", "c"), ("a", "c"))):
            ledger.append(round_of(index, layout=layout, clients=clients))
    places = [array_of(path, round_=index, client="bca"[index]) for index in range(3)]
    assert len({place.file for place in places}) == 3
    places[1].file.unlink()
    with LedgerReader(path) as reader:
        assert answer(reader, "a")
        with pytest.raises(LedgerDamagedError) as caught:
            answer(reader, "c")
        assert_one_line(caught, "round 1", "'c'", "missing")
        [problem] = verify(reader).problems
    assert f"round 1, client 'b': the file {places[1].file.name} is missing" in problem


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
    assert_refused(path, "index.sqlite")
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
    assert_refused(path, "index.sqlite")


def test_another_database_in_place_of_the_index_is_refused(path: Path) -> None:
    (path / "index.sqlite").unlink()
    other = sqlite3.connect(path / "index.sqlite")
    other.execute("CREATE TABLE ledger (format INTEGER)")
    other.execute("INSERT INTO ledger VALUES (?)", (FORMAT,))
    other.commit()
    other.close()
    assert_refused(path, "index.sqlite")


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("version", [1, FORMAT - 1, FORMAT + 1, 1000, 0])
def test_another_format_is_refused_by_name(
    path: Path, version: int, signed: bool
) -> None:
    index = sqlite3.connect(path / "index.sqlite")
    index.execute("UPDATE ledger SET format = ?", (version,))
    if signed:
        resign(index, "ledger")
    index.commit()
    index.close()
    for error in assert_refused(path, f"format {version}"):
        assert not isinstance(error, LedgerDamagedError)
