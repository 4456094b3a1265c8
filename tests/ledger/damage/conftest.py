"""Sound ledgers, copies to damage, and what the sound ones answer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fastfedul import LedgerReader, verify
from tests.support.damage import KINDS, NOT_OF_SUMS, OPTIMIZER, READINGS, Kind, build


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    """Closed ledgers that together have rows in every table."""
    return {
        kind: build(tmp_path_factory.mktemp(kind) / "ledger", kind)
        for kind in (*KINDS, OPTIMIZER)
    }


@pytest.fixture
def kind() -> Kind:
    """A ledger of rounds, where a test asks for nothing else."""
    return "rounds"


@pytest.fixture
def template(templates: dict[Kind, Path], kind: Kind) -> Path:
    return templates[kind]


@pytest.fixture
def damaged(template: Path, tmp_path: Path) -> Path:
    shutil.copytree(template, tmp_path / "ledger")
    return tmp_path / "ledger"


@pytest.fixture(scope="module")
def truths(templates: dict[Kind, Path]) -> dict[Kind, dict[str, object]]:
    found = {}
    for kind, path in templates.items():
        with LedgerReader(path) as reader:
            assert verify(reader).problems == ()
            found[kind] = {
                name: read(reader)
                for name, read in READINGS.items()
                if kind != "sums" or name not in NOT_OF_SUMS
            }
    return found


@pytest.fixture
def truth(truths: dict[Kind, dict[str, object]], kind: Kind) -> dict[str, object]:
    return truths[kind]
