"""A benchmark whose data are missing says so in one line, and `make bench` goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="training needs the extra torch")
pytest.importorskip("flwr", reason="a simulation needs the extra flower")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "flower"])
def test_without_mnist_a_benchmark_is_left_out(name: str, tmp_path: Path) -> None:
    empty = {"FASTFEDUL_DATA": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", "--quick"],
        cwd=ROOT,
        env={**os.environ, **empty},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout == ""
    [line] = found.stderr.splitlines()
    assert line.startswith(f"benchmarks/{name}.py is left out: mnist is not on this")
    assert "fastfedul data fetch mnist" in line
