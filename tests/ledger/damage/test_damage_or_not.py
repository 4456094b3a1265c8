"""What is damage and what is not: bits of the index file, errors, the log."""

from __future__ import annotations

import json
import random
import sqlite3
from pathlib import Path

import pytest

from fastfedul import LedgerDamagedError, LedgerError, LedgerReader, verify
from fastfedul.ledger.store.index import Index
from fastfedul.ledger.store.schema import EventRow, digest_of, names
from tests.support.damage import (
    BOTH_KINDS,
    READINGS,
    array_files,
    assert_no_wrong_answer,
    flip,
)
from tests.support.disk_ledgers import problems_of


@pytest.mark.slow
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


def test_the_log_is_a_chain_from_the_first_event(template: Path) -> None:
    index = sqlite3.connect(template / "index.sqlite")
    columns = ", ".join(names(EventRow))
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
