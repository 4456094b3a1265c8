"""One writer, many readers."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfedul import (
    DiskLedger,
    FastFedUL,
    LedgerLockedError,
    LedgerReader,
    NoSkew,
    UnlearnRequest,
    add_request,
    cancel_request,
    forget,
    params_at,
    verify,
)
from fastfedul.ledger.protocol import vector
from fastfedul.ledger.store import index_image
from fastfedul.ledger.store.index import Index
from fastfedul.records import VectorRef
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
        assert_one_line(caught, "this program has ")
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
    monkeypatch.setattr("fastfedul.ledger.store.index.TIMEOUT_SECONDS", 0.1)
    with DiskLedger(path) as writer, LedgerReader(path) as reader:

        def work(done: int, _total: int) -> None:
            if writer.num_rounds == 3:
                writer.append(round_of(3))
                forget(writer, ["a"], erase=True)

        assert verify(reader, work).problems == ()
        assert writer.num_rounds == 4
        assert verify(reader).problems == ()


PROMPT_SECONDS = 20
"""A busy machine needs seconds for an append; a lock would be held for minutes."""


@contextlib.contextmanager
def stopped(program: str, path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A reader that a signal has stopped; it goes on when the block ends."""
    with process(program, path) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"ready\n"
        os.kill(reader.pid, signal.SIGSTOP)
        yield reader


def answer_of(reader: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What a stopped reader finds once it goes on."""
    assert reader.stdin is not None
    assert reader.stdout is not None
    os.kill(reader.pid, signal.SIGCONT)
    reader.stdin.write(b"go on\n")
    reader.stdin.flush()
    found: dict[str, Any] = json.loads(reader.stdout.readline())
    return found


def test_a_stopped_reader_keeps_no_append_waiting_and_keeps_its_view(
    path: Path,
) -> None:
    with LedgerReader(path) as before:
        model = before.final.params.flat.tobytes().hex()
    with stopped("read-on", path) as reader, DiskLedger(path) as ledger:
        began = time.monotonic()
        for index in (3, 4):
            ledger.append(round_of(index))
        add_request(path, "c")
        assert time.monotonic() - began < PROMPT_SECONDS
        assert answer_of(reader) == {
            "same": True,
            "num_rounds": 3,
            "model": model,
            "error": "",
        }
        assert verify(ledger).problems == ()


def test_a_stopped_reader_keeps_no_erasure_waiting_and_is_told(path: Path) -> None:
    with LedgerReader(path) as before:
        own = vector(before, VectorRef(0, "b")).tobytes()
    with stopped("read-on", path) as reader, DiskLedger(path) as ledger:
        began = time.monotonic()
        forget(ledger, ["b"], erase=True)
        assert time.monotonic() - began < PROMPT_SECONDS
        files = [file for file in path.rglob("*") if file.is_file()]
        assert not [file for file in files if own in file.read_bytes()]
        found = answer_of(reader)
    assert found["same"]
    assert "LedgerError" in found["error"]
    assert "was changed while it was being read" in found["error"]


def test_a_reader_stopped_at_any_instant_keeps_no_change_waiting(path: Path) -> None:
    rng = random.Random(2)
    with DiskLedger(path) as ledger, process("read-again", path) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"ready\n"
        for part in range(20):
            time.sleep(rng.uniform(0, 0.01))
            os.kill(reader.pid, signal.SIGSTOP)
            began = time.monotonic()
            ledger.set_budget(10**9 + part)
            assert time.monotonic() - began < PROMPT_SECONDS
            os.kill(reader.pid, signal.SIGCONT)
        assert reader.poll() is None
        assert verify(ledger).problems == ()


@pytest.mark.parametrize("torn_at", [0, 1, 2])
def test_a_reader_undoes_an_interrupted_commit_in_its_copy_alone(
    path: Path, torn_at: int
) -> None:
    """The journal of a commit comes back, and some pages of the index are torn."""
    journal = path / "index.sqlite-journal"
    with DiskLedger(path) as ledger:
        whole = (path / "index.sqlite").read_bytes()
        execute = Index._execute

        def keep(self: Index, sql: str, arguments: Any = ()) -> Any:
            if sql == "COMMIT":
                os.link(journal, path / "journal")
                shutil.copytree(path / "arrays", path.parent / "arrays")
            return execute(self, sql, arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Index, "_execute", keep)
            ledger.append(round_of(3))
        after = (path / "index.sqlite").read_bytes()
    (path / "journal").rename(journal)
    shutil.rmtree(path / "arrays")
    (path.parent / "arrays").rename(path / "arrays")
    assert journal.read_bytes()[8:12] != bytes(4)
    torn = bytearray(after)
    half = len(torn) // 2
    torn[half:] = whole[half:]
    # Half of the first page, or a first page that SQLite does not take for one.
    torn[: 2048 * torn_at] = whole[:2048][::-1] * torn_at
    (path / "index.sqlite").write_bytes(torn)
    with LedgerReader(path) as reader:
        assert reader.num_rounds == len(reader.rounds()) == 3
        with reader.index.reading():
            assert reader.index.integrity() == "ok"
    assert (path / "index.sqlite").read_bytes() == torn
    with DiskLedger(path) as ledger:
        assert ledger.num_rounds == 3
    assert not journal.exists()
    assert (path / "index.sqlite").read_bytes() == whole


def test_a_writer_stopped_at_any_instant_keeps_no_reader_waiting(path: Path) -> None:
    rng = random.Random(4)
    with process("append", path, 10_000) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        for _ in range(20):
            time.sleep(rng.uniform(0, 0.02))
            os.kill(writer.pid, signal.SIGSTOP)
            began = time.monotonic()
            with LedgerReader(path) as reader, reader.snapshot():
                assert reader.num_rounds == len(reader.rounds())
            number = add_request(path, "c").number
            assert cancel_request(path, number).state == "cancelled"
            assert time.monotonic() - began < PROMPT_SECONDS
            os.kill(writer.pid, signal.SIGCONT)
        assert writer.poll() is None


def test_a_reader_gets_its_copy_where_commits_come_without_a_pause(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause stands for the time that a copy of a large index takes."""
    stamp = index_image._stamp_of

    def slow(index: Path) -> Any:
        found = stamp(index)
        time.sleep(0.1)
        return found

    monkeypatch.setattr(index_image, "_stamp_of", slow)
    with process("append", path, 10_000) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        with LedgerReader(path) as reader:
            assert reader.num_rounds >= 3
        assert writer.poll() is None


def test_a_stopped_reader_that_asked_for_quiet_delays_one_change_for_a_second(
    path: Path,
) -> None:
    took = []
    with stopped("ask-for-quiet", path), DiskLedger(path) as ledger:
        for part in range(4):
            began = time.monotonic()
            ledger.set_budget(10**9 + part)
            took.append(time.monotonic() - began)
    assert took[0] > index_image.QUIET_SECONDS
    assert sum(took[1:]) < index_image.QUIET_SECONDS


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
