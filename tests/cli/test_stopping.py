"""Ctrl-C: the command ends with 130 and says how to go on."""

from __future__ import annotations

import json
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fastfedul import ClientUpdate, DiskLedger, LedgerReader, Model, Params, Round
from fastfedul.forgetting.requests import add_request
from tests.support.commands import COMMAND, interrupt, run


@pytest.fixture
def saved_models(tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    for index in range(401):
        for place in (folder / "global", folder / "clients" / str(index)):
            place.mkdir(parents=True, exist_ok=True)
        model = {"x": np.full(3, index, np.float32)}
        save_file(model, folder / "global" / f"{index}.safetensors")
        if index < 400:
            model["x"] = model["x"] + 1
            save_file(model, folder / "clients" / str(index) / "ann.safetensors")
    return folder


@pytest.mark.parametrize("only_json", [False, True])
def test_a_stopped_import_leaves_no_ledger(
    only_json: bool, saved_models: Path, tmp_path: Path
) -> None:
    out = tmp_path / "an import"
    words = ("ledger", "import", saved_models, out, *["--json"][: int(only_json)])
    arrays = out.with_name(f".{out.name}.importing") / "arrays"
    said, errors = interrupt(
        *COMMAND, *words, ready=lambda: arrays.is_dir() and any(arrays.iterdir())
    )
    again = shlex.join(["fastfedul", *map(str, words)])
    told = f"stopped; no ledger was left at {out}; start again with: {again}"
    if only_json:
        assert (json.loads(said), errors) == ({"error": told}, "")
    else:
        assert (said, errors) == ("", f"{told}\n")
    assert not out.exists()


def test_requests_that_a_stopped_apply_left_still_wait(tmp_path: Path) -> None:
    path, names = tmp_path / "ledger", [f"c{number}" for number in range(30)]
    zero = Params.of({"x": np.zeros(2, np.float32)})
    update = Params.of({"x": np.ones(2, np.float32)})
    with DiskLedger.create(path, Model(zero)) as ledger:
        ledger.append(
            Round(0, tuple(ClientUpdate(name, 1 / 30, update) for name in names))
        )
    for name in names[:25]:
        add_request(path, name)
    words = ("request", "apply", path)
    first = tmp_path / "certificates" / "1.json"
    _, errors = interrupt(*COMMAND, *words, ready=first.is_file)
    again = shlex.join(["fastfedul", *map(str, words)])
    told = f"stopped; requests without an answer still wait; go on with: {again}"
    assert errors.splitlines()[-1] == told

    def waiting() -> int:
        with LedgerReader(path) as ledger:
            return sum(request.state == "waiting" for request in ledger.requests())

    assert 0 < waiting() < 25
    run(*words)
    assert waiting() == 0


@pytest.fixture
def slow_server() -> Iterator[str]:
    """Address of a server that sends half of a file and then waits."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(
                        b"HTTP/1.1 200 OK\r\nContent-Length: 2000000\r\n"
                        b"Accept-Ranges: bytes\r\n\r\n" + bytes(1_000_000)
                    )
                    connection.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/x"
    thread.join(10)


def test_a_stopped_download_keeps_its_part(slow_server: str, tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from fastfedul.cli.main import run\n"
        "from fastfedul.data.download import Download\n"
        "from fastfedul.data.recipes import RECIPES, Recipe\n"
        f"RECIPES['octmnist'] = Recipe((Download({slow_server!r}, 'md5:0'),))\n"
        f"os.environ['FASTFEDUL_DATA'] = {str(tmp_path)!r}\n"
        "sys.argv[1:] = ['data', 'fetch', 'octmnist']\n"
        "run()\n"
    )

    def half() -> bool:
        return any(path.stat().st_size >= 100_000 for path in tmp_path.glob("*.part"))

    _, errors = interrupt(sys.executable, "-c", code, ready=half)
    told = "stopped; go on where it broke off with: fastfedul data fetch octmnist"
    assert errors == f"{told}\n"
    assert half()
