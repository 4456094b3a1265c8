"""Deleted arrays leave a SuperLink's database, and nothing else does.

A database of Flower's shape made with SQLite alone; the same on the database of a real
SuperLink is in test_flower_deployment.py.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from fastfedul.integrations.flower.database import (
    FlowerDatabaseError,
    NoFlowerDatabaseError,
    clear_deleted,
)
from fastfedul.rng import stream

TABLES = """
CREATE TABLE alembic_version (version_num TEXT);
CREATE TABLE node (node_id INTEGER PRIMARY KEY, name TEXT, public_key BLOB);
CREATE TABLE run (run_id INTEGER PRIMARY KEY, status TEXT);
CREATE TABLE objects (object_id TEXT PRIMARY KEY, content BLOB);
CREATE TABLE run_objects (run_id INTEGER, object_id TEXT);
CREATE INDEX by_status ON run (status);
"""


def random_bytes(number: int, size: int) -> bytes:
    return stream(0, "database test", number).bytes(size)


def make(path: Path, *, num_arrays: int = 8, size: int = 40_000) -> list[bytes]:
    """Write a database as a killed SuperLink leaves it; return the deleted arrays."""
    arrays = [random_bytes(number, size) for number in range(num_arrays)]
    alive = path.with_name("alive")
    alive.mkdir()
    with closing(sqlite3.connect(alive / "it.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(TABLES)
        connection.execute("INSERT INTO alembic_version VALUES ('d90a2f91f23c')")
        for number in range(300):
            values = (number, "a", random_bytes(1000 + number, 100))
            connection.execute("INSERT INTO node VALUES (?, ?, ?)", values)
        connection.execute("INSERT INTO run VALUES (1, 'running')")
        for number, array in enumerate(arrays):
            name = f"array-{number}"
            connection.execute("INSERT INTO objects VALUES (?, ?)", (name, array))
            connection.execute("INSERT INTO run_objects VALUES (1, ?)", (name,))
        connection.execute("DELETE FROM objects")
        connection.execute("DELETE FROM run_objects")
        connection.execute("UPDATE run SET status = 'finished'")
        for suffix in ("", "-wal"):
            shutil.copy(alive / f"it.db{suffix}", f"{path}{suffix}")
    shutil.rmtree(alive)
    return arrays


def rows(path: Path) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        found: list[tuple[object, ...]] = []
        for table in ("alembic_version", "node", "run", "objects", "run_objects"):
            found += connection.execute(f"SELECT * FROM {table}").fetchall()
        return found


def present(path: Path, arrays: list[bytes]) -> int:
    """Return how many arrays have a piece in any file beside the database."""
    data = b"".join(file.read_bytes() for file in path.parent.iterdir())
    return sum(any(a[i : i + 32] in data for i in range(0, 4000, 32)) for a in arrays)


def test_deleted_arrays_are_gone_and_every_row_is_there(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    arrays = make(path)
    assert present(path, arrays) == len(arrays)
    found = clear_deleted(path)
    assert present(path, arrays) == 0
    kept = rows(path)
    assert found.num_rows == len(kept) == 302
    assert (1, "finished") in kept
    assert (7, "a", random_bytes(1007, 100)) in kept
    assert found.num_objects == 0
    assert found.bytes_after < found.bytes_before


def test_an_array_that_flower_still_holds_is_kept_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    make(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("INSERT INTO objects VALUES ('live', ?)", (b"live" * 99,))
        connection.commit()
    assert clear_deleted(path).num_objects == 1
    assert ("live", b"live" * 99) in rows(path)


def test_clearing_twice_is_the_same_as_once(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    make(path)
    clear_deleted(path)
    once = rows(path)
    second = clear_deleted(path)
    assert second.bytes_before == second.bytes_after
    assert rows(path) == once


@pytest.mark.slow
@pytest.mark.parametrize("writes", [False, True])
def test_a_database_in_use_is_refused_and_stays(tmp_path: Path, writes: bool) -> None:
    path = tmp_path / "state.db"
    arrays = make(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as user:
        user.execute("SELECT count(*) FROM node").fetchone()
        if writes:
            user.execute("BEGIN IMMEDIATE")
            user.execute("INSERT INTO run VALUES (2, 'running')")
        with pytest.raises(FlowerDatabaseError, match="in use; stop the SuperLink"):
            clear_deleted(path)
        if writes:
            user.execute("COMMIT")
    assert len(rows(path)) == 302 + writes
    assert clear_deleted(path).num_rows == 302 + writes
    assert present(path, arrays) == 0


def test_other_files_are_refused_and_stay_as_they_are(tmp_path: Path) -> None:
    text, other = tmp_path / "text.db", tmp_path / "other.db"
    text.write_text("no database")
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE run (id INTEGER)")
        connection.commit()
    before = other.read_bytes()
    for path in (text, other):
        with pytest.raises(NoFlowerDatabaseError, match="not the database of a Flower"):
            clear_deleted(path)
    for path in (tmp_path, tmp_path / "absent.db"):
        with pytest.raises(NoFlowerDatabaseError, match="cannot read"):
            clear_deleted(path)
    assert other.read_bytes() == before
    assert not (tmp_path / "absent.db").exists()


def test_a_damaged_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    make(path)
    clear_deleted(path)
    damaged = bytearray(path.read_bytes())
    damaged[3 * 4096 : 4 * 4096] = b"\x55" * 4096
    path.write_bytes(damaged)
    with pytest.raises(FlowerDatabaseError):
        clear_deleted(path)
    assert path.read_bytes() == damaged


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.02, 0.05, 0.1, 0.2])
def test_killed_while_clearing_no_row_is_lost(tmp_path: Path, delay: float) -> None:
    path = tmp_path / "state.db"
    arrays = make(path, num_arrays=40, size=500_000)
    code = (
        "import sys; from pathlib import Path\n"
        "from fastfedul.integrations.flower.database import clear_deleted\n"
        "print('go', flush=True); clear_deleted(Path(sys.argv[1]))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, path], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            process.kill()
    assert clear_deleted(path).num_rows == 302
    assert len(rows(path)) == 302
    assert present(path, arrays) == 0


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fastfedul", "flower", "clean", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_command_prints_one_object_or_one_line(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    make(path)
    done = command(str(path), "--json")
    assert done.returncode == 0
    facts = json.loads(done.stdout)
    assert facts["rows"] == 302
    assert facts["bytes_after"] < facts["bytes_before"]
    refused = command(str(tmp_path / "absent.db"))
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr.startswith("error: cannot read")
    assert len(refused.stderr.splitlines()) == 1
