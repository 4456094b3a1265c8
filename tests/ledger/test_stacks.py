"""Columns of stored vectors: any columns, into any memory, every block checked."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    LedgerDamagedError,
    LedgerReader,
    Model,
    Params,
    Round,
)
from fastfedul.ledger.store import streaming
from fastfedul.ledger.store.arrays import BLOCK_VALUES
from fastfedul.params import Layout, Slot
from fastfedul.records import StorageDtype, VectorRef
from tests.support.damage import array_of

LAYOUT = Layout((Slot("w", (6 * BLOCK_VALUES + 1000,), "float32"),))
NAMES = ("a", "b", "c")
REFS = [VectorRef(0, name) for name in NAMES]
SPANS = [
    (0, LAYOUT.size),
    (0, 10),
    (5, BLOCK_VALUES),
    (BLOCK_VALUES, 3 * BLOCK_VALUES),
    (BLOCK_VALUES - 1, 2 * BLOCK_VALUES + 1),
    (6 * BLOCK_VALUES, LAYOUT.size),
    (6 * BLOCK_VALUES + 7, LAYOUT.size - 7),
    (7, 7),
]


def written(path: Path, dtype: StorageDtype = "float32") -> Path:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((3, LAYOUT.size), dtype=np.float32)
    updates = tuple(
        ClientUpdate(name, 1 / 3, Params(LAYOUT, row))
        for name, row in zip(NAMES, values, strict=True)
    )
    start = Model(Params.zeros(LAYOUT))
    with DiskLedger.create(path, start, update_dtype=dtype) as ledger:
        ledger.append(Round(0, updates))
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_columns_are_the_columns_of_the_vectors(
    tmp_path: Path, dtype: StorageDtype
) -> None:
    with LedgerReader(written(tmp_path / "ledger", dtype)) as ledger:
        whole = np.array([ledger.combine([ref], [[1.0]]).sums[0] for ref in REFS])
        stack = ledger.stack(REFS)
        wide = np.full((3, LAYOUT.size + 2), np.nan, np.float32)
        for start, stop in SPANS:
            wanted = whole[:, start:stop]
            np.testing.assert_array_equal(stack.read(start, stop), wanted)
            np.testing.assert_array_equal(stack[1:].read(start, stop), wanted[1:])

            wide[...] = np.nan
            own = wide[:, 1 : 1 + stop - start]
            assert stack.read(start, stop, own) is own
            np.testing.assert_array_equal(own, wanted)
            assert np.isnan(wide[:, 0]).all()
            assert np.isnan(wide[:, 1 + stop - start :]).all()


@pytest.mark.parametrize("block", range(7))
def test_damage_is_found_in_every_block_that_is_touched(
    tmp_path: Path, block: int
) -> None:
    path = written(tmp_path / "ledger")
    array_of(path, round_=0, client="b").flip(4 * (block * BLOCK_VALUES + 500))
    with LedgerReader(path) as ledger:
        stack = ledger.stack(REFS)
        begin, end = block * BLOCK_VALUES, (block + 1) * BLOCK_VALUES
        for start, stop in SPANS:
            if start < end and stop > begin and start < stop:
                with pytest.raises(LedgerDamagedError, match="client 'b'"):
                    stack.read(start, stop)
            else:
                stack.read(start, stop)


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_files_stay_open_while_a_stack_lives_but_never_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LedgerReader(written(tmp_path / "ledger")) as ledger:
        before = num_open()
        stack = ledger.stack(REFS)
        whole = stack.read(0, LAYOUT.size)
        files = {source.file for source in stack.sources}
        assert num_open() == before + len(files) > before + 1
        del stack
        assert num_open() == before

        monkeypatch.setattr(streaming, "_OPEN_FILES", 1)
        stack = ledger.stack(REFS)
        np.testing.assert_array_equal(stack.read(0, LAYOUT.size), whole)
        assert num_open() == before + 1


def test_threads_inside_threads_are_not_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streaming, "num_threads", lambda: 4)
    outside: set[int] = set()
    inside: set[tuple[int, int]] = set()

    def outer(blocks: Iterable[int]) -> None:
        own = threading.get_ident()
        for _ in blocks:
            outside.add(own)

            def inner(turns: Iterable[int]) -> None:
                inside.update((own, threading.get_ident()) for _ in turns)

            streaming.run_blocks(inner, 8)

    streaming.run_blocks(outer, 8)

    assert threading.get_ident() not in outside
    assert {own for own, _ in inside} == outside
    assert all(own == worker for own, worker in inside)
