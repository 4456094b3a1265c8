"""Who took part, with which share."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fastfedul import DiskLedger, InvalidInputError, Round, erase, verify
from fastfedul.federation.rounds import shares_of
from tests.support.refusals import WritableLedger, assert_refused, params, round_of


def test_a_repeated_client(ledger: WritableLedger) -> None:
    assert_refused(ledger, round_of(2, "a", "b", "a"), "'a'", "twice")


def test_a_round_without_anybody(ledger: WritableLedger) -> None:
    assert_refused(ledger, Round(2, ()), "at least one")
    with pytest.raises(InvalidInputError):
        ledger.append(Round(3, (), step=params(1)))


def test_a_client_that_was_forgotten(ledger: WritableLedger) -> None:
    assert_refused(ledger, round_of(2, "a", "d"), "'d'", "forgotten")


def test_a_client_that_was_erased(ledger: WritableLedger) -> None:
    erase(ledger, ["d"])
    assert_refused(ledger, round_of(2, "a", "d"), "'d'", "forgotten")


@pytest.mark.parametrize(
    ("shares", "named"),
    [
        ((0.5, 0.4), "sum to 0.9"),
        ((0.7, 0.7), "sum to 1.4"),
        ((0.5, 0.50001), "sum to 1.00001"),
        ((1.5, -0.5), "1.5"),
        ((-0.5, 1.0), "-0.5"),
        ((0.0, 1.0), "0.0"),
        ((math.nan, 1.0), "nan"),
        ((math.inf, 1.0), "inf"),
        ((0.5, math.nan), "nan"),
        # The others' share is lost in how far the sum is from 1.
        ((1.0, 1e-9), "is only 1e-09"),
        ((1.0000000005, 1e-10), "is only 1e-10"),
        ((1.0, 1e-20), "is only 1e-20"),
    ],
)
def test_shares_that_are_none(
    ledger: WritableLedger, shares: tuple[float, float], named: str
) -> None:
    good = round_of(2, "a", "b")
    updates = tuple(
        replace(update, share=share)
        for update, share in zip(good.updates, shares, strict=True)
    )
    assert_refused(ledger, replace(good, updates=updates), "share", named)


def test_shares_that_sum_to_1_within_rounding_are_taken(
    ledger: WritableLedger,
) -> None:
    good = round_of(2, *(f"client-{i}" for i in range(7)))
    updates = tuple(replace(u, share=float(np.float32(1 / 7))) for u in good.updates)
    ledger.append(replace(good, updates=updates))
    assert ledger.num_rounds == 3


def test_a_tiny_share_is_taken_if_the_others_leave_room_for_it(
    ledger: WritableLedger,
) -> None:
    good = round_of(2, "a", "b")
    shares = shares_of([10**9, 1], "size")
    updates = tuple(
        replace(update, share=share)
        for update, share in zip(good.updates, shares, strict=True)
    )
    ledger.append(replace(good, updates=updates))
    assert ledger.num_rounds == 3


@pytest.mark.parametrize("probability", [-0.1, 1.1, math.nan, math.inf])
@pytest.mark.parametrize("kept", [True, False])
def test_a_probability_that_is_none(
    ledger: WritableLedger, probability: float, kept: bool
) -> None:
    good = round_of(2, "a", "b")
    bad = replace(good.updates[0], keep_probability=probability, kept=kept)
    assert_refused(
        ledger,
        replace(good, updates=(bad, good.updates[1])),
        "'a'",
        "probability",
        str(probability),
    )


def test_an_update_kept_though_its_probability_was_zero(
    ledger: WritableLedger,
) -> None:
    good = round_of(2, "a", "b")
    bad = replace(good.updates[0], keep_probability=0.0)
    assert_refused(
        ledger, replace(good, updates=(bad, good.updates[1])), "'a'", "probability"
    )


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_dropped_update_with_probability_zero_is_taken_and_can_be_read(
    ledger: WritableLedger, zero: float
) -> None:
    good = round_of(2, "a", "b")
    dropped = replace(good.updates[0], keep_probability=zero, kept=False)
    ledger.append(replace(good, updates=(dropped, good.updates[1])))
    assert ledger.updates_in(2)[0].keep_probability == 0
    if isinstance(ledger, DiskLedger):
        assert verify(ledger).problems == ()


def test_an_update_to_be_kept_that_nobody_has(ledger: WritableLedger) -> None:
    good = round_of(2, "a", "b")
    bad = replace(good.updates[0], delta=None)
    assert_refused(
        ledger,
        replace(good, updates=(bad, good.updates[1]), step=params(1)),
        "'a'",
        "no update",
    )


def test_a_missing_update_without_the_step(ledger: WritableLedger) -> None:
    good = round_of(2, "a", "b")
    unseen = replace(good.updates[0], delta=None, kept=False, keep_probability=0.5)
    assert_refused(
        ledger, replace(good, updates=(unseen, good.updates[1])), "needs its step"
    )
