"""The command line in a process of its own, as a user runs it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

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
    *arguments: object, code: int = 0, before: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Return what `fastfedul` printed; `before` are words before the command."""
    return run_program(*before, *COMMAND, *arguments, code=code)


def run_json(*arguments: object, code: int = 0) -> dict[str, Any]:
    """Return the one object that `fastfedul` printed."""
    found: dict[str, Any] = json.loads(run(*arguments, "--json", code=code).stdout)
    return found


def one_line(found: subprocess.CompletedProcess[str]) -> str:
    """Return the one line that an error is."""
    [line] = found.stderr.strip().splitlines()
    assert line.startswith("error: ")
    return line
