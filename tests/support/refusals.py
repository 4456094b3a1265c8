"""A ledger in use, and how it refuses a round without changing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    FastFedULError,
    InvalidInputError,
    MemoryLedger,
    Model,
    Params,
    Round,
    forget,
    verify,
)
from fastfedul.params import Array, Layout
from fastfedul.rng import stream

LAYOUT = Layout.of({"weight": np.zeros((5, 6)), "bias": np.zeros(7)})
LARGE = Layout.of({"weight": np.zeros(70_000)})
WritableLedger = MemoryLedger | DiskLedger


def params(*key: int, layout: Layout = LAYOUT) -> Params:
    values = stream(3, "bad input", *key).normal(size=layout.size)
    return Params(layout, values.astype(np.float32))


def with_value(value: float, layout: Layout = LAYOUT) -> Params:
    flat = params(99, layout=layout).flat.copy()
    flat[layout.size // 2] = value
    return Params(layout, flat)


def round_of(index: int, *names: str, layout: Layout = LAYOUT) -> Round:
    share = 1 / len(names)
    return Round(
        index,
        tuple(
            ClientUpdate(name, share, params(index, i, layout=layout))
            for i, name in enumerate(names)
        ),
    )


def fill(ledger: WritableLedger) -> None:
    """Two rounds of a, b and c; then d took part once and was forgotten."""
    ledger.append(round_of(0, "a", "b", "c"))
    ledger.append(round_of(1, "a", "b", "c", "d"))
    forget(ledger, ["d"], erase=False)


def initial_model() -> Model:
    return Model(params(0), {"seen": np.array([3, 4])})


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "index.sqlite"
    }


def state_of(ledger: WritableLedger) -> tuple[object, ...]:
    common = (
        ledger.num_rounds,
        ledger.final.params.flat.tobytes(),
        {k: (v.dtype, v.tolist()) for k, v in ledger.final.buffers.items()},
        ledger.rounds(),
        dict(ledger.clients()),
        [ledger.updates_in(i) for i in range(ledger.num_rounds)],
        {i: a.tobytes() for i, a in ledger.adjustments().items()},
        ledger.events(),
        [ledger.own_difference(name).tobytes() for name in ledger.clients()],
    )
    if isinstance(ledger, DiskLedger):
        return (*common, ledger.chain, files(ledger.path))
    return common


def assert_refused(
    ledger: WritableLedger,
    round_: Round,
    *named: str,
    error: type[FastFedULError] = InvalidInputError,
) -> None:
    """The round is refused in one line that names the culprit; nothing changes."""
    before = state_of(ledger)
    with pytest.raises(error) as caught:
        ledger.append(round_)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    for word in named:
        assert word in message, message
    assert state_of(ledger) == before
    ledger.append(round_of(2, "a", "b"))
    assert ledger.num_rounds == 3
    if isinstance(ledger, DiskLedger):
        assert verify(ledger).problems == ()


def handed_in(arrays: Mapping[str, Array]) -> Any:
    """Arrays as a careless caller hands them in, unchecked."""
    return arrays


def arrays(**changes: Array | None) -> Any:
    found: dict[str, Array | None] = {**params(5), **changes}
    return {name: array for name, array in found.items() if array is not None}
