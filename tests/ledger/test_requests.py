"""Requests in the ledger: any process may file them, beside the one writer."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    InvalidInputError,
    LedgerDamagedError,
    LedgerError,
    LedgerReader,
    Model,
    Params,
    Round,
    UnknownClientError,
    add_request,
    cancel_request,
    erase,
    forget,
    verify,
)
from fastfedul.errors import (
    AlreadyForgottenError,
    RequestClosedError,
    RequestWaitingError,
)
from fastfedul.ledger.changes.requests import LONGEST_REASON, refuse_request
from fastfedul.ledger.store.request_rows import claim
from fastfedul.ledger.store.schema import RequestRow
from fastfedul.rng import stream
from tests.support.ledger_programs import process

CLIENTS = tuple(f"client {number}" for number in range(12))
START = Params.of({"w": np.zeros(40, np.float32)})


def round_of(index: int, clients: tuple[str, ...] = CLIENTS) -> Round:
    """The round with this number: always the same, in every process."""
    rng = stream(3, "requests", index)
    return Round(
        index,
        tuple(
            ClientUpdate(
                name,
                1 / len(clients),
                Params(START.layout, rng.normal(size=40).astype(np.float32)),
            )
            for name in clients
        ),
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed ledger of two rounds."""
    with DiskLedger.create(tmp_path / "ledger", Model(START)) as ledger:
        for index in range(2):
            ledger.append(round_of(index))
    return tmp_path / "ledger"


def states_of(path: Path) -> list[str]:
    with LedgerReader(path) as ledger:
        assert verify(ledger).problems == ()
        return [request.state for request in ledger.requests()]


def test_requests_are_numbered_and_come_back_as_they_were_filed(path: Path) -> None:
    first = add_request(path, CLIENTS[3], "consent withdrawn")
    second = add_request(path.parent, CLIENTS[1])
    with LedgerReader(path) as ledger:
        assert ledger.requests() == (first, second)
        assert verify(ledger).problems == ()
    assert (first.number, first.client, first.state) == (1, CLIENTS[3], "waiting")
    assert first.reason == "consent withdrawn"
    assert second.number == 2
    assert second.reason is None


def test_what_makes_no_sense_is_refused_and_changes_nothing(path: Path) -> None:
    with DiskLedger(path) as ledger:
        forget(ledger, [CLIENTS[0]], erase=False)
        forget(ledger, [CLIENTS[1]], erase=True)
    add_request(path, CLIENTS[2])
    with pytest.raises(RequestWaitingError, match="waiting already"):
        add_request(path, CLIENTS[2])
    with pytest.raises(AlreadyForgottenError, match="is forgotten already"):
        add_request(path, CLIENTS[0])
    with pytest.raises(AlreadyForgottenError, match="is erased already"):
        add_request(path, CLIENTS[1])
    with pytest.raises(UnknownClientError, match="did you mean 'client 7'"):
        add_request(path, "cliemt 7")
    with pytest.raises(InvalidInputError, match="characters"):
        add_request(path, CLIENTS[3], "x" * (LONGEST_REASON + 1))
    with pytest.raises(InvalidInputError, match="Unicode"):
        add_request(path, CLIENTS[3], "\udcff")
    with pytest.raises(LedgerError, match="nothing at"):
        add_request(path / "nowhere", CLIENTS[3])
    assert states_of(path) == ["waiting"]


def test_only_a_waiting_request_can_be_cancelled(path: Path) -> None:
    with pytest.raises(InvalidInputError, match="nobody has asked"):
        cancel_request(path, 1)
    add_request(path, CLIENTS[2])
    assert cancel_request(path, 1).state == "cancelled"
    with pytest.raises(RequestClosedError, match="was cancelled at"):
        cancel_request(path, 1)
    with pytest.raises(InvalidInputError, match="they are 1 to 1"):
        cancel_request(path, 2)
    assert add_request(path, CLIENTS[2]).number == 2
    with DiskLedger(path) as ledger:
        refused = refuse_request(ledger, 2, "no")
    assert (refused.state, refused.answer) == ("refused", "no")
    add_request(path, CLIENTS[2])
    assert states_of(path) == ["cancelled", "refused", "waiting"]


def test_a_forgetting_applies_what_waits_for_its_clients_and_nothing_else(
    path: Path,
) -> None:
    for client in CLIENTS[:3]:
        add_request(path, client, f"about {client}")
    with DiskLedger(path) as ledger:
        forget(ledger, CLIENTS[1:3], erase=False)
        erase(ledger, CLIENTS[1:3])
        first, *rest = ledger.requests()
        assert first.state == "waiting"
        assert [(r.state, r.event) for r in rest] == [("applied", 1), ("applied", 1)]
        asked = ledger.events()[0].details["requests"]
        assert asked == [
            {"request": r.number, "asked": r.asked, "reason": r.reason} for r in rest
        ]
        assert "requests" not in ledger.events()[1].details
    assert states_of(path) == ["waiting", "applied", "applied"]


def test_a_forgetting_for_a_request_that_was_cancelled_does_not_happen(
    path: Path,
) -> None:
    add_request(path, CLIENTS[0])
    with DiskLedger(path) as ledger:
        cancel_request(path, 1)
        before = ledger.final.params.flat.tobytes()
        with pytest.raises(RequestClosedError):
            ledger.commit_forgetting(
                [CLIENTS[0]], np.ones(40, np.float32), {}, erase=True, request=1
            )
        assert ledger.final.params.flat.tobytes() == before
        assert ledger.clients()[CLIENTS[0]].state == "active"
        assert verify(ledger).problems == ()
        assert verify(ledger).num_strays == 0
        ledger.append(round_of(2))


def test_nobody_can_cancel_what_the_writer_is_applying(path: Path) -> None:
    add_request(path, CLIENTS[0])
    with DiskLedger(path) as ledger:

        def claim_and_fail() -> None:
            with ledger.index.writing():
                assert [one.number for one in claim(ledger.index, [CLIENTS[0]])] == [1]
                cancel_request(path, 1)

        with pytest.raises(LedgerError, match="is being answered now"):
            claim_and_fail()
        # The change did not happen, so the request still waits.
        assert [one.state for one in ledger.requests()] == ["waiting"]
        ledger.append(round_of(2))
    assert cancel_request(path, 1).state == "cancelled"
    assert states_of(path) == ["cancelled"]


@pytest.mark.parametrize("taken_in", [False, True])
@pytest.mark.parametrize("how", ["flip", "lose", "swap"])
def test_a_damaged_filing_is_found(path: Path, how: str, taken_in: bool) -> None:
    for client in CLIENTS[:3]:
        add_request(path, client)
    if taken_in:
        with DiskLedger(path) as ledger:
            ledger.append(round_of(2))
    first, second, _ = sorted((path / "requests").iterdir())
    if how == "flip":
        content = bytearray(first.read_bytes())
        content[20] ^= 1
        first.write_bytes(content)
    elif how == "lose":
        first.unlink()
    else:
        text = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(text)
    with LedgerReader(path) as ledger_:
        problems = verify(ledger_).problems
        # What the index has is not lost with its file.
        assert bool(problems) == (not taken_in or how != "lose")
        # What it has not is a refused request of nobody, so that all see it.
        lost = 0 if taken_in else 2 if how == "swap" else 1
        states = [one.state for one in ledger_.requests()]
        assert states == ["refused"] * lost + ["waiting"] * (3 - lost)
    with DiskLedger(path) as ledger:
        ledger.append(round_of(ledger.num_rounds))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_filing_that_cannot_be_read_is_one_line(path: Path) -> None:
    add_request(path, CLIENTS[0])
    (path / "requests" / "00000001.json").chmod(0)
    for action in (lambda: add_request(path, CLIENTS[0]), lambda: states_of(path)):
        with pytest.raises(LedgerError, match="cannot read") as caught:
            action()
        assert "\n" not in str(caught.value)


def test_the_owner_of_the_folder_can_read_a_request_that_root_files(
    path: Path,
) -> None:
    owner = 12_345 if os.geteuid() == 0 else os.geteuid()
    (path / "requests").rmdir()
    os.chown(path, owner, -1)
    add_request(path, CLIENTS[0])
    assert (path / "requests").stat().st_uid == owner
    assert (path / "requests" / "00000001.json").stat().st_uid == owner


def test_a_request_is_private_and_names_nobody(path: Path) -> None:
    add_request(path, CLIENTS[3], "consent withdrawn")
    [file] = (path / "requests").iterdir()
    assert file.name == "00000001.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert CLIENTS[3] not in file.read_text()


@pytest.mark.slow
def test_an_asker_stopped_at_any_call_keeps_nobody_waiting(path: Path) -> None:
    """Rounds, requests and cancellations go on; later the stopped one ends well."""
    asker = CLIENTS[0]
    events = set()
    with DiskLedger(path) as ledger:
        for number in range(1, 200):
            with process("ask-and-stop", path, asker, number) as stopped:
                assert stopped.stdout is not None
                event = stopped.stdout.readline().decode().strip()
                if event.isdecimal():
                    break
                events.add(event)
                began = time.monotonic()
                ledger.append(round_of(ledger.num_rounds))
                other = add_request(path, CLIENTS[1]).number
                assert cancel_request(path, other).state == "cancelled"
                ledger.append(round_of(ledger.num_rounds))
                assert time.monotonic() - began < 20
                os.kill(stopped.pid, signal.SIGCONT)
                own = int(stopped.stdout.readline())
                # Also where another process took the number in between.
                assert ledger.requests()[own - 1].client == asker
                cancel_request(path, own)
        assert {"open", "os.link"} <= events
        assert verify(ledger).problems == ()
        assert not ledger.waiting()[1:]


def test_a_request_row_that_contradicts_the_log_is_found(path: Path) -> None:
    add_request(path, CLIENTS[0])
    with DiskLedger(path) as ledger:
        forget(ledger, [CLIENTS[0]], erase=False)
        with ledger.index.writing():
            row = ledger.index.one(RequestRow, id=1)
            ledger.index.replace(replace(row, event=2))
        assert "request 1" in verify(ledger).problems[0]


@pytest.mark.parametrize("lost", [["request_head"], ["requests", "request_head"]])
def test_a_table_of_requests_that_was_lost_is_damage(
    lost: list[str], path: Path
) -> None:
    add_request(path, CLIENTS[0])
    index = sqlite3.connect(path / "index.sqlite", isolation_level=None)
    for table in lost:
        index.execute(f"DROP TABLE {table}")
    index.close()
    with LedgerReader(path) as ledger:
        with pytest.raises(LedgerDamagedError) as caught:
            ledger.requests()
        for problem in (str(caught.value), verify(ledger).problems[-1]):
            assert "no such table" in problem
            assert "\n" not in problem
    with pytest.raises(LedgerDamagedError):
        add_request(path, CLIENTS[1])


# Several processes at once.

PROGRAM = """
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import test_requests as here

kind, path, *names = sys.argv[2:]
if kind == "append":
    with here.DiskLedger(path) as ledger:
        for index in range(2, 2 + int(names[0])):
            ledger.append(here.round_of(index))
            print(index, flush=True)
else:
    sys.stdin.readline()
    for name in names:
        request = here.add_request(path, name, "from " + str(len(names)))
        print(request.number, flush=True)
        if kind == "cancel":
            here.cancel_request(path, request.number)
"""


def start(kind: str, path: Path, *rest: object) -> subprocess.Popen[str]:
    here = str(Path(__file__).parent)
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, here, kind, str(path), *map(str, rest)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_nothing_is_lost_while_several_processes_ask_and_one_writes_rounds(
    path: Path,
) -> None:
    num_rounds = 30
    writer = start("append", path, num_rounds)
    askers = [
        start("ask", path, *CLIENTS[:4]),
        start("ask", path, *CLIENTS[4:8]),
        start("cancel", path, *CLIENTS[8:]),
    ]
    assert writer.stdout is not None
    writer.stdout.readline()  # The writer has the ledger, and goes on.
    for asker in askers:
        assert asker.stdin is not None
        asker.stdin.write("go\n")
        asker.stdin.flush()
    numbers = []
    for asker in askers:
        text, _ = asker.communicate(timeout=120)
        assert asker.returncode == 0
        numbers += [int(line) for line in text.split()]
    text, _ = writer.communicate(timeout=120)
    assert writer.returncode == 0
    assert sorted(numbers) == list(range(1, 13))
    with LedgerReader(path) as ledger:
        assert verify(ledger).problems == ()
        assert ledger.num_rounds == 2 + num_rounds
        states = {request.client: request.state for request in ledger.requests()}
    assert states == {
        **dict.fromkeys(CLIENTS[:8], "waiting"),
        **dict.fromkeys(CLIENTS[8:], "cancelled"),
    }
    by_hand = path.with_name("by hand")
    with DiskLedger.create(by_hand, Model(START)) as ledger:
        for index in range(2 + num_rounds):
            ledger.append(round_of(index))
        chain = ledger.chain
    with LedgerReader(path) as ledger:
        assert ledger.chain == chain


@pytest.mark.slow
def test_an_asker_that_is_killed_leaves_its_request_whole_or_not_at_all(
    path: Path,
) -> None:
    with DiskLedger(path) as ledger:
        for number, client in enumerate(CLIENTS):
            asker = start("ask", path, client)
            assert asker.stdin is not None
            assert asker.stdout is not None
            asker.stdin.write("go\n")
            asker.stdin.flush()
            if number % 2:
                asker.stdout.readline()
            asker.kill()
            asker.communicate()
            ledger.append(round_of(2 + number))
        asked = {request.client for request in ledger.requests()}
        assert asked >= set(CLIENTS[1::2])
        assert verify(ledger).problems == ()
