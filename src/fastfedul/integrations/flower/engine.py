"""Training of a run's clients by Flower's simulation. Needs the extra `flower`.

Flower and its workers run in processes of their own. Their output goes to a file, an
interrupt reaches the parent alone, and they end when the parent does. Flower does only
the local training. Draws, checks, shares, aggregation and ledger are as in every other
run, so the recorded bytes are the same.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from fastfedul.errors import MissingPackageError
from fastfedul.federation.local import LocalResult
from fastfedul.federation.trainer import LocalTraining, Logits, TrainingError
from fastfedul.federation.workers.pool import InProcess, count_cores
from fastfedul.records import ClientId, Model
from fastfedul.runs.config import RunConfig

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Environment in which Flower and Ray send no reports and install nothing."""

_PATIENCE = 15.0
"""Seconds that the engine has to stop by itself."""

_LONGEST_FOLDER = 40
"""Ray's sockets lie below its folder, and a socket's path is short."""


@dataclass(frozen=True, slots=True)
class SimulationOrder:
    """The first message to the engine.

    Attributes:
        config: File with the options of the run.
        num_clients: How many there are.
        num_workers: How many are trained at once.
        ray: Folder for Ray; None for its usual place.
    """

    config: Path
    num_clients: int
    num_workers: int
    ray: Path | None


@dataclass(frozen=True, slots=True)
class TrainOrder:
    """Train these clients from a model; the answer is their results, in order."""

    model: Model
    index: int
    clients: tuple[int, ...]
    local: LocalTraining | None


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """The answer to an order that failed: why, in one line."""

    reason: str


class FlowerWorkers:
    """Trains clients in Flower's simulation; scores models in this process.

    Args:
        config: The options of the run, from which every worker prepares its data.
        here: Makes the initial model and scores models.
    """

    def __init__(self, config: RunConfig, here: InProcess) -> None:
        if find_spec("flwr") is None or find_spec("ray") is None:
            raise MissingPackageError("flower", "this engine needs Flower")
        self._here = here
        self._numbers = {name: number for number, name in enumerate(here.names)}
        self._folder = tempfile.TemporaryDirectory(
            prefix="fastfedul-", ignore_cleanup_errors=True
        )
        try:
            self._process, self._connection = self._started(config)
        except BaseException:
            self._folder.cleanup()
            raise
        self._ready = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close(at_once=exception[0] is not None)

    @property
    def pid(self) -> int:
        """Process number of the engine."""
        return self._process.pid

    def initial(self, seed: int) -> Model:
        """Return the model to start from."""
        return self._here.initial(seed)

    def predict(self, model: Model, name: str) -> Logits:
        """Return a model's logits for a set of images that was given at the start."""
        return self._here.predict(model, name)

    def train(
        self,
        model: Model,
        index: int,
        clients: Sequence[ClientId],
        local: LocalTraining | None = None,
    ) -> Sequence[LocalResult]:
        """Return the results of these clients in a round, in their order.

        Raises:
            TrainingError: If a client failed or the engine stopped.
        """
        numbers = tuple(self._numbers[name] for name in clients)
        try:
            if not self._ready:
                self._answer()
                self._ready = True
            self._connection.send(TrainOrder(model, index, numbers, local))
            results: Sequence[LocalResult] = self._answer()
        except (EOFError, OSError):
            raise TrainingError(
                f"Flower's simulation has stopped: {self._last_words()}"
            ) from None
        return results

    def close(self, *, at_once: bool = False) -> None:
        """Stop the engine and all its workers.

        Args:
            at_once: Do not let it finish its task.
        """
        self._connection.close()
        assert self._process.stdin is not None
        if not at_once:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE)
        with contextlib.suppress(BrokenPipeError):
            # The engine ends when this end of its input does.
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE)
        # Also the processes that Ray leaves behind if the engine was killed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()

    def _started(self, config: RunConfig) -> tuple[subprocess.Popen[bytes], Connection]:
        folder = Path(self._folder.name)
        config.save(folder / "run.toml")
        order = SimulationOrder(
            config=folder / "run.toml",
            num_clients=len(self._numbers),
            num_workers=config.workers or min(count_cores(), len(self._numbers)),
            ray=folder / "ray" if len(str(folder)) <= _LONGEST_FOLDER else None,
        )
        here, there = socket.socketpair()
        with there, (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m"),
                    "fastfedul.integrations.flower.engine_process",
                    str(there.fileno()),
                ],
                env={
                    **os.environ,
                    **QUIET,
                    "FLWR_HOME": str(folder / "flwr"),
                    "PYTHONPATH": os.pathsep.join(
                        p or str(Path.cwd()) for p in sys.path
                    ),
                },
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[there.fileno()],
                # Ctrl-C is for this process, which then stops the engine.
                start_new_session=True,
            )
        connection = Connection(here.detach())
        connection.send(order)
        return process, connection

    def _answer(self) -> Any:
        answer = self._connection.recv()
        if isinstance(answer, EngineFailure):
            raise TrainingError(answer.reason)
        return answer

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if (code := self._process.wait(_PATIENCE)) < 0:
                return f"killed by signal {-code}"
        log = (Path(self._folder.name) / "log").read_text("utf-8", errors="replace")
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        return "".join(c for c in lines[-1] if c.isprintable()) if lines else "silently"
