"""Damage to files of arrays is found and named, and never becomes an answer."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from fastfedul import DiskLedger, LedgerDamagedError, LedgerReader, verify
from fastfedul.ledger.store import codec
from fastfedul.params import Layout
from fastfedul.records import History, StorageDtype
from tests.support.damage import (
    BOTH_KINDS,
    READINGS,
    array_files,
    array_of,
    assert_no_wrong_answer,
    flip,
)
from tests.support.disk_ledgers import (
    answer,
    assert_one_line,
    initial_model,
    problems_of,
    round_of,
    snapshot_of,
)


@pytest.mark.slow
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


@pytest.mark.slow
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
