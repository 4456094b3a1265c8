"""A ledger in use, in memory and on disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastfedul import DiskLedger, MemoryLedger
from tests.support.refusals import fill, initial_model


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "ledger"
    with DiskLedger.create(path, initial_model()) as made:
        fill(made)
    return path


@pytest.fixture(params=["memory", "disk"])
def ledger(
    request: pytest.FixtureRequest, tmp_path: Path, template: Path
) -> Iterator[MemoryLedger | DiskLedger]:
    if request.param == "memory":
        made = MemoryLedger.create(initial_model())
        fill(made)
        yield made
        return
    shutil.copytree(template, tmp_path / "ledger")
    with DiskLedger(tmp_path / "ledger") as opened:
        yield opened
