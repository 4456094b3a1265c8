"""What a killed writer leaves behind."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from fastfedul import DiskLedger, LedgerReader, forget, verify
from fastfedul.ledger.store.array_files import file_name
from fastfedul.records import History
from tests.support.disk_ledgers import (
    initial_model,
    models_by_hand,
    own_by_hand,
    record,
    round_of,
    snapshot_of,
)
from tests.support.ledger_programs import process


def test_files_that_belong_to_nothing_are_swept_by_the_next_writer(path: Path) -> None:
    before = snapshot_of(path)
    orphans = [file_name(99), file_name(123_456_789)]
    for name in orphans:
        (path / "arrays" / name).write_bytes(b"orphan")
    with LedgerReader(path) as reader:
        found = verify(reader)
        assert found.problems == ()
        assert found.num_strays == len(orphans)
    assert {p.name for p in (path / "arrays").iterdir()} >= set(orphans)
    with DiskLedger(path) as ledger:
        assert verify(ledger).num_strays == 0
    assert snapshot_of(path) == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rounds", "sums"])
def test_a_killed_writer_loses_nothing_it_acknowledged(
    kind: History, tmp_path: Path
) -> None:
    path = record(tmp_path / "ledger", 3, history=kind)
    expected = list(itertools.islice(models_by_hand(), 400))
    rng = random.Random(4)
    at_least = 3
    for _ in range(4):
        with process("append", path, 399) as other:
            assert other.stdout is not None
            for _ in range(rng.randrange(1, 6)):
                acknowledged = int(other.stdout.readline())
            time.sleep(rng.uniform(0, 0.03))
            other.kill()
            rest = other.stdout.read().split()
            acknowledged = int(rest[-1]) if rest else acknowledged
        with LedgerReader(path) as reader:
            assert reader.num_rounds >= acknowledged
            assert reader.num_rounds > at_least
            at_least = reader.num_rounds
            assert verify(reader).problems == ()
            np.testing.assert_array_equal(
                reader.final.params.flat, expected[reader.num_rounds]
            )
            np.testing.assert_allclose(
                reader.own_difference("b"),
                own_by_hand(1, reader.num_rounds),
                rtol=1e-4,
                atol=1e-4,
            )
        with DiskLedger(path) as ledger:
            assert ledger.num_rounds == at_least
            assert verify(ledger).num_strays == 0
            ledger.append(round_of(at_least))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rounds", "sums"])
def test_a_writer_killed_while_erasing_leaves_all_or_nothing(
    kind: History, tmp_path: Path
) -> None:
    full = tmp_path / "full"
    record(full, 30, history=kind)
    with LedgerReader(full) as reader:
        before = reader.final.params.flat.tobytes()
    shutil.copytree(tmp_path / "full", tmp_path / "erased")
    with DiskLedger(tmp_path / "erased") as ledger:
        forget(ledger, ["b"], erase=True)
        after = ledger.final.params.flat.tobytes()
        chain = ledger.chain
    rng = random.Random(9)
    states = set()
    for number in range(4):
        path = tmp_path / f"killed-{number}"
        shutil.copytree(tmp_path / "full", path)
        with process("erase", path) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0, 0.12))
            other.kill()
            acknowledged = other.stdout.read() == b"done\n"
        with DiskLedger(path) as reopened:
            state = reopened.clients()["b"].state
            states.add(state)
            assert state == "erased" or not acknowledged
            assert state in ("active", "erased")
            assert verify(reopened).problems == ()
            assert verify(reopened).num_strays == 0
            final = reopened.final.params.flat.tobytes()
            assert final == (after if state == "erased" else before)
            assert (reopened.chain == chain) == (state == "erased")
            assert len(reopened.updates_of("b")) == (0 if state == "erased" else 30)
            if state == "active":
                forget(reopened, ["b"], erase=True)
                assert reopened.chain == chain
                assert reopened.final.params.flat.tobytes() == after


def test_what_a_killed_creation_left_does_not_stop_the_next(tmp_path: Path) -> None:
    left = tmp_path / f".ledger.creating-{os.getpid()}"
    (left / "arrays").mkdir(parents=True)
    with DiskLedger.create(tmp_path / "ledger", initial_model()) as ledger:
        ledger.append(round_of(0))
    assert (tmp_path / "ledger" / "index.sqlite").is_file()
