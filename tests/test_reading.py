"""Reading what lies at a path: never wait for it, and never fill the memory."""

from __future__ import annotations

import ast
import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import fastfedul
from fastfedul import (
    ClientUpdate,
    InvalidInputError,
    LedgerError,
    LedgerReader,
    Model,
    Params,
    Round,
    add_request,
    create_ledger,
    open_ledger,
    verify,
)
from fastfedul.data.npz import read_arrays
from fastfedul.files import make_folder, open_regular, read_regular
from fastfedul.forgetting.certificates import read_certificate
from fastfedul.runs.evaluation_source import federation_file, source_of
from fastfedul.runs.status import status_of

SRC = Path(fastfedul.__file__).parent
ROOMS = ("ledger", "forgetting", "runs", "investigate", "report", "console")
START = Params.of({"w": np.zeros(8, np.float32)})

MAKERS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "ledger"
    with create_ledger(found, Model(START)) as ledger:
        ledger.append(Round(0, (ClientUpdate("a", 1.0, START),)))
    return found


def test_rooms_that_read_a_ledger_read_regular_files_only() -> None:
    files = [file for room in ROOMS for file in (SRC / room).rglob("*.py")]
    bare = [
        f"{file.relative_to(SRC)}:{node.lineno}"
        for file in [*files, SRC / "data" / "npz.py", SRC / "watching.py"]
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and is_bare_read(node)
    ]
    assert len(files) > 50
    assert bare == []


def is_bare_read(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", None))
    if name in ("read_bytes", "read_text"):
        return ast.unparse(call) != "Path('/proc/locks').read_text()"
    modes = [one.value for one in call.args if isinstance(one, ast.Constant)]
    return name == "open" and any(mode in ("r", "rb") for mode in modes)


@pytest.mark.parametrize(
    "code", ["p.read_bytes()", "p.read_text('x')", "p.open('rb')", "open(p, 'r')"]
)
def test_the_search_finds_bare_reads(code: str) -> None:
    [call] = [x for x in ast.walk(ast.parse(code)) if isinstance(x, ast.Call)]
    assert is_bare_read(call)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_what_is_no_regular_file_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    file = tmp_path / "file"
    make(file)
    with pytest.raises(OSError, match="it is no regular file"):
        open_regular(file)


def test_a_file_is_read_up_to_its_limit_and_links_as_asked(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"abc")
    link.symlink_to(file)
    assert read_regular(file, 3) == read_regular(link, 3) == b"abc"
    with pytest.raises(OSError, match="more than 2 bytes") as caught:
        read_regular(file, 2)
    assert caught.value.errno == errno.EFBIG
    with pytest.raises(OSError, match="link"):
        read_regular(link, 3, follow=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_root_makes_belongs_to_the_owner_of_the_folder(tmp_path: Path) -> None:
    os.chown(tmp_path, 12_345, 12_346)
    make_folder(tmp_path / "a" / "b", 0o700)
    for folder in (tmp_path / "a", tmp_path / "a" / "b"):
        assert (folder.stat().st_uid, folder.stat().st_gid) == (12_345, 12_346)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_special_files_in_and_beside_a_ledger_hang_nobody(
    path: Path, tmp_path: Path, make: Callable[[Path], object]
) -> None:
    (path / "certificates").mkdir()
    make(path / "certificates" / "1.json")
    for name in ("verified.json", "failures.jsonl", "federation.toml"):
        make(path.with_name(f"{path.name}.{name}"))
    with pytest.raises(InvalidInputError, match="no regular file"):
        read_certificate(path / "certificates" / "1.json")
    with pytest.raises(InvalidInputError, match="no regular file"):
        source_of(path)
    assert federation_file(path).name.endswith("federation.toml")
    assert status_of(path).verified is None
    assert add_request(path, "a").number == 1
    with LedgerReader(path) as ledger:
        verify(ledger)
    make(tmp_path / "inputs.npz")
    with pytest.raises(InvalidInputError, match="no regular file"):
        read_arrays(tmp_path / "inputs.npz", (("images",),))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_journal_that_is_no_file_stops_readers_and_the_writer_with_one_line(
    path: Path, make: Callable[[Path], object]
) -> None:
    make(path / "index.sqlite-journal")
    for use in (LedgerReader, open_ledger):
        with pytest.raises(LedgerError, match="no regular file"), use(path):
            pass


def test_a_journal_of_more_pages_than_there_are_is_damage(path: Path) -> None:
    magic = bytes.fromhex("d9d505f920a163d7")
    header = struct.pack(">8sIIIII", magic, 1, 0, 2**31 - 1, 512, 65_536)
    (path / "index.sqlite-journal").write_bytes(header.ljust(1024, b"\0"))
    with pytest.raises(LedgerError, match="2147483647 pages"), LedgerReader(path):
        pass
