"""A project's run on Flower's simulation engine: the same bytes as on its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fastfedul import LedgerReader
from fastfedul.errors import InvalidInputError, MissingPackageError
from fastfedul.federation.trainer import TrainingError
from fastfedul.federation.workers.pool import InProcess
from fastfedul.integrations.flower.engine import FlowerWorkers
from fastfedul.runs.training import RoundMetrics, RunConfig, prepare, resume, train

pytest.importorskip("torch")

if TYPE_CHECKING:
    from tests.integrations.conftest import Simulations

# Draws, dropouts, a scaled attack, dropped updates and a forgetting on the way.
SETTINGS = RunConfig.from_options(
    train_size=240,
    clients=5,
    per_round=4,
    dropout=0.2,
    rounds=5,
    epochs=1,
    partition="dirichlet:0.5",
    attack="pixel",
    attack_scale=2.0,
    keep="optimal:2",
    keep_use="aggregate",
    forget=("client-3@3",),
    seed=4,
    workers=2,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(SETTINGS.with_options(workers=1), folder)
    return folder


def outcome(folder: Path) -> tuple[bytes, str, list[dict[str, Any]]]:
    """Return what must not depend on the engine: model, chain, accuracies."""
    with LedgerReader(folder) as ledger:
        chain = ledger.chain.hex()
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("seconds")
    return (folder / "model.safetensors").read_bytes(), chain, lines


def session_of(pid: int) -> list[str]:
    """Return the processes of a session that still run; the dead may be unburied."""
    table = ["ps", "-o", "stat=,pid=,cmd=", "-s", str(pid)]
    found = subprocess.run(table, capture_output=True, text=True, check=False)
    return [line for line in found.stdout.splitlines() if not line.startswith("Z")]


def require_gone(pid: int) -> None:
    """Require that a session ends; on a busy machine a killed process takes a while."""
    patient = time.monotonic() + 20
    while (left := session_of(pid)) and time.monotonic() < patient:
        time.sleep(0.1)
    assert not left


@pytest.mark.slow
def test_an_interrupted_run_on_flower_ends_with_the_same_bytes_without_it(
    simulations: Simulations, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    (tmp_path / "run.toml").write_text(SETTINGS.to_toml())
    command = [sys.executable, "-m", "fastfedul", "train", str(folder)]
    options = ["--config", str(tmp_path / "run.toml"), "--engine", "flower-simulation"]
    process = subprocess.Popen(
        [*command, *options, "--json"], stdout=subprocess.PIPE, start_new_session=True
    )
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n")):
        assert process.poll() is None
        time.sleep(0.02)
    engines = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)],
        capture_output=True,
        text=True,
        check=True,
    )
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    # It may have been through before the signal came.
    assert process.returncode in (0, 130)
    if process.returncode == 130:
        assert "go on with: fastfedul train" in json.loads(printed)["error"]
    for engine in map(int, engines.stdout.split()):
        require_gone(engine)
    resume(folder)
    assert outcome(folder) == outcome(whole)


@pytest.mark.slow
def test_a_run_begun_without_flower_ends_with_the_same_bytes_on_it(
    simulations: Simulations, whole: Path, tmp_path: Path
) -> None:
    class StopError(Exception):
        pass

    def stop(metrics: RoundMetrics) -> None:
        if metrics.round == 1:
            raise StopError

    with pytest.raises(StopError):
        train(SETTINGS.with_options(workers=1), tmp_path / "run", stop)
    seen: list[int] = []
    resume(
        tmp_path / "run",
        progress=lambda metrics: seen.append(metrics.round),
        engine="flower-simulation",
    )
    assert seen == [2, 3, 4]
    assert outcome(tmp_path / "run") == outcome(whole)


@pytest.mark.slow
def test_an_engine_that_is_killed_is_one_line_and_nothing_stays(
    simulations: Simulations, tmp_path: Path
) -> None:
    prepared = prepare(SETTINGS)
    here = InProcess(prepared.trainer, prepared.clients, seed=4)
    with FlowerWorkers(SETTINGS, here) as workers:
        pid = workers.pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(TrainingError, match="has stopped: killed by signal 9"):
            workers.train(here.initial(0), 0, ["client-0"])
    require_gone(pid)


def test_an_unknown_engine_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="unknown engine 'steam'"):
        train(SETTINGS, tmp_path / "run", engine="steam")
    assert not (tmp_path / "run").exists()


def test_without_flower_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackageError, match=r"fastfedul\[flower\]"):
        train(SETTINGS, tmp_path / "run", engine="flower-simulation")
    assert not (tmp_path / "run").exists()
