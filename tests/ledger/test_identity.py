"""A ledger's id, and the name of its federation."""

from __future__ import annotations

import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from fastfedul import DiskLedger, InvalidInputError, LedgerReader, Model, Params
from fastfedul.runs.config import RunConfig

START = Model(Params.of({"w": np.zeros(2, np.float32)}))


def test_every_ledger_has_an_id_that_stays(tmp_path: Path) -> None:
    ids = set()
    for name in ("one", "two"):
        with DiskLedger.create(tmp_path / name, START) as ledger:
            ids.add(ledger.ledger_id)
            assert len(bytes.fromhex(ledger.ledger_id)) == 16
            assert ledger.settings.federation is None
            kept = ledger.ledger_id, ledger.roots.secret_of("a"), ledger.chain
        shutil.copytree(tmp_path / name, tmp_path / f"copy of {name}")
        with LedgerReader(tmp_path / f"copy of {name}") as copy:
            assert (copy.ledger_id, copy.roots.secret_of("a"), copy.chain) == kept
    assert len(ids) == 2


NAMES = ["", "x" * 201, "two\nlines", "\0", unicodedata.normalize("NFD", "Orléans")]


@pytest.mark.parametrize("name", NAMES)
def test_a_federation_has_a_name_for_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="federation's name") as caught:
        DiskLedger.create(tmp_path / "ledger", START, federation=name)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ledger").exists()
    with pytest.raises(InvalidInputError, match="federation's name"):
        RunConfig.from_options(federation=name)


def test_the_name_is_kept(tmp_path: Path) -> None:
    name = unicodedata.normalize("NFC", "Hospitals of Orléans")
    DiskLedger.create(tmp_path / "ledger", START, federation=name).close()
    with LedgerReader(tmp_path / "ledger") as ledger:
        assert ledger.settings.federation == name
