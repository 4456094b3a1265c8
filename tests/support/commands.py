"""The command line as a user runs it: in this process, or in a process of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from fastfedul.cli import main

COMMAND = (sys.executable, "-m", "fastfedul")


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


def run(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Return the output of `fastfedul`, run in this process from its entry point.

    Starting Python and importing NumPy takes longer than most commands. A test of
    signals, limits or the environment takes `run_program` and `COMMAND` instead.
    """
    words = ["fastfedul", *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    width = {"COLUMNS": os.environ.get("COLUMNS", "80")}
    with (
        Path(os.devnull).open() as nothing,
        mock.patch.object(sys, "argv", words),
        mock.patch.object(sys, "stdin", nothing),
        mock.patch.dict(os.environ, width),
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


def run_json(*arguments: object, code: int = 0) -> dict[str, Any]:
    """Return the one object that `fastfedul` printed."""
    found: dict[str, Any] = json.loads(run(*arguments, "--json", code=code).stdout)
    return found


def one_line(found: subprocess.CompletedProcess[str]) -> str:
    """Return the one line that an error is."""
    [line] = found.stderr.strip().splitlines()
    assert line.startswith("error: ")
    return line
