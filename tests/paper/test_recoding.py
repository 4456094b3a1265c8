"""The same training stored in another way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfedul import (
    DiskLedger,
    InvalidInputError,
    Keep,
    LedgerError,
    LedgerReader,
    forget,
    verify,
)
from fastfedul.ledger.keeping import POLICIES
from paper.recoding import recoded
from tests.support.shrinking import START, ledger_at, round_of


@pytest.mark.parametrize("policy", POLICIES)
def test_a_recoded_ledger_is_what_training_into_it_would_have_given(
    policy: str, tmp_path: Path
) -> None:
    keep = Keep.parse(policy if policy in ("all", "sums") else f"{policy}:2")
    with (
        ledger_at(tmp_path / "full") as full,
        recoded(
            full,
            tmp_path / "new",
            "float16",
            "int8",
            keep,
        ) as new,
    ):
        chain, final = new.chain, new.final
    with DiskLedger.create(
        tmp_path / "direct",
        START,
        update_dtype="float16",
        step_dtype="int8",
        history="sums" if policy == "sums" else "rounds",
    ) as direct:
        for index in range(10):
            direct.append(keep(round_of(index)))
        assert direct.chain == chain
        assert direct.final.params.flat.tobytes() == final.params.flat.tobytes()
        assert np.array_equal(final.buffers["seen"], np.arange(3))


def test_only_a_whole_training_can_be_recoded(tmp_path: Path) -> None:
    with ledger_at(tmp_path / "full") as full:
        with pytest.raises(InvalidInputError, match="cannot aggregate less"):
            recoded(full, tmp_path / "new", keep=Keep("top", 2, use="aggregate"))
        forget(full, ["anna"], erase=False)
        with pytest.raises(InvalidInputError, match="not whole"):
            recoded(full, tmp_path / "new")
    with DiskLedger.create(tmp_path / "part", START) as part:
        part.append(Keep("top", 2)(round_of(0)))
        with pytest.raises(InvalidInputError, match="was not kept"):
            recoded(part, tmp_path / "new")
    sums = ledger_at(tmp_path / "sums", history="sums")
    with sums, pytest.raises(LedgerError, match="sums"):
        recoded(sums, tmp_path / "other")


@pytest.mark.parametrize("options", [{"budget": 10**8}, {"history": "sums"}])
def test_the_catalogue_cannot_lose_what_is_kept_silently(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Flips around the entry of SQLite that says there is a table `policy`."""
    path = tmp_path / "ledger"
    with ledger_at(path, 2, **options) as ledger:
        settings = ledger.settings
    whole = (path / "index.sqlite").read_bytes()
    entry = whole.index(b"tablepolicypolicy")
    for place in range(entry - 8, entry + 25):
        changed = bytearray(whole)
        changed[place] ^= 0x20
        (path / "index.sqlite").write_bytes(changed)
        try:
            with LedgerReader(path) as reader:
                problems = verify(reader).problems
                assert problems or reader.settings == settings, place
        except LedgerError:
            continue
