"""One writer, many readers."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from fastfedul import (
    DiskLedger,
    FastFedUL,
    LedgerLockedError,
    LedgerReader,
    NoSkew,
    UnlearnRequest,
    forget,
    params_at,
    verify,
)
from fastfedul.ledger.store.index import Index
from tests.support.disk_ledgers import (
    answer,
    assert_one_line,
    initial_model,
    models_by_hand,
    round_of,
)
from tests.support.ledger_programs import holder, process


def test_a_second_writer_is_refused_and_told_who_is_first(path: Path) -> None:
    with holder(path) as pid:
        with pytest.raises(LedgerLockedError) as caught:
            DiskLedger(path)
        assert_one_line(caught, f"process {pid} ")
        with LedgerReader(path) as one, LedgerReader(path) as other:
            assert one.num_rounds == other.num_rounds == 3
            assert answer(one) == answer(other)
    with DiskLedger(path) as ledger:
        ledger.append(round_of(3))


def test_a_second_writer_in_the_same_process_is_refused_too(path: Path) -> None:
    with DiskLedger(path):
        with pytest.raises(LedgerLockedError) as caught:
            DiskLedger(path)
        assert_one_line(caught, f"process {os.getpid()} ")
    DiskLedger(path).close()


def test_the_lock_of_a_killed_writer_is_free(path: Path) -> None:
    with holder(path) as pid:
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while True:
            try:
                DiskLedger(path).close()
                break
            except LedgerLockedError:
                assert time.monotonic() < deadline
                time.sleep(0.01)


def test_readers_see_whole_rounds_while_another_process_writes(path: Path) -> None:
    num_rounds = 25
    expected = list(itertools.islice(models_by_hand(), num_rounds + 1))
    seen = set()
    with LedgerReader(path) as kept_open, process("append", path, num_rounds) as other:
        while other.poll() is None:
            with LedgerReader(path) as fresh:
                for reader in (kept_open, fresh):
                    with reader.snapshot():
                        count = reader.num_rounds
                        assert len(reader.rounds()) == count
                        np.testing.assert_array_equal(
                            reader.final.params.flat, expected[count]
                        )
                        at = params_at(reader, count // 2)
                        np.testing.assert_array_equal(at.flat, expected[count // 2])
                        result = FastFedUL(skew=NoSkew())(
                            UnlearnRequest(reader, frozenset({"b"}))
                        )
                        assert result.rounds == count
                    seen.add(count)
        assert other.returncode == 0
        assert kept_open.num_rounds == num_rounds
        assert verify(kept_open).problems == ()
    assert len(seen) >= 2, "the readers never ran beside the writer"


def test_verifying_does_not_keep_the_writer_waiting(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastfedul.ledger.store.index._TIMEOUT_SECONDS", 0.1)
    with DiskLedger(path) as writer, LedgerReader(path) as reader:

        def work(done: int, _total: int) -> None:
            if writer.num_rounds == 3:
                writer.append(round_of(3))
                forget(writer, ["a"], erase=True)

        assert verify(reader, work).problems == ()
        assert writer.num_rounds == 4
        assert verify(reader).problems == ()


def test_a_commit_while_a_reader_opens_is_not_taken_for_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger"
    measure, rounds = Index.num_bytes, iter(range(200))
    with DiskLedger.create(path, initial_model()) as writer:

        def commit_first(index: Index) -> int:
            # Enough rounds that the file grows by a page.
            size = index.path.stat().st_size
            while index is not writer.index and index.path.stat().st_size == size:
                writer.append(round_of(next(rounds)))
            return measure(index)

        monkeypatch.setattr(Index, "num_bytes", commit_first)
        with LedgerReader(path) as reader:
            monkeypatch.undo()
            assert reader.num_rounds == next(rounds)
