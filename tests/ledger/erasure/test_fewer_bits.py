"""Erasing from a ledger that is stored in fewer bits."""

from __future__ import annotations

import numpy as np
import pytest

from fastfedul import FastFedUL, Scalar, forget
from fastfedul.records import StorageDtype
from tests.support.histories import (
    LAYOUT,
    TARGET,
    Maker,
    assert_adds_up,
    history,
    mean_without,
    recorded,
    steps_of,
)
from tests.support.stored_vectors import error_bound


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_erasing_from_fewer_bits_gives_the_exact_history_within_their_bound(
    make: Maker, dtype: StorageDtype
) -> None:
    ledger = make(update_dtype=dtype)
    rounds = history(6)
    recorded(ledger, rounds)
    forget(ledger, [TARGET], FastFedUL(skew=Scalar(0.1)), erase=True)
    for index, round_ in enumerate(rounds):
        bound = np.full(LAYOUT.size, 2e-5)
        others = [update for update in round_.updates if update.client != TARGET]
        total = sum(update.share for update in others)
        changed = len(others) < len(round_.updates)
        for update in others if changed else ():
            assert update.delta is not None
            bound += update.share / total * error_bound(update.delta.flat, dtype)
        error = steps_of(ledger)[index] - mean_without(round_, frozenset({TARGET}))
        assert (np.abs(error) <= bound).all()
    assert_adds_up(ledger)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_steps_in_fewer_bits_add_up_within_their_bound_after_an_erasure(
    make: Maker, dtype: StorageDtype
) -> None:
    ledger = make(step_dtype=dtype)
    rounds = history(6)
    recorded(ledger, rounds)
    forget(ledger, [TARGET], FastFedUL(skew=Scalar(0.1)), erase=True)
    bound = np.full(LAYOUT.size, 1e-4)
    total = ledger.initial.params.flat.astype(np.float64)
    for round_, step in zip(rounds, steps_of(ledger), strict=True):
        exact = mean_without(round_, frozenset()).astype(np.float32)
        bound += 2 * error_bound(exact, dtype)
        bound += 2 * error_bound(step, dtype)
        total += step
    for adjustment in ledger.adjustments().values():
        total += adjustment
    assert (np.abs(ledger.final.params.flat - total) <= bound).all()
