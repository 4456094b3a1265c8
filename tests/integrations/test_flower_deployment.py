"""A real deployment on this machine: TLS, keys, forgetting, and everything that fails.

Every message starts a process, so a round takes seconds: faults share one run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfedul.ledger.reader import LedgerReader
from fastfedul.ledger.verify import verify

if find_spec("flwr") is None:
    if os.environ.get("CI"):
        pytest.fail("Flower is not installed; run `make setup`")
    pytest.skip("needs the extra flower", allow_module_level=True)

from deployment import Deployment, DeploymentError, Value

pytestmark = pytest.mark.deploy

APP = Path(__file__).parent / "deployed_app"
CLIENTS = ("client-0", "client-1", "client-2")
LONG = 300.0
"""Seconds for what takes one minute on an idle machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deployment")


@pytest.fixture(scope="module")
def deployment(folder: Path) -> Iterator[Deployment]:
    fastfedul("key", "new", str(folder / "signing.pem"))
    signing = {"FASTFEDUL_KEY": str(folder / "signing.pem")}
    with Deployment(folder, environment=signing, say=print) as running:
        running.start_superlink()
        for number, name in enumerate(CLIENTS):
            own = folder / name
            own.mkdir()
            running.register(name)
            config: dict[str, Value] = {"partition-id": number, "folder": str(own)}
            running.start_supernode(name, config)
        yield running
    assert running.pids() == []


def fastfedul(*arguments: str, code: int = 0) -> dict[str, Any]:
    """Return what a command answers."""
    done = subprocess.run(
        [sys.executable, "-m", "fastfedul", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout) if code == 0 else {}
    return found


def participants(ledger: Path) -> list[set[str]]:
    """Return who is in each round of a ledger."""
    with LedgerReader(ledger) as reader, reader.snapshot():
        return [
            {update.client for update in reader.updates_in(index)}
            for index in range(reader.num_rounds)
        ]


def failures(ledger: Path) -> dict[tuple[int, str], str]:
    """Return why clients were not in rounds."""
    lines = ledger.with_name(f"{ledger.name}.failures.jsonl").read_text("utf-8")
    found = [json.loads(line) for line in lines.splitlines()]
    return {(row["round"], row["client"]): row["reason"] for row in found}


def note(folder: Path, kind: str, client: int, number: int) -> Path:
    """Return the file by which a test and a client speak about a round."""
    return folder / f"client-{client}" / f"{kind}-{client}-{number}"


def wait_until(deployment: Deployment, path: Path) -> None:
    deployment.wait_for(path.exists, LONG, f"{path.name}; see {deployment.folder}")


def clear(folder: Path) -> None:
    """Remove what an earlier test and its clients noted down."""
    for client in CLIENTS:
        for path in (folder / client).iterdir():
            path.unlink()


@pytest.mark.timeout(900)
def test_a_client_is_forgotten_while_a_deployment_trains(
    deployment: Deployment, folder: Path
) -> None:
    ledger = folder / "ledger"
    for client in range(3):
        note(folder, "hold", client, 2).touch()
    config: dict[str, Value] = {"num-server-rounds": 4, "ledger": str(ledger)}
    run = deployment.start_run(APP, config)
    for client in range(3):
        wait_until(deployment, note(folder, "started", client, 2))
    assert len(participants(ledger)) == 1
    fastfedul("request", "add", str(ledger), "client-1", "--reason", "withdrawn")
    for client in range(3):
        note(folder, "hold", client, 2).unlink()
    assert run.wait(LONG) == "finished:completed"

    # It took part in two rounds, and was sent nothing after the request.
    assert note(folder, "started", 1, 2).exists()
    assert not note(folder, "started", 1, 3).exists()
    assert note(folder, "started", 2, 4).exists()
    assert participants(ledger) == [{"client-0", "client-2"}] * 4
    with LedgerReader(ledger) as reader:
        assert reader.clients()["client-1"].state == "erased"
        assert not verify(reader).problems

    (asked,) = fastfedul("request", "list", str(ledger))["requests"]
    assert asked["state"] == "applied"
    public = folder / "signing.pem.pub"
    key = ("--public-key", str(public))
    checked = fastfedul("certificate", "check", asked["certificate"], *key)
    assert checked["ok"]
    assert checked["signed"]
    assert "fails" not in {check["verdict"] for check in checked["checks"]}

    check_that_flower_keeps_nothing(deployment, folder)


def check_that_flower_keeps_nothing(deployment: Deployment, folder: Path) -> None:
    """Look for what the forgotten client sent, in every file on the server's side."""
    sent = np.load(note(folder, "sent", 1, 2).with_suffix(".npy"))
    pieces = [sent[i : i + 8].tobytes() for i in range(0, len(sent), 8)]

    def found() -> set[str]:
        own = set((folder / "client-1").iterdir())
        files = [p for p in folder.rglob("*") if p.is_file() and p not in own]
        contents = {path.name: path.read_bytes() for path in files}
        return {n for n, data in contents.items() if any(p in data for p in pieces)}

    assert found()
    assert found() <= {"state.db", "state.db-wal"}
    database = str(deployment.database)
    fastfedul("flower", "clean", database, code=1)
    deployment.terminate(deployment.superlink)
    assert found()
    facts = fastfedul("flower", "clean", database)
    assert facts["objects"] == 0
    assert not found()
    # The database is still the same: everybody is known by name and key.
    deployment.start_superlink()


@pytest.mark.timeout(1200)
def test_faults_cost_a_round_and_never_the_ledger(
    deployment: Deployment, folder: Path
) -> None:
    clear(folder)
    ledger = folder / "faults"
    note(folder, "poison", 2, 1).touch()
    for client, number in ((0, 2), (0, 4), (1, 4), (2, 4)):
        note(folder, "hold", client, number).touch()
    config: dict[str, Value] = {"num-server-rounds": 5, "ledger": str(ledger)}
    run = deployment.start_run(APP, config)

    deployment.make_key("stranger")
    with pytest.raises(DeploymentError, match="refused"):
        deployment.start_supernode("stranger", {"partition-id": 9}, patience=0)

    # Killed while it trains in round 2. The others end the round without it.
    wait_until(deployment, note(folder, "started", 0, 2))
    deployment.kill(deployment.nodes["client-0"])
    deployment.start_supernode("client-0")
    note(folder, "hold", 0, 2).unlink()
    wait_until(deployment, note(folder, "started", 0, 3))
    assert "NaN" in failures(ledger)[1, "client-2"]
    # By Flower's word that it is gone, or, if it is back before that, by its silence.
    assert failures(ledger)[2, "client-0"].startswith(("it failed", "it sent no reply"))
    assert len(failures(ledger)) == 2

    # Everybody is back in round 4, and then the SuperLink is gone.
    for client in range(3):
        wait_until(deployment, note(folder, "started", client, 4))
    with LedgerReader(ledger) as reader:
        before = reader.rounds()
    assert len(before) == 3
    deployment.kill(deployment.superlink)
    for client in range(3):
        note(folder, "hold", client, 4).unlink()
    deployment.wait_for(
        lambda: not server_apps(deployment), LONG, "the ServerApp to end"
    )
    deployment.start_superlink()
    again = deployment.start_run(APP, config)
    assert again.wait(LONG) == "finished:completed"
    # Flower calls it failed a minute later, when it has missed two heartbeats.
    assert run.status() in ("running", "finished:failed")

    everybody = set(CLIENTS)
    rounds = participants(ledger)
    assert rounds[:2] == [{"client-0", "client-1"}, {"client-1", "client-2"}]
    assert rounds[2:] == [everybody, everybody, everybody]
    with LedgerReader(ledger) as reader:
        assert reader.rounds()[:3] == before
        assert not verify(reader).problems

    # One that ends in good order is taken in again at once.
    deployment.terminate(deployment.nodes["client-1"])
    deployment.start_supernode("client-1", patience=0)


def server_apps(deployment: Deployment) -> list[int]:
    """Return the processes in which the server's side of a run lives."""
    found = []
    for pid in deployment.pids():
        command = Path(f"/proc/{pid}/cmdline")
        if command.exists() and b"flwr-serverapp" in command.read_bytes():
            found.append(pid)
    return found
