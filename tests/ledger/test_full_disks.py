"""Disks that do not let themselves be written to, and too few open files."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from fastfedul import DiskLedger, verify
from tests.support.disk_ledgers import answer, initial_model, round_of, snapshot_of
from tests.support.ledger_programs import ROOT, command, report_of


def test_a_read_only_ledger_can_be_read_and_is_not_written_to() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder, "ledger")
        with DiskLedger.create(path, initial_model()) as ledger:
            for index in range(3):
                ledger.append(round_of(index))
            expected = answer(ledger)
        before = snapshot_of(path)
        for entry in (path, *path.rglob("*")):
            entry.chmod(0o555 if entry.is_dir() else 0o444)
        Path(folder).chmod(0o555)
        report = report_of("unprivileged", path)
        Path(folder).chmod(0o755)
        for entry in (path, path / "arrays"):
            entry.chmod(0o755)
        assert report["num_rounds"] == 3
        assert report["answer"] == repr(expected)
        assert report["problems"] == []
        for what in ("open for writing", "create"):
            kind, message = report[what]
            assert kind == "LedgerError", report
            assert "\n" not in message
        assert str(path) in report["open for writing"][1]
        assert snapshot_of(path) == before
        assert {entry.name for entry in Path(folder).iterdir()} == {"ledger"}


def test_a_folder_that_turns_read_only_costs_nothing_that_was_recorded() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ledger")
        DiskLedger.create(path, initial_model()).close()
        for entry in (Path(folder), *Path(folder).rglob("*")):
            entry.chmod(0o777 if entry.is_dir() else 0o666)
        report = report_of("turns-read-only", path)
        for what in ("arrays", "folder"):
            kind, message, found = report[what]
            assert kind == "LedgerError", report
            assert "\n" not in message
            assert found == [1, [], 0], report
        assert report["num_rounds"] == 2
        assert report["problems"] == []


def test_a_file_size_limit_stops_a_round_and_loses_nothing(path: Path) -> None:
    report = report_of("limited", path)
    assert report["limits"], "no limit was tried"
    for limit, outcome in report["limits"].items():
        kind, message, num_rounds, same_chain, problems = outcome
        assert kind == "LedgerError", (limit, kind, message)
        assert "\n" not in message
        assert (num_rounds, same_chain, problems) == (3, True, []), (limit, outcome)
    assert report["num_rounds"] == 4
    with DiskLedger(path) as ledger:
        assert verify(ledger).problems == ()
        ledger.append(round_of(4))


def test_a_ledger_that_cannot_be_opened_for_want_of_space_is_not_locked(
    path: Path,
) -> None:
    report = report_of("no-room-for-lock", path)
    kind, message = report["open"]
    assert kind == "LedgerError", report
    assert "\n" not in message
    assert report["again"] == 3


@pytest.mark.parametrize("kind", ["rounds", "sums"])
def test_a_full_disk_stops_a_change_and_loses_nothing(
    kind: str, tmp_path: Path
) -> None:
    if not can_mount(tmp_path):
        pytest.skip("no file system can be mounted here")
    done = subprocess.run(
        ["unshare", "-m", *command("full", tmp_path, kind)],
        cwd=ROOT,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    report = json.loads(done.stdout)
    assert {what for what, *_ in report["failures"]} == {"append", "erase", "create"}
    for what, room, kind, message, unchanged, problems in report["failures"]:
        assert kind == "LedgerError", (what, room, kind, message)
        assert "\n" not in message
        assert "disk is full" in message, (what, room, message)
        assert unchanged, (what, room)
        assert problems == [], (what, room)
    assert report["appended"] > 3
    assert report["state of b"] == "erased"
    assert report["problems"] == []
    assert report["read-only"]["num_rounds"] == report["appended"]
    kind, message = report["read-only"]["open for writing"]
    assert kind == "LedgerError"
    assert "\n" not in message


def can_mount(folder: Path) -> bool:
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return False
    tried = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "none", str(folder)],
        capture_output=True,
        check=False,
    )
    return tried.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "limit"), [("rounds", 300), ("sums", 40), ("sums", 64)]
)
def test_forgetting_needs_no_more_open_files_than_a_process_may_have(
    path: Path, limit: int, kind: str
) -> None:
    """Of rounds it has 256 open at once, of sums no more than a few."""
    report = report_of("few-files", path, limit, kind)
    assert report["num_rounds"] == limit // 2 + 20
    assert report["error"] == ""
