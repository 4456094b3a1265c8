"""Every example runs and shows what it promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_numpy_federation_forgets_its_poisoner() -> None:
    found = subprocess.run(
        [sys.executable, EXAMPLES / "digits_numpy.py"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    rows = {
        name: [float(value) for value in re.findall(r"([\d.]+)%", line)]
        for line in found.stdout.splitlines()
        for name in re.findall(r"(before|forgotten|retrained)", line)
        if "%" in line
    }
    assert rows["before"][1] > 40
    assert rows["forgotten"][1] < 5
    assert rows["forgotten"][0] > rows["retrained"][0] - 5
    assert "intact" in found.stdout
