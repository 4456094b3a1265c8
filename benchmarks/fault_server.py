"""Runs commands that are killed, or fail, at one system call of a given number.

`Server` starts one interpreter with `fault_shim.c` loaded under it. That interpreter
imports the command line once and then forks for each attempt, so that an attempt takes
milliseconds and not the time to start Python.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Literal, Self

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SOURCE = Path(__file__).with_name("fault_shim.c")
Fault = Literal["none", "kill", "fail"]
_MODES: dict[Fault, int] = {"none": 1, "kill": 2, "fail": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One command, and the fault that it meets.

    Attributes:
        arguments: Arguments of `fastfedul`, or of a program of `PROGRAMS`.
        folder: Calls that change files below this folder are counted.
        fault: Nothing, a SIGKILL, or an error of the call.
        call: Number of the call that meets the fault, from 1 on.
        error: Error number of a call that fails.
        record: File for the record of all calls; None for no record.
        apart: Whether every vector gets a file of its own, as in a large model.
        environment: Variables of the environment for this attempt.
    """

    arguments: Sequence[str]
    folder: str
    fault: Fault = "none"
    call: int = 0
    error: int = 0
    record: str | None = None
    apart: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        code: Exit code; negative for a signal.
        calls: Number of calls counted; 0 if the process was killed.
        place: The call that met the fault, such as `unlink /arrays/1.safetensors`.
        output: Standard output.
        errors: Standard error.
    """

    code: int
    calls: int
    place: str
    output: str
    errors: str

    @property
    def killed(self) -> bool:
        """Whether the fault killed the process."""
        return self.code == -signal.SIGKILL

    @property
    def line(self) -> str:
        """Last line of what it said."""
        lines = (self.errors.strip() or self.output.strip()).splitlines()
        return lines[-1][:200] if lines else ""


def compiler() -> str | None:
    """Return the C compiler that builds the shim; None if there is none."""
    return shutil.which("cc") or shutil.which("gcc")


class Server:
    """An interpreter that makes attempts, one after the other."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fastfedul-faults-")
        shim = Path(self._folder.name) / "shim.so"
        found = compiler()
        assert found, "a C compiler is needed; ask compiler() first"
        options = ["-O2", "-shared", "-fPIC", "-o", str(shim), str(SOURCE)]
        subprocess.run([found, *options, "-ldl", "-lpthread"], check=True)
        environment = {
            **os.environ,
            "LD_PRELOAD": str(shim),
            "OPENBLAS_NUM_THREADS": "1",
            "TERM": "dumb",
            "COLUMNS": "200",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(shim), self._folder.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout
        self._process.stdout.close()
        self._folder.cleanup()

    def run(self, attempt: Attempt) -> Outcome:
        """Return how one attempt ended."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(asdict(attempt)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process that makes the attempts has ended")
        return Outcome(**json.loads(line))

    def must(self, attempt: Attempt) -> Outcome:
        """Return how an attempt ended that must succeed.

        Raises:
            RuntimeError: If it fails.
        """
        done = self.run(attempt)
        if done.code:
            raise RuntimeError(f"{attempt.arguments} failed: {done.errors}")
        return done


def _serve(shim: str, folder: Path) -> None:
    """Make attempts as standard input asks, and print how each one ended."""
    library = ctypes.CDLL(shim)
    library.shim_calls.restype = ctypes.c_long
    library.shim_last.restype = ctypes.c_char_p
    library.shim_arm.argtypes = [
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_long,
        ctypes.c_int,
    ]
    _import_everything()
    for line in sys.stdin:
        attempt = Attempt(**json.loads(line))
        files = [folder / name for name in ("output", "errors", "calls")]
        for file in files:
            file.write_text("")
        process = os.fork()
        if process == 0:
            _attempt(library, attempt, files)
        _, status = os.waitpid(process, 0)
        output, errors, calls = (file.read_text(errors="replace") for file in files)
        count, _, place = calls.partition(" ")
        killed_at = [
            each for each in errors.splitlines() if each.startswith("killed at ")
        ]
        outcome = Outcome(
            os.waitstatus_to_exitcode(status),
            int(count or 0),
            killed_at[0].partition(": ")[2] if killed_at else place,
            output,
            errors,
        )
        sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
        sys.stdout.flush()


def _import_everything() -> None:
    """Import the modules that commands would import one by one."""
    for name in ("cli.main", "cli.forget", "cli.ledger.verbs", "cli.request"):
        import_module(f"fastfedul.{name}")
    import_module("benchmarks.fault_scenarios")


def _attempt(library: ctypes.CDLL, attempt: Attempt, files: Sequence[Path]) -> None:
    """Run one command in this process, which ends with it."""
    code = 1
    try:
        os.environ.update(attempt.environment)
        for number, file in zip((1, 2), files, strict=False):
            os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
        if attempt.apart:
            _give_each_vector_a_file()
        if attempt.record:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            library.shim_record(os.open(attempt.record, flags))
        folder = os.fsencode(attempt.folder)
        mode = _MODES[attempt.fault]
        library.shim_arm(folder, mode, attempt.call, attempt.error)
        code = _run(list(attempt.arguments))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 70
    finally:
        calls, place = library.shim_calls(), library.shim_last()
        library.shim_arm(b"", 0, 0, 0)
        sys.stdout.flush()
        sys.stderr.flush()
        files[2].write_text(f"{calls} {place.decode(errors='replace')}")
        os._exit(code)


def _run(arguments: list[str]) -> int:
    """Run a program of `PROGRAMS`, or the command line."""
    from benchmarks.fault_scenarios import PROGRAMS
    from fastfedul.cli.main import run
    from fastfedul.errors import FastFedULError

    if arguments[0] in PROGRAMS:
        try:
            PROGRAMS[arguments[0]](*arguments[1:])
        except FastFedULError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return 0

    sys.argv = ["fastfedul", *arguments]
    run()
    return 0


def _give_each_vector_a_file() -> None:
    """Treat small models as large ones, whose vectors do not share files."""
    for name in ("append", "rewrite"):
        module = import_module(f"fastfedul.ledger.changes.{name}")
        setattr(module, "SHARED_BYTES", 0)  # noqa: B010


if __name__ == "__main__":
    _serve(sys.argv[1], Path(sys.argv[2]))
