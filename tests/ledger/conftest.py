"""A small ledger on disk, and a maker of ledgers in memory and on disk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastfedul import DiskLedger, MemoryLedger, Model, verify
from tests.support.disk_ledgers import initial_model, round_of
from tests.support.histories import Maker, WritableLedger, initial


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed ledger of three rounds."""
    with DiskLedger.create(tmp_path / "ledger", initial_model()) as ledger:
        for index in range(3):
            ledger.append(round_of(index))
    return tmp_path / "ledger"


@pytest.fixture(params=["memory", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Maker]:
    """Makes ledgers of one kind; dtypes and the like count on disk only."""
    made: list[DiskLedger] = []
    numbers = itertools.count()

    def create(model: Model | None = None, **options: Any) -> WritableLedger:
        model = model or initial()
        common = {k: options.pop(k) for k in ("aggregation", "custom") if k in options}
        if request.param == "memory":
            return MemoryLedger.create(model, **common)
        path = tmp_path / f"ledger-{next(numbers)}"
        made.append(DiskLedger.create(path, model, **common, **options))
        return made[-1]

    yield create
    for ledger in made:
        assert verify(ledger).problems == ()
        assert verify(ledger).num_strays == 0
        ledger.close()
