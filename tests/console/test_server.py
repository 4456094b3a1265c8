"""How the console begins, and what keeps it from it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra console")

from tests.support.commands import one_line, run
from tests.support.disk_ledgers import record


def test_a_port_that_is_taken_or_none_is_refused_by_one_line(tmp_path: Path) -> None:
    ledger = record(tmp_path / "ledger", 1)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        taken = run("console", ledger, "--port", port, code=2)
        assert f"cannot listen on port {port}" in one_line(taken)
    for wrong in (-1, 70_000):
        assert "another --port" in one_line(
            run("console", ledger, "--port", wrong, code=2)
        )


def test_a_path_without_a_ledger_is_refused_by_one_line(tmp_path: Path) -> None:
    for place, said in ((tmp_path, "is not a ledger"), (tmp_path / "x", "nothing at")):
        assert said in one_line(run("console", place, "--port", 0, code=2))
