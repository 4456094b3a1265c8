"""What SQLite does for each statement: no table that grows is read without need."""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    LedgerReader,
    Params,
    add_request,
    forget,
    preview,
)
from fastfedul.cli.ledger.contents import clients as show_clients
from fastfedul.cli.ledger.contents import info as show_info
from fastfedul.ledger.anchor import ANCHOR_VARIABLE
from fastfedul.records import History, Round
from tests.support import shrinking
from tests.support.disk_ledgers import LAYOUT, initial_model, round_of, vector

GROWING = frozenset(
    {"rounds", "updates", "clients", "files", "parts", "pairs", "events"}
    | {"models", "requests", "adjustments"}
)
"""Tables that have more rows the longer a federation trains."""


@pytest.fixture(scope="module", params=["rounds", "sums"])
def recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A ledger with rows in every table that its kind uses."""
    history: History = request.param
    path = tmp_path_factory.mktemp(history) / "ledger"
    with DiskLedger.create(path, initial_model(), history=history) as ledger:
        for index in range(6):
            ledger.append(round_of(index))
        add_request(path, "b", "consent withdrawn")
        forget(ledger, ["b"], erase=True)
        ledger.append(round_of(6, clients=("a", "c", "d")))
    return path


@contextmanager
def statements(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every statement of connections that are opened in the block."""
    found: list[str] = []
    connect = sqlite3.connect

    def traced(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        connection.set_trace_callback(found.append)
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", traced)
        yield found


def scanned(path: Path, traced: list[str]) -> set[str]:
    """The growing tables of which all rows are read, by SQLite's own plan."""
    connection = sqlite3.connect(path / "index.sqlite")
    tables = set()
    queries = [s for s in traced if s.split()[0] in ("SELECT", "DELETE", "UPDATE")]
    assert queries
    for sql in queries:
        for *_, detail in connection.execute(f"EXPLAIN QUERY PLAN {sql}"):
            found = re.match(r"SCAN (\w+)", detail)
            # The first few entries of an index are not the whole of it.
            first = "INDEX" in detail and re.search(r"LIMIT \d{1,2}$", sql)
            if found and not first:
                tables.add(found.group(1))
    connection.close()
    return tables & GROWING


def test_a_scan_would_be_seen(recorded: Path) -> None:
    assert scanned(recorded, ["SELECT * FROM updates WHERE share > 0.5"]) == {"updates"}
    assert scanned(recorded, ["SELECT count(*) FROM rounds"]) == {"rounds"}
    assert scanned(recorded, ["DELETE FROM pairs WHERE odds = 1"]) == {"pairs"}
    assert not scanned(recorded, ["SELECT * FROM updates WHERE client = 1"])


def test_opening_reads_no_table_but_that_of_the_files(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with statements(monkeypatch) as traced:
        LedgerReader(recorded).close()
    assert scanned(recorded, traced) == set()
    with statements(monkeypatch) as traced:
        DiskLedger(recorded).close()
    # A writer compares the files with what is in the folder.
    assert scanned(recorded, traced) == {"files"}


def test_appending_reads_no_table(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskLedger(recorded) as ledger:
        history = ledger.settings.history
        traced: list[str] = []
        ledger.index._connection.set_trace_callback(traced.append)
        first = ledger.num_rounds
        ledger.append(round_of(first, clients=("a", "c", "d")))
        ledger.append(round_of(first + 1, clients=("a", "c", "d", f"new-{first}")))
        ledger.index._connection.set_trace_callback(None)
    assert any(s.startswith("INSERT INTO rounds") for s in traced)
    assert any(s.startswith("INSERT INTO clients") for s in traced)
    # Of pairs there are 64 at most, however long the training.
    assert scanned(recorded, traced) == (set() if history == "rounds" else {"pairs"})


def test_appending_within_a_budget_reads_no_table(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with shrinking.ledger_at(path, 10) as ledger:
        ledger.set_budget(ledger.num_array_bytes() + ledger.index.num_bytes())
        traced: list[str] = []
        ledger.index._connection.set_trace_callback(traced.append)
        ledger.append(shrinking.round_of(10))
        ledger.index._connection.set_trace_callback(None)
        assert [event.kind for event in ledger.events()] == ["drop"]
    assert scanned(path, traced) == set()


@pytest.mark.parametrize(
    ("command", "needed"),
    [(show_info, {"clients", "rounds", "events"}), (show_clients, {"clients"})],
)
def test_commands_that_show_a_ledger_read_only_what_they_show(
    command: Callable[..., None],
    needed: set[str],
    recorded: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with statements(monkeypatch) as traced:
        command(recorded)
    assert "active" in capsys.readouterr().out
    assert scanned(recorded, traced) <= needed


def test_the_preview_of_one_client_does_not_read_all_updates(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with statements(monkeypatch) as traced, LedgerReader(recorded) as ledger:
        preview(ledger, ["a"])
    assert not scanned(recorded, traced) & {"updates", "files"}


@pytest.mark.parametrize("erase", [True, False])
def test_forgetting_one_client_with_a_certificate_reads_no_updates_of_others(
    recorded: Path,
    erase: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does the anchor of an operator."""
    path = tmp_path / "ledger"
    shutil.copytree(recorded, path)
    monkeypatch.setenv(ANCHOR_VARIABLE, str(tmp_path / "anchor"))
    add_request(path, "c")
    with DiskLedger(path) as ledger:
        history = ledger.settings.history
        traced: list[str] = []
        ledger.index._connection.set_trace_callback(traced.append)
        found = forget(ledger, ["c"], erase=erase)
        ledger.index._connection.set_trace_callback(None)
    assert found.certificate is not None
    read = scanned(path, traced)
    if history == "sums" and erase:
        # Sums are corrected for every client, and no dead vector may stay in a file.
        assert read <= {"rounds", "clients", "pairs", "events", "parts", "files"}
    else:
        assert read <= {"rounds", "clients", "pairs", "events", "adjustments"}


def test_the_anchor_of_an_append_reads_no_table(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ANCHOR_VARIABLE, str(tmp_path / "anchor"))
    with statements(monkeypatch) as traced, DiskLedger(recorded) as ledger:
        opened = len(traced)
        ledger.append(round_of(ledger.num_rounds, clients=("a", "c", "d")))
    assert scanned(recorded, traced[:opened]) == {"files"}
    assert scanned(recorded, traced[opened:]) <= {"pairs"}
    assert (tmp_path / "anchor").read_text().count("\n") == 2


def test_one_client_is_looked_up_without_reading_the_others(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with statements(monkeypatch) as traced, LedgerReader(recorded) as ledger:
        assert ledger.client("a") is not None
        assert ledger.updates_of("a")
        assert ledger.updates_in(0)
    assert scanned(recorded, traced) == set()


@pytest.mark.parametrize("num_clients", [2, 200])
def test_the_statements_of_an_append_grow_with_its_participants_alone(
    num_clients: int, tmp_path: Path
) -> None:
    """Not with the rounds before it."""
    counts = []
    with DiskLedger.create(tmp_path / "ledger", initial_model()) as ledger:
        for index in range(12):
            traced: list[str] = []
            ledger.index._connection.set_trace_callback(traced.append)
            ledger.append(many(index, num_clients))
            ledger.index._connection.set_trace_callback(None)
            counts.append(len(traced))
    assert len(set(counts[2:])) == 1
    assert counts[-1] < 40 + 8 * num_clients


def many(index: int, num_clients: int) -> Round:
    updates = tuple(
        ClientUpdate(f"{n:03d}", 1 / num_clients, Params(LAYOUT, vector(9, n)))
        for n in range(num_clients)
    )
    return Round(index, updates)
