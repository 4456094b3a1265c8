"""Opening for writing removes nothing before the ledger has proven itself."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from fastfedul import DiskLedger, LedgerDamagedError, LedgerLockedError, verify
from fastfedul.ledger.store.array_files import SET_ASIDE
from tests.support.disk_ledgers import record, round_of


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (path / "arrays").iterdir()}


@pytest.mark.parametrize("rounds", [1, 3])
def test_an_index_older_than_its_files_removes_none_of_them(
    tmp_path: Path, rounds: int
) -> None:
    path = tmp_path / "ledger"
    record(path, rounds)
    shutil.copy(path / "index.sqlite", tmp_path / "old.sqlite")
    with DiskLedger(path) as ledger:
        for _ in range(4):
            ledger.append(round_of(ledger.num_rounds))
    newest, before = (path / "index.sqlite").read_bytes(), files_of(path)
    shutil.copy(tmp_path / "old.sqlite", path / "index.sqlite")
    with pytest.raises(LedgerDamagedError, match="nothing was changed"):
        DiskLedger(path)
    assert files_of(path) == before
    (path / "index.sqlite").write_bytes(newest)
    with DiskLedger(path) as ledger:
        assert ledger.num_rounds == rounds + 4
        assert not verify(ledger).problems


def test_files_of_rounds_that_the_first_index_does_not_know_are_set_aside(
    tmp_path: Path,
) -> None:
    """Before its first round, an index names no file that a change removes."""
    path = tmp_path / "ledger"
    record(path, 0)
    shutil.copy(path / "index.sqlite", tmp_path / "old.sqlite")
    with DiskLedger(path) as ledger:
        for index in range(3):
            ledger.append(round_of(index))
    newest, before = (path / "index.sqlite").read_bytes(), files_of(path)
    shutil.copy(tmp_path / "old.sqlite", path / "index.sqlite")
    DiskLedger(path).close()
    aside = {file.name: file.read_bytes() for file in (path / SET_ASIDE).iterdir()}
    assert {**files_of(path), **aside} == before
    for file in (path / SET_ASIDE).iterdir():
        file.rename(path / "arrays" / file.name)
    (path / "index.sqlite").write_bytes(newest)
    with DiskLedger(path) as ledger:
        assert not verify(ledger).problems
        ledger.append(round_of(3))
    shutil.copy(tmp_path / "old.sqlite", path / "index.sqlite")
    with DiskLedger(path) as ledger:
        assert (path / SET_ASIDE).exists()
        ledger.append(round_of(0))
        assert not (path / SET_ASIDE).exists(), "the ledger has gone on without them"


def test_a_writer_whose_lock_file_was_removed_records_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with DiskLedger(record(path, 2)) as first:
        (path / "lock").unlink()
        with DiskLedger(path) as second:
            with pytest.raises(LedgerLockedError, match="lost the lock"):
                first.append(round_of(2))
            second.append(round_of(2))
            assert second.num_rounds == 3
            assert not verify(second).problems


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = DiskLedger(record(path, 1))
    ready, go_on = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"x")
        os.read(go_on[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        ledger.append(round_of(1))
        ledger.close()
        with DiskLedger(path) as again:
            assert again.num_rounds == 2
    finally:
        os.write(go_on[1], b"x")
        os.waitpid(child, 0)
        for descriptor in (*ready, *go_on):
            os.close(descriptor)
