"""Erasing from a ledger whose aggregation is replayed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fastfedul import Aggregation, FastFedUL, NoSkew, UnlearnRefusedError, erase, forget
from tests.support.histories import (
    TARGET,
    Maker,
    assert_adds_up,
    close_to,
    history,
    normal,
    recorded,
    steps_of,
    without,
)


def third_largest(updates: npt.NDArray[Any], shares: npt.NDArray[Any]) -> Any:
    return np.sort(updates, axis=0)[len(updates) // 2] * np.float32(len(shares))


REPLAYED: dict[str, dict[str, Any]] = {
    "median": {"aggregation": "median"},
    "trimmed": {"aggregation": "trimmed-mean:0.2"},
    "krum": {"aggregation": "krum:1"},
    "multi-krum": {"aggregation": "multi-krum:1:2"},
    "bulyan": {"aggregation": "bulyan:0", "partial": False},
    "custom": {
        "aggregation": "third",
        "custom": {"third": Aggregation(third_largest)},
    },
}


@pytest.mark.parametrize("options", REPLAYED.values(), ids=REPLAYED)
def test_erasing_from_a_replayed_aggregation_gives_the_history_without_the_client(
    make: Maker, options: dict[str, Any]
) -> None:
    rounds = history(6, partial=options.get("partial", True))
    options = {name: value for name, value in options.items() if name != "partial"}
    ledger, never = make(**options), make(**options)
    recorded(ledger, rounds)
    recorded(never, [without(r, {TARGET, "emil"}) for r in rounds])
    method = FastFedUL(skew=NoSkew())
    forget(ledger, [TARGET], method, erase=True)
    forget(ledger, ["emil"], method, erase=False)
    close_to(ledger.final.params.flat, never.final.params.flat, scale=5)
    erase(ledger, ["emil"])
    for mine, yours in zip(steps_of(ledger), steps_of(never), strict=True):
        np.testing.assert_array_equal(mine, yours)
    assert_adds_up(ledger)


def test_an_erasure_that_cannot_be_replayed_changes_nothing(make: Maker) -> None:
    ledger = make(aggregation="median")
    rounds = history(4, partial=False)
    recorded(ledger, rounds[:3])
    first, *rest = rounds[3].updates
    dropped = replace(first, kept=False, keep_probability=0.5)
    ledger.append(replace(rounds[3], updates=(dropped, *rest)))

    def state() -> tuple[object, ...]:
        return (
            ledger.final.params.flat.tobytes(),
            [step.tobytes() for step in steps_of(ledger)],
            ledger.rounds(),
            dict(ledger.clients()),
            {i: a.tobytes() for i, a in ledger.adjustments().items()},
            ledger.events(),
        )

    before = state()
    with pytest.raises(UnlearnRefusedError, match="round 3"):
        forget(ledger, [TARGET], erase=True)
    assert state() == before
    with pytest.raises(UnlearnRefusedError, match="round 3"):
        ledger.commit_forgetting([TARGET], normal(1), {}, erase=True)
    assert state() == before
