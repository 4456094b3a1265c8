"""Looks: readers read rows in the file itself, without a lock and without a copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fastfedul import (
    DiskLedger,
    InvalidInputError,
    LedgerReader,
    add_request,
    forget,
    preview,
)
from fastfedul.cli.ledger.contents import clients, info, lineage
from fastfedul.cli.request import list_requests
from tests.support.disk_ledgers import round_of


@pytest.fixture
def no_copies(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a reader fail that copies the index, after somebody filed a request."""
    add_request(path, "b")

    def refused(path: Path) -> None:
        raise AssertionError(f"{path} was copied")

    monkeypatch.setattr("fastfedul.ledger.store.index.read_image", refused)


@pytest.mark.usefixtures("no_copies")
@pytest.mark.parametrize("command", [info, clients, lineage, list_requests])
def test_commands_that_show_rows_do_not_copy_the_index(
    command: Callable[..., None], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command(path)
    assert capsys.readouterr().out


@pytest.mark.usefixtures("no_copies")
def test_facts_of_one_client_or_round_do_not_copy_the_index(path: Path) -> None:
    with LedgerReader(path) as ledger:
        assert ledger.num_rounds == 3
        assert ledger.client("a") is not None
        assert len(ledger.updates_of("a")) == len(ledger.rounds()) == 3
        assert ledger.updates_in(0)
        assert ledger.waiting() == ledger.requests() != ()
        with pytest.raises(AssertionError, match="copied"), ledger.snapshot():
            pass


def test_a_look_begins_again_if_a_commit_comes_in_between(path: Path) -> None:
    seen = []
    with DiskLedger(path) as writer, LedgerReader(path) as reader:

        def read() -> tuple[int, int]:
            seen.append(reader.num_rounds)
            if len(seen) == 1:
                writer.append(round_of(3))
            return seen[-1], len(reader.rounds())

        assert reader.index.look(read) == (4, 4)
        assert seen == [3, 4]


def test_a_look_among_endless_commits_takes_a_copy(path: Path) -> None:
    seen = []
    with DiskLedger(path) as writer, LedgerReader(path) as reader:

        def read() -> tuple[int, int]:
            seen.append(reader.num_rounds)
            writer.append(round_of(writer.num_rounds))
            return seen[-1], len(reader.rounds())

        last, count = reader.index.look(read)
        assert last == count == seen[-1]
        assert 1 < len(seen) < 10
        assert writer.num_rounds == last + 1


def test_an_error_of_the_reading_function_is_no_reason_to_begin_again(
    path: Path,
) -> None:
    calls = []
    with LedgerReader(path) as reader:

        def read() -> None:
            calls.append(reader.num_rounds)
            raise InvalidInputError("as the caller says")

        with pytest.raises(InvalidInputError, match="as the caller says"):
            reader.index.look(read)
        assert calls == [3]
        assert reader.num_rounds == 3


def selects(traced: list[str], table: str) -> list[str]:
    """The statements that read rows of a table."""
    return [s for s in traced if s.startswith(f"SELECT * FROM {table} ")]


def test_forgetting_reads_the_rows_of_rounds_and_of_the_client_once(path: Path) -> None:
    with DiskLedger(path) as ledger:
        for index in range(3, 20):
            ledger.append(round_of(index))
        traced: list[str] = []
        ledger.index._connection.set_trace_callback(traced.append)
        found = preview(ledger, ["b"])
        ledger.index._connection.set_trace_callback(None)
        assert found.rounds == 20
        assert len([s for s in selects(traced, "rounds") if "WHERE" not in s]) == 1
        own = [s for s in selects(traced, "updates") if "WHERE client = 2 " in s]
        assert len(own) == 1


def test_remembered_rows_are_those_of_the_last_change(path: Path) -> None:
    with DiskLedger(path) as ledger, LedgerReader(path) as reader:
        for index in range(3, 6):
            before = ledger.rounds()
            assert len(before) == index == len(reader.rounds())
            with pytest.raises(InvalidInputError):
                ledger.append(round_of(index + 1))
            assert ledger.rounds() == before
            ledger.append(round_of(index))
            assert len(ledger.updates_of("a")) == index + 1
            assert len(reader.updates_of("a")) == index + 1
        forget(ledger, ["a"], erase=True)
        for one in (ledger, reader):
            assert one.updates_of("a") == ()
            assert one.clients()["a"].state == "erased"
            assert {entry.num_updates for entry in one.rounds()} == {
                len(one.updates_in(index)) for index in range(6)
            }


def test_rows_read_in_a_change_that_fails_are_not_remembered(path: Path) -> None:
    with DiskLedger(path) as ledger:
        before = dict(ledger.clients())

        def change_and_fail() -> None:
            with ledger._changing("a change") as change:
                row = change.client("a")
                change.index.delete(type(row), id=row.id)
                assert "a" not in {c.name for c in change.index.rows(type(row))}
                change.save_head()
                assert "a" not in ledger.clients()
                raise InvalidInputError("no")

        with pytest.raises(InvalidInputError, match="no"):
            change_and_fail()
        assert ledger.clients() == before
