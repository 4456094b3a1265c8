"""What the tests with Flower share: simulations as processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fastfedul.integrations.flower.engine import QUIET

MISSING = find_spec("flwr") is None or find_spec("ray") is None
APP = Path(__file__).with_name("flower_app.py")
HOSTILE_APP = Path(__file__).with_name("hostile_app.py")
ROOT = Path(__file__).parents[2]

collect_ignore = (
    [
        "flower_app.py",
        "hostile_app.py",
        "rules_app.py",
        "optimizer_scenarios.py",
        "test_flower_hostile.py",
        "test_flower_identity.py",
        "test_flower_optimizers.py",
        "test_flower_recorded.py",
        "test_flower_replies.py",
        "test_flower_rounds.py",
        "test_flower_rules.py",
    ]
    if MISSING and os.environ.get("CI") != "true"
    else []
)


@dataclass(frozen=True)
class Simulations:
    """Starts simulations of `flower_app.py`, or of another program beside it."""

    folder: Path

    def start(
        self, folder: Path, what: str, app: Path = APP
    ) -> subprocess.Popen[bytes]:
        """Start one, in a session of its own so that all of it can be killed."""
        folder.mkdir(exist_ok=True)
        with (folder / "log.txt").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, str(app), str(folder), what],
                env={
                    **os.environ,
                    **QUIET,
                    "FLWR_HOME": str(self.folder / "flwr"),
                    "PYTHONPATH": str(ROOT),
                },
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def finish(self, folder: Path, what: str, app: Path = APP) -> None:
        """Run one to its end."""
        process = self.start(folder, what, app)
        code = process.wait(250)
        assert code == 0, (folder / "log.txt").read_text()[-3000:]


@pytest.fixture(autouse=True, scope="session")
def identity() -> None:
    """Let messages be made outside a run, as the simulation does for itself."""
    if not MISSING:
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


@pytest.fixture(scope="session")
def simulations(tmp_path_factory: pytest.TempPathFactory) -> Simulations:
    if MISSING:
        text = "needs the extra flower"
        pytest.fail(text) if os.environ.get("CI") == "true" else pytest.skip(text)
    return Simulations(tmp_path_factory.mktemp("simulations"))


@dataclass(frozen=True)
class Scenarios:
    """Outcomes of the scenarios of a program."""

    folder: Path
    found: dict[str, Any]

    def ledger(self, name: str) -> Path:
        return self.folder / name / "ledger"

    def failures(self, name: str) -> list[dict[str, Any]]:
        text = (self.folder / name / "ledger.failures.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def seen(self, name: str) -> list[str]:
        return (self.folder / name / "seen.txt").read_text().splitlines()


@pytest.fixture(scope="session")
def scenarios(simulations: Simulations) -> Scenarios:
    return scenarios_of(simulations, APP)


@pytest.fixture(scope="session")
def hostile_scenarios(simulations: Simulations) -> Scenarios:
    return scenarios_of(simulations, HOSTILE_APP)


def scenarios_of(simulations: Simulations, app: Path) -> Scenarios:
    """Return the outcomes of all scenarios of a program."""
    folder = simulations.folder / app.stem
    simulations.finish(folder, "scenarios", app)
    return Scenarios(folder, json.loads((folder / "found.json").read_text()))
