"""The Flower example does what its README says, in simulation and in deployment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fastfedul.ledger.reader import LedgerReader
from fastfedul.ledger.verify import verify

if not all(map(find_spec, ("flwr", "ray", "torch"))):
    if os.environ.get("CI"):
        pytest.fail("Flower or PyTorch is not installed; run `make setup`")
    pytest.skip("needs the extras torch and flower", allow_module_level=True)

from deployment import Deployment
from prepare import prepare

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"
LONG = 300.0


def processes_of(folder: Path) -> list[str]:
    """Return the commands of all processes whose Flower lives in a folder."""
    mark = f"FLWR_HOME={folder.resolve() / 'flwr'}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in entry.read_bytes().split(b"\0"):
                found.append(entry.with_name("cmdline").read_text("utf-8"))
        except OSError:
            continue
    return found


@pytest.mark.deploy
@pytest.mark.timeout(900)
def test_the_deploy_script_forgets_a_client(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    done = subprocess.run(
        [
            *(sys.executable, EXAMPLE / "deploy", "--folder", folder, "--json"),
            *("--nodes", "2", "--rounds", "3", "--forget", "client-0"),
        ],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    assert facts["clients"] == {
        "client-0": {"state": "erased", "rounds_trained": 2},
        "client-1": {"state": "active", "rounds_trained": 3},
    }
    assert facts["checks"]["signature"] == "holds"
    assert "fails" not in facts["checks"].values()
    assert facts["certificate"]["clients"] == ["client-0"]
    assert facts["accuracy"][-1] > 0.5
    assert processes_of(folder) == []


@pytest.mark.deploy
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupted_deploy_script_leaves_no_process(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "kept"
    with subprocess.Popen(
        [sys.executable, EXAMPLE / "deploy", "--folder", folder, "--nodes", "2"],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "is online" in line:
                assert processes_of(folder)
                process.send_signal(signal.Signals[name])
                break
        said = process.stderr.read()
        assert process.wait(LONG) == 130, said
    assert "everything is stopped" in said
    assert processes_of(folder) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nodes", "1"],
        ["--forget", "client-9"],
        ["--after", "4"],
        ["--folder", str(EXAMPLE)],
    ],
)
def test_bad_arguments_start_nothing(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE / "deploy", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "error: --" in done.stderr or "is not empty" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_app_runs_in_simulation_and_goes_on_without_a_client(
    tmp_path: Path,
) -> None:
    data, ledger = tmp_path / "data", tmp_path / "ledger"
    prepare(data, num_clients=3, partition="iid", seed=0)
    config: dict[str, Any] = {"data": str(data), "ledger": str(ledger)}
    with Deployment(tmp_path / "flower") as deployment:
        run = deployment.start_simulation(EXAMPLE, 3, config | {"num-server-rounds": 2})
        assert run.wait(LONG) == "finished:completed"
        subprocess.run(
            [sys.executable, "-m", "fastfedul", "request", "add", ledger, "client-1"],
            check=True,
        )
        run = deployment.start_simulation(EXAMPLE, 3, config | {"num-server-rounds": 3})
        assert run.wait(LONG) == "finished:completed"
    with LedgerReader(ledger) as reader:
        assert reader.num_rounds == 3
        assert not verify(reader).problems
        assert reader.clients()["client-1"].state == "erased"
        assert [u.client for u in reader.updates_in(2)] == ["client-0", "client-2"]
    assert processes_of(tmp_path / "flower") == []
