"""The benchmark of scale runs, and says the figures that the documents quote."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_part_runs_and_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/scale.py", "--quick", "--json"]
    command += ["--work", str(tmp_path)]
    done = [
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
        for _ in range(2)
    ]
    assert done[0].returncode == 0, done[0].stderr
    first, again = (json.loads(one.stdout) for one in done)
    for figure in (
        "forget_over_read_1e6",
        "bytes_read_over_needed_1e6",
        "bytes_read_over_needed",
        "algebra_seconds_1e6_8",
        *(["recorded_over_write_1e6"] if find_spec("flwr") else []),
        "peak_gb_1e6",
        "append_over_write_1e6",
        "append_growth_rounds",
        "files_600_rounds",
        "clients_seconds",
        "forget_600_rounds_seconds",
        "help_over_numpy",
    ):
        assert first[figure] > 0, figure
    assert first["intact_after_erasing"] == 1
    assert first["files_600_rounds"] <= 8
    assert first["erased_phones_sums_after_1"] < first["erased_phones_sums_forgettable"]
    assert first["erased_phones_sums_16_after_10"] == 1
    assert done[1].stderr == ""
    assert {k: v for k, v in again.items() if k != "machine"} == {
        k: v for k, v in first.items() if k != "machine"
    }
