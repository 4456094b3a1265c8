"""Swaps, rollbacks, altered certificates, hostile replies: a part of the benchmark."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from benchmarks import fault_envelopes, fault_swaps
from benchmarks.fault_past import FORGOTTEN, KINDS, Past, anchored, build_past
from benchmarks.measuring import progress
from fastfedul import DiskLedger, LedgerDamagedError, LedgerReader, verify
from fastfedul.forgetting.signing import PublicKey

pytest.importorskip("cryptography")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Past:
    return build_past(tmp_path_factory.mktemp("past") / "own", KINDS[0], 1)


def test_no_swap_and_no_rollback_is_silent(tmp_path: Path) -> None:
    with progress() as display:
        found = fault_swaps.swap_parts(tmp_path, 24, 1, display)
    assert found.problems == []
    counts = found.counts()
    assert counts["faults"] == 24
    assert counts["noticed"] > 12
    assert set(found.kinds) == set(fault_swaps.MAKES)


def test_a_swap_that_nobody_looks_for_is_called_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_swaps, "KINDS", KINDS[:1])
    monkeypatch.setattr(fault_swaps, "LOOKS", {})
    monkeypatch.setattr(fault_swaps, "MAKES", {"ledger": fault_swaps.roll_back_ledger})
    with progress() as display:
        found = fault_swaps.swap_parts(tmp_path, 6, 1, display)
    assert found.silent > 0
    assert len(found.problems) == found.silent


def run_with_old_row(
    past: Past, folder: Path, table: str, key: str, value: object
) -> Path:
    """Return a run in which one row is the row of the earliest differing moment."""
    run = folder / "run"
    shutil.copytree(past.now.run, run)
    select = f"SELECT * FROM {table} WHERE {key} = ?"
    index = sqlite3.connect(run / "ledger" / "index.sqlite", isolation_level=None)
    now = index.execute(select, (value,)).fetchall()
    for moment in reversed(past.before):
        earlier = sqlite3.connect(moment.ledger / "index.sqlite")
        rows = earlier.execute(select, (value,)).fetchall()
        earlier.close()
        if rows and rows != now:
            marks = ", ".join("?" * len(rows[0]))
            index.execute(f"REPLACE INTO {table} VALUES ({marks})", rows[0])
            break
    else:
        pytest.fail("no moment has another row")
    index.close()
    return run


def test_verify_notices_the_older_row_of_a_forgotten_client(
    past: Past, tmp_path: Path
) -> None:
    run = run_with_old_row(past, tmp_path, "clients", "name", FORGOTTEN)
    with LedgerReader(run) as ledger:
        assert ledger.clients()[FORGOTTEN].state == "active"
        [problem] = verify(ledger).problems
    assert problem == f"client {FORGOTTEN!r} is active, and forgotten by the log"


def test_a_writer_cuts_no_file_by_an_older_row(past: Past, tmp_path: Path) -> None:
    with LedgerReader(past.now.run) as ledger:
        shared = ledger.head.open_file
    run = run_with_old_row(past, tmp_path, "files", "file", shared)
    before = {p: p.read_bytes() for p in run.rglob("*.safetensors")}
    with anchored(None), pytest.raises(LedgerDamagedError, match="how many bytes"):
        DiskLedger(run)
    assert {p: p.read_bytes() for p in run.rglob("*.safetensors")} == before


def test_no_altered_certificate_passes(tmp_path: Path) -> None:
    with progress() as display:
        found = fault_envelopes.alter_envelopes(tmp_path, 100, 1, display)
    assert found.problems == []
    assert found.refused + found.failed == found.kinds.total() == 100
    assert len(found.kinds) == 10


def test_a_check_that_believes_every_signature_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PublicKey, "verifies", lambda *_: True)
    with progress() as display:
        found = fault_envelopes.alter_envelopes(tmp_path, 30, 1, display)
    assert found.silent > 0
    assert len(found.problems) == found.silent


def test_no_hostile_reply_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr")
    from benchmarks import fault_replies
    from benchmarks.hostile_replies import Hostile, honest

    with progress() as display:
        found = fault_replies.send_replies(tmp_path, 60, 1, display)
        assert found.problems == []
        assert found.left_out == found.kinds.total() == 60
        # A reply that is honest after all must be reported as one that counted.
        harmless = (Hostile("honest", honest),)
        monkeypatch.setattr(fault_replies, "train_replies", lambda _: harmless)
        found = fault_replies.send_replies(tmp_path, 6, 1, display)
    assert found.silent == 3
    assert all("it counted" in text for text in found.problems[-3:])
