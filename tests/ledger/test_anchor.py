"""An anchor outside the ledger tells when somebody has put an older copy back."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path

import pytest

from fastfedul import (
    DiskLedger,
    LedgerDamagedError,
    LedgerError,
    LedgerReader,
    add_request,
    forget,
)
from fastfedul.ledger.anchor import ANCHOR_VARIABLE
from tests.support import shrinking
from tests.support.commands import run
from tests.support.disk_ledgers import (
    assert_one_line,
    record,
    round_of,
    snapshot_of,
)


@pytest.fixture
def anchor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the anchor of this process."""
    path = tmp_path / "elsewhere" / "anchor"
    path.parent.mkdir()
    monkeypatch.setenv(ANCHOR_VARIABLE, str(path))
    return path


PROGRAM = """#!/bin/sh
case "$1" in
add) cat >> "$0.lines" ;;
last) grep "$2" "$0.lines" | tail -n 1 || true ;;
esac
"""


@pytest.fixture(params=["file", "program"])
def either(anchor: Path, request: pytest.FixtureRequest) -> Path:
    """Return the file with the lines of an anchor of either kind."""
    if request.param == "file":
        return anchor
    lines = anchor.with_name("anchor.lines")
    lines.touch()
    anchor.write_text(PROGRAM)
    anchor.chmod(0o700)
    return lines


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_committed_change_is_a_line(either: Path, tmp_path: Path) -> None:
    path = record(tmp_path / "ledger", 3)
    with DiskLedger(path) as ledger:
        client = sorted(ledger.clients())[0]
        forget(ledger, [client])
        ledger.append(round_of(3, clients=("c", "d")))
        chain, log = ledger.chain.hex(), ledger.log()
    lines = lines_of(either)
    places = [(line["rounds"], line["entries"]) for line in lines]
    assert places == [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (4, 1)]
    assert lines[-1]["chain"] == chain
    assert [lines[-1]["log"], lines[0]["log"]] == [log[0].digest, ""]
    # It names nobody.
    assert client not in {value for line in lines for value in line.values()}
    DiskLedger(path).close()
    assert lines_of(either) == lines


def restored(path: Path, backup: Path) -> dict[str, bytes]:
    shutil.rmtree(path)
    shutil.rmtree(path.parent / "certificates", ignore_errors=True)
    shutil.copytree(backup, path)
    return snapshot_of(path)


@pytest.mark.parametrize("lost", ["forgetting", "round", "everything"])
def test_an_older_copy_is_refused_where_certificates_were_put_back_too(
    either: Path, lost: str, tmp_path: Path
) -> None:
    path = record(tmp_path / "ledger", 3)
    shutil.copytree(path, tmp_path / "backup")
    with DiskLedger(path) as ledger:
        client = sorted(ledger.clients())[0]
        if lost != "round":
            forget(ledger, [client], erase=lost == "everything")
        if lost != "forgetting":
            ledger.append(round_of(3, clients=("c", "d")))
    assert either.exists()
    before = restored(path, tmp_path / "backup")
    with pytest.raises(LedgerDamagedError, match="restore the newest copy") as caught:
        DiskLedger(path)
    assert_one_line(caught, "anchor")
    with pytest.raises(LedgerDamagedError, match="restore the newest copy"):
        add_request(path, client)
    for command in (
        ("forget", path, client),
        ("request", "add", path, client),
        ("request", "apply", path),
        ("ledger", "verify", path),
    ):
        done = run(*command, code=1)
        assert "anchor" in " ".join(done.stderr.split()), command
    assert {k: v for k, v in snapshot_of(path).items() if k != "lock"} == {
        k: v for k, v in before.items() if k != "lock"
    }
    # Its way out, if the newest copy is lost.
    either.write_text("")
    with DiskLedger(path) as ledger:
        assert forget(ledger, [client]).erased


def test_a_copy_that_went_another_way_is_refused(anchor: Path, tmp_path: Path) -> None:
    path = record(tmp_path / "ledger", 3)
    shutil.copytree(path, tmp_path / "backup")
    with DiskLedger(path) as ledger:
        ledger.append(round_of(3))
    restored(path, tmp_path / "backup")
    said = anchor.read_text()
    anchor.unlink()
    with DiskLedger(path) as ledger:
        ledger.append(round_of(3, clients=("c", "d")))
        ledger.append(round_of(4))
    anchor.write_text(said)
    with pytest.raises(LedgerDamagedError, match="its round 3 is another"):
        DiskLedger(path)


def test_a_process_without_the_anchor_may_go_on(
    anchor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = record(tmp_path / "ledger", 3)
    monkeypatch.delenv(ANCHOR_VARIABLE)
    with DiskLedger(path) as ledger:
        forget(ledger, [sorted(ledger.clients())[0]])
        ledger.append(round_of(3, clients=("c", "d")))
    monkeypatch.setenv(ANCHOR_VARIABLE, str(anchor))
    with DiskLedger(path) as ledger:
        ledger.append(round_of(4, clients=("c", "d")))
    assert lines_of(anchor)[-1]["rounds"] == 5


def test_entries_of_a_budget_may_be_replaced(anchor: Path, tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with DiskLedger.create(path, shrinking.START, budget=1_300_000) as ledger:
        for index in range(24):
            ledger.append(shrinking.round_of(index))
        assert [entry.event.kind for entry in ledger.log()] == ["drop"]
    DiskLedger(path).close()
    assert lines_of(anchor)[-1]["entries"] == 0


def test_a_line_that_a_crash_tore_spoils_nothing(anchor: Path, tmp_path: Path) -> None:
    path = record(tmp_path / "ledger", 3)
    text = anchor.read_text()
    anchor.write_text(text[:-20])
    with DiskLedger(path) as ledger:
        ledger.append(round_of(3))
    *_, torn, begun, last = anchor.read_text().splitlines()
    with pytest.raises(ValueError, match=r"."):
        json.loads(torn)
    assert [json.loads(line)["rounds"] for line in (begun, last)] == [3, 4]
    with LedgerReader(path) as ledger_:
        assert ledger_.num_rounds == 4


def test_an_anchor_is_private_and_serves_many_ledgers(
    anchor: Path, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        record(tmp_path / name, 2)
    assert stat.S_IMODE(anchor.stat().st_mode) == 0o600
    assert len({line["ledger"] for line in lines_of(anchor)}) == 2
    for name in ("one", "two"):
        DiskLedger(tmp_path / name).close()


def test_an_anchor_that_cannot_be_used_is_one_clear_line(
    anchor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = record(tmp_path / "ledger", 2)
    monkeypatch.setenv(ANCHOR_VARIABLE, str(tmp_path))
    with pytest.raises(LedgerError, match="no regular file") as caught:
        DiskLedger(path)
    assert_one_line(caught, ANCHOR_VARIABLE)
    monkeypatch.setenv(ANCHOR_VARIABLE, str(path / "anchor"))
    with pytest.raises(LedgerError, match="lies in the ledger") as caught:
        DiskLedger(path)
    assert_one_line(caught, ANCHOR_VARIABLE)
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho the safe is shut >&2\nexit 3\n")
    program.chmod(0o700)
    monkeypatch.setenv(ANCHOR_VARIABLE, str(program))
    with pytest.raises(LedgerError, match="code 3: the safe is shut") as caught:
        DiskLedger(path)
    assert_one_line(caught, str(program))


def test_an_anchor_that_cannot_be_written_stops_before_the_first_round(
    anchor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = record(tmp_path / "ledger", 2)
    monkeypatch.setenv(ANCHOR_VARIABLE, str(tmp_path / "no" / "such" / "anchor"))
    for action in (lambda: DiskLedger(path), lambda: record(tmp_path / "new", 1)):
        with pytest.raises(LedgerError, match="a folder that does not exist") as caught:
            action()
        assert_one_line(caught, ANCHOR_VARIABLE)
    assert not (tmp_path / "new").exists()
    done = run("train", tmp_path / "run", "--rounds", 1, "--clients", 2, code=1)
    assert "a folder that does not exist" in " ".join(done.stderr.split())
    assert not (tmp_path / "run").exists()
    # A program that tells, and cannot write.
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\n[ "$1" = last ] || { echo full >&2; exit 4; }\n')
    program.chmod(0o700)
    monkeypatch.setenv(ANCHOR_VARIABLE, str(program))
    with pytest.raises(LedgerError, match="ended with code 4: full") as caught:
        DiskLedger(path)
    assert_one_line(caught, str(program))
    monkeypatch.setenv(ANCHOR_VARIABLE, str(anchor))
    with DiskLedger(path) as ledger:
        assert ledger.num_rounds == 2
