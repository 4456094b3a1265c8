"""What methods ask of a ledger before they begin."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    Model,
    Params,
    Round,
    UnlearnRefusedError,
    UnlearnRequest,
)
from fastfedul.methods.registry import find_method
from fastfedul.params import Layout

LAYOUT = Layout.of({"w": np.zeros(3)})


@pytest.mark.parametrize(
    "name",
    [
        "federaser",
        "fedaccum",
        "fedrecover",
        "kd",
        "fast-fedul-paper",
        "fast-fedul-1",
        "fast-fedul-2",
        "fast-fedul-3",
    ],
)
def test_sums_are_refused_with_what_to_do(name: str, tmp_path: Path) -> None:
    start = Model(Params.zeros(LAYOUT))
    with DiskLedger.create(tmp_path / "ledger", start, history="sums") as ledger:
        one = Params(LAYOUT, np.ones(3, np.float32))
        updates = tuple(ClientUpdate(client, 0.5, one) for client in ("ann", "bob"))
        ledger.append(Round(0, updates))

        with pytest.raises(
            UnlearnRefusedError, match="keeps sums per client; use the default method"
        ):
            find_method(name)(UnlearnRequest(ledger, frozenset({"ann"})))
