"""The benchmark of the object store runs, and says what the documents quote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_quick_benchmark_counts_what_it_reads() -> None:
    command = [sys.executable, "benchmarks/object_store.py", "--quick", "--json"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # Two steps and two updates of the client, of four bytes a value. The third round is
    # in the file that is being filled, which is local.
    assert found["scalar_megabytes"] == pytest.approx(4 * 0.4, rel=0.01)
    assert found["scalar_forget_over_read"] > 0
    assert found["default_megabytes"] > found["scalar_megabytes"]
