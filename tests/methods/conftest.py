"""A small poisoned federation, trained once for all methods; a network with buffers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.small_run import NORMALISED, SmallRun, poisoned_digits


@pytest.fixture(scope="session")
def small_run() -> SmallRun:
    return poisoned_digits()


@pytest.fixture
def normalised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The option `model` of a network with buffers."""
    (tmp_path / "normalised_net.py").write_text(NORMALISED, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield "normalised_net:build"
    sys.modules.pop("normalised_net", None)
