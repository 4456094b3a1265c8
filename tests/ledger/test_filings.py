"""Files in the folder `requests` that are no filing, or of another state or ledger."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    LedgerError,
    LedgerReader,
    Model,
    Params,
    Round,
    add_request,
    apply_requests,
    cancel_request,
    create_ledger,
    verify,
)
from fastfedul.ledger.store.request_files import file_of
from fastfedul.ledger.store.schema import LedgerRow, canonical
from fastfedul.runs.status import status_of

START = Params.of({"w": np.zeros(8, np.float32)})


def append(ledger: DiskLedger, *names: str) -> None:
    one = Params.of({"w": np.ones(8, np.float32)})
    updates = (ClientUpdate(name, 1 / len(names), one) for name in names)
    ledger.append(Round(ledger.num_rounds, tuple(updates)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "ledger"
    with create_ledger(found, Model(START)) as ledger:
        append(ledger, "a", "b", "c")
        append(ledger, "a", "b", "c")
    return found


def requests_of(path: Path) -> list[tuple[str, str]]:
    with LedgerReader(path) as ledger:
        return [(one.client, one.state) for one in ledger.requests()]


def put(path: Path, number: int, text: str) -> None:
    """Write a file whose digest is right."""
    with LedgerReader(path) as ledger:
        own = ledger.index.look(lambda: ledger.index.one(LedgerRow, id=1))
    values = canonical("filing", own.ledger_id, number, text)
    digest = blake3(values, key=own.receipt_secret).hexdigest()
    file_of(path, number).write_text(f"{text}\n{digest}\n")


def test_a_request_from_a_later_state_meets_nobody_else(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(path, tmp_path / "backup")
    with DiskLedger(path) as ledger:
        append(ledger, "a", "b", "xavier")
    add_request(path, "xavier")
    cancel_request(path, 1)
    add_request(path, "xavier")
    shutil.copytree(tmp_path / "backup", path, dirs_exist_ok=True)
    add_request(path, "b")
    with DiskLedger(path) as ledger, caplog.at_level(logging.WARNING):
        append(ledger, "a", "b", "yvonne")  # She has the number that Xavier had.
        done = apply_requests(ledger, key=None)
        assert [one.request.client for one in done] == ["b"]
        assert ledger.clients()["yvonne"].state == "active"
        refused = [one for one in ledger.requests() if one.state == "refused"]
    assert [one.client for one in refused] == ["", "", ""]
    for one, file in zip(refused, (1, 2, 3), strict=True):
        assert str(file_of(path, file)) in (one.answer or "")
        assert "file it again" in (one.answer or "")
        assert any(one.answer in text for text in caplog.messages if one.answer)
        answer = str(one.answer)
        assert any(answer in text for text in status_of(path).problems)
    with LedgerReader(path) as reader:
        assert not verify(reader).problems


def test_a_request_outlives_a_restored_index_that_knows_the_client(
    path: Path, tmp_path: Path
) -> None:
    shutil.copytree(path, tmp_path / "backup")
    add_request(path, "b")
    add_request(path, "c")
    cancel_request(path, 2)
    shutil.copytree(tmp_path / "backup", path, dirs_exist_ok=True)
    assert requests_of(path) == [("b", "waiting"), ("c", "cancelled")]


ASK: dict[str, Any] = {
    "kind": "ask",
    "at": "2026-01-01T00:00:00+00:00",
    "client": 2,
    "who": "",
    "rounds": 2,
    "reason": None,
    "method": None,
    "settings": None,
}


WRONG: tuple[dict[str, Any], ...] = (
    {"client": 999},
    {"client": 0},
    {"client": -1},
    {"client": 10**30},
    {"client": [2]},
    {"client": True},
    {"client": None},
    {"who": "0" * 64},
    {"at": "yesterday"},
    {"at": "2026-01-01T00:00:00"},
    {"at": None},
    {"settings": "{not json"},
    {"settings": []},
    {"reason": 5},
    {"reason": "\ud800"},
    {"kind": "wat"},
    {"kind": ["ask"]},
    {"more": 1},
)


@pytest.mark.parametrize(
    "text",
    [
        *(json.dumps({**ASK, **changed}) for changed in WRONG),
        json.dumps({"kind": "answer", "at": ASK["at"], "requests": [[1]]}),
        json.dumps({"kind": "cancel", "at": ASK["at"], "request": 77, "who": ""}),
        json.dumps({"kind": "cancel", "at": ASK["at"], "request": "1", "who": ""}),
        "[" * 100_000 + "]" * 100_000,
        '{"client":' + "1" * 5000 + "}",
        "[]",
    ],
)
def test_a_filing_that_makes_no_sense_is_refused_and_does_no_harm(
    path: Path, text: str
) -> None:
    (path / "requests").mkdir(exist_ok=True)
    put(path, 1, text)
    goes_on(path)


def fifo(file: Path) -> None:
    os.mkfifo(file)


def device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def loop(file: Path) -> None:
    file.symlink_to(file.name)


def link(file: Path) -> None:
    file.symlink_to("nowhere")


def folder(file: Path) -> None:
    file.mkdir()


def large(file: Path) -> None:
    with file.open("wb") as stream:
        stream.truncate(1 << 40)


def garbage(file: Path) -> None:
    file.write_bytes(b"\xff\n\xff\n")


def empty(file: Path) -> None:
    file.touch()


@pytest.mark.parametrize(
    "make", [fifo, device, loop, link, folder, large, garbage, empty]
)
def test_what_is_no_file_of_a_filing_is_refused_and_holds_up_nobody(
    path: Path, make: Callable[[Path], None]
) -> None:
    make(file_of(path, 1))
    goes_on(path)


def goes_on(path: Path) -> None:
    """Require that the first filing is refused, and that everything else works."""
    name = file_of(path, 1).name
    assert requests_of(path) == [("", "refused")]
    assert any(name in text for text in status_of(path).problems)
    assert add_request(path, "b").number == 2
    with DiskLedger(path) as ledger:
        append(ledger, "a", "b", "c")
        [done] = apply_requests(ledger, key=None)
        assert (done.request.client, done.request.state) == ("b", "applied")
        assert ledger.clients()["b"].state == "erased"
        append(ledger, "a", "c")
    assert requests_of(path) == [("", "refused"), ("b", "applied")]
    with LedgerReader(path) as reader:
        assert all("requests" in line for line in verify(reader).problems)


@pytest.mark.parametrize(
    "name",
    ["1.json", "0.json", "00000000.json", "000000001.json", "\u0661.json", "x.json"],
)
def test_a_file_of_another_name_is_no_filing(path: Path, name: str) -> None:
    (path / "requests" / name).write_text("{}")
    assert requests_of(path) == []
    assert add_request(path, "b").number == 1
    with LedgerReader(path) as reader:
        [problem] = verify(reader).problems
    assert problem == f"{path / 'requests' / name} is no filing; remove it"


def test_a_number_far_ahead_stops_nobody_and_is_found(path: Path) -> None:
    (path / "requests" / "99999999.json").write_text("{}")
    assert add_request(path, "b").number == 1
    assert requests_of(path) == [("b", "waiting")]
    with LedgerReader(path) as reader:
        assert any("99999999.json was changed" in x for x in verify(reader).problems)


def test_a_folder_of_requests_that_leads_nowhere_is_one_line(path: Path) -> None:
    (path / "requests").rmdir()
    (path / "requests").symlink_to("nowhere")
    for action in (lambda: requests_of(path), lambda: add_request(path, "b")):
        with pytest.raises(LedgerError, match="requests"):
            action()
