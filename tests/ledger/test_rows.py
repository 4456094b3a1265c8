"""Typed rows: what is written to the index comes back, and nothing else fits."""

from __future__ import annotations

import struct
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastfedul.ledger.store.index import Index
from fastfedul.ledger.store.schema import (
    COUNTED,
    ROWS,
    HeadRow,
    Row,
    catalogue,
    key_names,
    names,
    values_of,
)

PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    # SQLite has no NaN: it would come back as NULL.
    float: st.floats(allow_nan=False),
    str: st.text(),
    bytes: st.binary(),
    types.NoneType: st.none(),
}


def values_for(hint: Any) -> st.SearchStrategy[Any]:
    """Values that a column of this type may have."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return st.one_of(*(values_for(option) for option in typing.get_args(hint)))
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(typing.get_args(hint))
    return PLAIN[hint]


def rows_of(row: type[Row]) -> st.SearchStrategy[Row]:
    hints = typing.get_type_hints(row)
    return st.builds(row, **{name: values_for(hints[name]) for name in names(row)})


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    path = tmp_path_factory.mktemp("rows") / "index.sqlite"
    made = Index(path, write=True, create=True)
    made._connection.execute("PRAGMA synchronous=OFF")
    with made.writing():
        made.create_tables()
        for row in ROWS:
            made.delete(row)
    yield made
    made.close()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.table)
@settings(max_examples=40)
@given(data=st.data())
def test_what_is_written_comes_back(
    row: type[Row], index: Index, data: st.DataObject
) -> None:
    one = data.draw(rows_of(row))
    other = data.draw(rows_of(row))
    key = {name: getattr(one, name) for name in key_names(row)}
    try:
        with index.writing():
            index.add(one)
            assert index.rows(row) == [one]
            back = index.one(row, **key)
            assert back == one
            # Of the same type, too: 1 and 1.0 are equal and have other digests.
            assert list(map(type, values_of(back))) == list(map(type, values_of(one)))
            assert index.changed_rows(row) == []
            # A row with the same key takes its place.
            columns = {n: getattr(other, n) for n in names(row)} | key
            index.replace(row(**columns))
            assert index.rows(row) == [row(**columns)]
            raise _UndoneError
    except _UndoneError:
        pass
    with index.reading():
        assert index.rows(row) == []


class _UndoneError(Exception):
    """Rolls an example back."""


def test_every_table_is_in_the_catalogue_once() -> None:
    tables = [name for kind, name, _, _ in catalogue() if kind == "table"]
    assert sorted(tables) == sorted(row.table for row in ROWS)


def test_the_head_counts_every_table_that_the_writer_changes() -> None:
    counted = {name[4:] for name in names(HeadRow) if name.startswith("num_")}
    assert counted == {row.table for row in COUNTED}
    single = {"ledger", "head", "policy", "place", "request_head"}
    assert counted | single | {"requests"} == {row.table for row in ROWS}


@pytest.mark.parametrize("wrong", [True, 2**63, "\ud800", object(), [1]])
def test_a_value_that_has_no_form_in_the_index_is_refused(
    wrong: object, index: Index
) -> None:
    row = ROWS[-1](1, "rounds", wrong)  # type: ignore[call-arg]
    refused = (TypeError, UnicodeEncodeError, struct.error)
    with pytest.raises(refused), index.writing():
        index.add(row)
    with index.reading():
        assert index.rows(ROWS[-1]) == []


def test_an_index_can_be_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    made = Index(path, write=True, create=True)
    with made.writing():
        made.create_tables()
    made.close()
    again = Index(path, write=False)
    with again.reading():
        assert again.is_as_defined()
    again.close()
