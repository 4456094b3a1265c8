"""The command line as a user runs it: in this process, or in a process of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fastfedul.cli import main

COMMAND = (sys.executable, "-m", "fastfedul")


def require_programs(*names: str) -> None:
    """Skip a test whose programs are not installed; in CI it fails instead."""
    missing = [name for name in names if shutil.which(name) is None]
    if missing and os.environ.get("CI") != "true":
        pytest.skip(f"needs {', '.join(missing)}")
    assert not missing


def run_program(
    *words: object, code: int = 0, cwd: Path | None = None, timeout: float = 250
) -> subprocess.CompletedProcess[str]:
    """Return what a program printed; it ends with this code and without a trace."""
    found = subprocess.run(
        [str(word) for word in words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        check=False,
    )
    assert found.returncode == code, found.stdout + found.stderr
    assert "Traceback" not in found.stderr
    return found


def run(
    *arguments: object,
    code: int = 0,
    cwd: Path | None = None,
    columns: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Return the output of `fastfedul`, run in this process from its entry point.

    Starting Python and importing NumPy takes longer than most commands. A test of
    signals, limits or missing packages takes `run_program` and `COMMAND` instead.
    """
    words = ["fastfedul", *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    width = {"COLUMNS": str(columns or os.environ.get("COLUMNS", 80))}
    # As `python -m` does: modules of the working folder come first.
    paths = sys.path if cwd is None else [str(cwd), *sys.path]
    with (
        Path(os.devnull).open() as nothing,
        mock.patch.object(sys, "argv", words),
        mock.patch.object(sys, "stdin", nothing),
        mock.patch.object(sys, "path", paths),
        mock.patch.dict(os.environ, width),
        contextlib.chdir(cwd or "."),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main.run()
            ended: Any = 0
        except SystemExit as error:
            ended = error.code or 0
    assert ended == code, out.getvalue() + err.getvalue()
    return subprocess.CompletedProcess(words, ended, out.getvalue(), err.getvalue())


def run_json(
    *arguments: object, code: int = 0, cwd: Path | None = None
) -> dict[str, Any]:
    """Return the one object that `fastfedul` printed."""
    printed = run(*arguments, "--json", code=code, cwd=cwd).stdout
    found: dict[str, Any] = json.loads(printed)
    return found


def interrupt(
    *words: object, ready: Callable[[], bool], cwd: Path | None = None
) -> tuple[str, str]:
    """Press Ctrl-C once a program is ready; return its standard output and error."""
    with subprocess.Popen(
        list(map(str, words)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        start_new_session=True,
    ) as process:
        deadline = time.monotonic() + 120
        while not ready():
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()
            time.sleep(0.005)
        # As a terminal does: to the whole group, workers included.
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Traceback" not in said[1]
    deadline = time.monotonic() + 20
    while _members_of(process.pid):
        assert time.monotonic() < deadline, _members_of(process.pid)
        time.sleep(0.02)
    return said


def _members_of(group: int) -> list[str]:
    """Return the command lines of the processes of a group that still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, its_group, *_ = (
                (folder / "stat").read_text().rpartition(")")[2].split()
            )
            if int(its_group) == group and state != "Z":
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def has_text(file: Path) -> bool:
    """Return whether a file is there and not empty."""
    return file.exists() and bool(file.read_text())


def one_line(found: subprocess.CompletedProcess[str]) -> str:
    """Return the one line that an error is."""
    [line] = found.stderr.strip().splitlines()
    assert line.startswith("error: ")
    return line
