"""Damage to rows of the index is found and named, and never becomes an answer."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest

from fastfedul import LedgerDamagedError, LedgerReader
from fastfedul.errors import UnknownClientError
from fastfedul.ledger.store.schema import digest_of, key_names, names
from tests.support.damage import (
    EVERY_TABLE,
    KINDS,
    KINDS_OF,
    ROW_OF,
    Kind,
    assert_no_wrong_answer,
    changed,
)
from tests.support.disk_ledgers import problems_of


def test_together_the_ledgers_under_test_have_rows_in_every_table(
    templates: dict[Kind, Path],
) -> None:
    for table in ROW_OF:
        wanted = KINDS_OF.get(table, KINDS)
        kinds = {kind for kind, path in templates.items() if has_rows(path, table)}
        assert kinds & {*KINDS, *wanted} == set(wanted), table


def has_rows(path: Path, table: str) -> bool:
    index = sqlite3.connect(path / "index.sqlite")
    [(count,)] = index.execute(f"SELECT count(*) FROM {table}").fetchall()
    index.close()
    return bool(count)


EVERY_COLUMN = [
    (table, column, kind)
    for table, kind in EVERY_TABLE
    for column in (*names(ROW_OF[table]), "digest")
]


@pytest.mark.parametrize(
    "position", ["last", pytest.param("first", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("table", "column", "kind"), EVERY_COLUMN)
def test_any_changed_value_of_the_index_is_found_and_never_believed(
    table: str, column: str, position: str, damaged: Path, truth: dict[str, object]
) -> None:
    index = sqlite3.connect(damaged / "index.sqlite")
    keys = key_names(ROW_OF[table])
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


def client_name(index: sqlite3.Connection, number: int) -> str:
    [(name,)] = index.execute("SELECT name FROM clients WHERE id = ?", (number,))
    return str(name)


def client_rows(path: Path) -> list[tuple[str, int]]:
    index = sqlite3.connect(path / "index.sqlite")
    rows = index.execute("SELECT name, id FROM clients").fetchall()
    index.close()
    return rows


@pytest.mark.parametrize(
    "value",
    [
        "text",
        *(
            pytest.param(value, marks=pytest.mark.slow)
            for value in (None, b"bytes", 1.5, -1, 2**62)
        ),
    ],
)
@pytest.mark.parametrize(("table", "kind"), EVERY_TABLE)
def test_a_value_of_another_kind_is_found_and_never_believed(
    table: str,
    value: object,
    template: Path,
    damaged: Path,
    truth: dict[str, object],
) -> None:
    for column in names(ROW_OF[table])[1:]:
        # Of one column alone: the damage of the column before would be found as well.
        shutil.copyfile(template / "index.sqlite", damaged / "index.sqlite")
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
    keys = key_names(ROW_OF[table])
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
    columns = ", ".join(names(ROW_OF[table]))
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
    if table in ("ledger", "head", "request_head", "policy", "place"):
        assert_no_wrong_answer(damaged, truth)
        return
    assert problems_of(damaged)
    assert_no_wrong_answer(damaged, truth)


@pytest.mark.parametrize(
    ("table", "column", "named"),
    [
        ("updates", "share", "round 0"),
        ("updates", "keep_probability", "round 0"),
        ("rounds", "root", "round 0"),
        ("rounds", "root_chain", "round 0"),
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
    columns, keys = names(ROW_OF[table]), key_names(ROW_OF[table])
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


@pytest.mark.parametrize(
    "damage",
    ["DELETE FROM clients WHERE name = 'a'", "UPDATE clients SET name = 'x' || name"],
)
def test_a_client_that_was_lost_is_not_taken_for_a_stranger(
    damage: str, damaged: Path
) -> None:
    index = sqlite3.connect(damaged / "index.sqlite")
    index.execute(damage)
    index.commit()
    index.close()
    with LedgerReader(damaged) as reader:
        for read in (reader.client, reader.updates_of, reader.own_difference):
            with pytest.raises(LedgerDamagedError):
                read("a")


def test_a_stranger_is_a_stranger(damaged: Path) -> None:
    with LedgerReader(damaged) as reader:
        assert reader.client("nobody") is None
        assert reader.updates_of("nobody") == ()
        with pytest.raises(UnknownClientError):
            reader.own_difference("nobody")
