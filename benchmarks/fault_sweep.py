"""A kill, or an error, at every system call of the commands that change a run.

After each one the command is repeated. Then the model, the model file, the certificate
and the exit code must be right, and nothing of an erased client may be left.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.fault_scenarios import (
    SCENARIOS,
    Scenario,
    Wanted,
    copy_run,
    needles,
    wrong,
)
from benchmarks.fault_server import Attempt, Fault, Outcome, Server
from benchmarks.fault_writer import Problems
from fastfedul.rng import stream

ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES)
"""Errors that calls fail with."""

_NO_KEY = {"FASTFEDUL_KEY": "", "XDG_CONFIG_HOME": "."}


@dataclass(slots=True)
class Sweep:
    """Result of a sweep.

    Attributes:
        faults: Kills or errors that struck.
        problems: One line for each violation.
    """

    faults: int = 0
    problems: Problems = field(default_factory=list)

    def summary(self) -> dict[str, int]:
        """Return the counts."""
        return {"faults": self.faults, "wrong": len(self.problems)}


@dataclass(frozen=True, slots=True)
class Stage:
    """A scenario that is ready to be tried.

    Attributes:
        scenario: The scenario.
        template: The run before the command.
        wanted: State of the run after the command.
        calls: Number of calls that the command makes.
    """

    scenario: Scenario
    template: Path
    wanted: Wanted
    calls: int


def attempt_of(
    scenario: Scenario,
    run: Path,
    arguments: Sequence[str] | None = None,
    **fault: Any,
) -> Attempt:
    """Return the command of a scenario, or another one, on a run with a fault."""
    given = arguments or [str(run) if a == "RUN" else a for a in scenario.arguments]
    return Attempt(
        arguments=given,
        folder=str(run),
        apart=scenario.apart,
        environment=_NO_KEY,
        **fault,
    )


def sweep(
    fault: Fault, folder: Path, wanted: int, seed: int, display: Progress
) -> Sweep:
    """Let a fault strike at system calls of every scenario.

    Args:
        fault: `kill` or `fail`.
        folder: Where runs are put.
        wanted: Number of faults, drawn at random; at most each fault at each call.
        seed: Seed of the draw.
        display: Shows the progress.
    """
    tally = Sweep()
    with Server() as server:
        stages = [prepare(folder / "sweep", s, server) for s in SCENARIOS]
        errors = ERRORS if fault == "fail" else (0,)
        places = [
            (stage, call, error)
            for stage in stages
            for call in range(1, stage.calls + 1)
            for error in errors
        ]
        rng = stream(seed, f"sweep {fault}")
        size = min(wanted, len(places))
        chosen = sorted(rng.choice(len(places), size, replace=False).tolist())
        places = [places[number] for number in chosen]
        task = display.add_task(f"{fault} at system calls", total=len(places))
        for stage, call, error in places:
            struck, problems = _strike(stage, folder, server, fault, call, error)
            tally.faults += struck
            tally.problems += problems
            display.advance(task)
    shutil.rmtree(folder / "sweep")
    return tally


def prepare(folder: Path, scenario: Scenario, server: Server) -> Stage:
    """Return a scenario with its run, after an undisturbed command on a copy."""
    own = folder / scenario.name.replace(" ", "-").replace(",", "")
    template, run = own / "run", own / "try"
    server.must(attempt_of(scenario, own, ("build", scenario.name, str(template))))
    gone = needles(template) if scenario.erases else []
    copy_run(template, run)
    done = server.must(attempt_of(scenario, run))
    wanted = Wanted.of(run, gone, deployed=scenario.deploys)
    return Stage(scenario, template, wanted, done.calls)


def _strike(
    stage: Stage, folder: Path, server: Server, fault: Fault, call: int, error: int
) -> tuple[bool, list[str]]:
    """Return whether a fault struck, and what was wrong afterwards."""
    run = folder / "sweep" / "try"
    copy_run(stage.template, run)
    first = server.run(
        attempt_of(stage.scenario, run, fault=fault, call=call, error=error)
    )
    struck = first.killed if fault == "kill" else bool(first.place)
    name = errno.errorcode[error] if error else "SIGKILL"
    where = f"{stage.scenario.name}, {name} at {call} ({first.place})"
    return struck, [
        f"{where}: {text}" for text in _aftermath(stage, run, server, fault, first)
    ]


def _aftermath(
    stage: Stage, run: Path, server: Server, fault: Fault, first: Outcome
) -> Iterator[str]:
    """Yield what is wrong after a fault, and after the command was repeated."""
    if fault == "fail":
        if "Traceback" in first.errors:
            yield f"a traceback: {first.line}"
        if first.code == 0:
            # A command that says it is done must have done it.
            for text in wrong(run, stage.wanted):
                yield f"exit code 0, but {text}"
    again = server.run(attempt_of(stage.scenario, run))
    if again.code:
        yield f"repeated, it fails with {again.code}: {again.line}"
    for text in wrong(run, stage.wanted):
        yield f"repeated, {text}"
