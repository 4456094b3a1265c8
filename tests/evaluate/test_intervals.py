"""Shares and means with their intervals, against formulas and published tables."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from fastfedul.errors import InvalidInputError, MissingPackageError
from fastfedul.evaluate.intervals import (
    NORMAL_QUANTILE,
    Proportion,
    mean_interval,
    paired_interval,
)

NAN, INF = math.nan, math.inf


# The 97.5 % quantiles of Student's t: NIST/SEMATECH e-Handbook, section 1.3.6.7.2.
T_TABLE = {1: 12.706, 2: 4.303, 4: 2.776, 9: 2.262, 20: 2.086, 30: 2.042, 100: 1.984}


@pytest.mark.parametrize("total", [1, 2, 7, 100, 5000, 10**9])
def test_the_ends_of_an_interval_are_wilsons_shares(total: int) -> None:
    # Wilson's ends are the true shares p from which the value lies z errors away.
    z = 1.959963984540054
    for successes in {0, 1, total // 3, total - 1, total}:
        share = Proportion(successes, total)
        assert share.value is not None
        assert share.interval is not None
        for p in share.interval:
            error = z**2 * p * (1 - p) / total
            assert (share.value - p) ** 2 == pytest.approx(error, rel=1e-7, abs=1e-24)


def test_the_normal_quantile_is_the_published_one() -> None:
    assert pytest.approx(1.959963984540054, rel=1e-15) == NORMAL_QUANTILE


def test_nothing_out_of_nothing_has_no_value_and_no_interval() -> None:
    assert Proportion(0, 0).value is None
    assert Proportion(0, 0).interval is None


@pytest.mark.parametrize(("successes", "total"), [(2, 1), (-1, 3), (0, -1)])
def test_impossible_counts_are_refused(successes: int, total: int) -> None:
    with pytest.raises(InvalidInputError, match="is not a share"):
        Proportion(successes, total)


@pytest.mark.parametrize("degrees", T_TABLE)
def test_the_interval_of_a_mean_reaches_as_far_as_the_table_says(degrees: int) -> None:
    values = np.random.default_rng(degrees).normal(3, 2, degrees + 1)
    found = mean_interval(values.tolist())
    error = math.sqrt(np.sum((values - values.mean()) ** 2) / degrees / values.size)
    assert found.interval is not None
    low, high = found.interval
    assert (high - low) / 2 / error == pytest.approx(T_TABLE[degrees], abs=5e-4)
    assert (low + high) / 2 == pytest.approx(found.value)
    assert found.value == pytest.approx(values.mean())


def test_equal_values_have_an_interval_of_no_width() -> None:
    assert mean_interval([0.25, 0.25, 0.25]).interval == (0.25, 0.25)


def test_without_scipy_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(MissingPackageError, match=r"fastfedul\[evaluate\]"):
        mean_interval([1.0, 2.0])
    with pytest.raises(MissingPackageError, match=r"fastfedul\[evaluate\]"):
        _ = Proportion(1, 2).interval
    assert mean_interval([1.0]).value == 1
    assert Proportion(1, 2).value == 0.5
    assert paired_interval(1, 1, 5)[1] > 0


def test_one_value_has_a_mean_but_no_interval() -> None:
    assert mean_interval([0.25]).value == 0.25
    assert mean_interval([0.25]).interval is None


@pytest.mark.parametrize("values", [[], [1.0, NAN], [INF]])
def test_a_mean_of_nothing_or_of_no_numbers_is_refused(values: list[float]) -> None:
    with pytest.raises(InvalidInputError, match="at least one value"):
        mean_interval(values)


@pytest.mark.parametrize(
    ("lost", "gained", "total"), [(3, 1, 98), (0, 0, 5), (7, 7, 7)]
)
def test_the_paired_interval_turns_around_with_loss_and_gain(
    lost: int, gained: int, total: int
) -> None:
    low, high = paired_interval(lost, gained, total)
    assert paired_interval(gained, lost, total) == pytest.approx((-high, -low))
    assert -1 <= low < high <= 1


@pytest.mark.parametrize(("loses", "gains"), [(0.02, 0.02), (0.1, 0.03), (0.3, 0.0)])
def test_the_paired_interval_holds_the_true_difference_19_times_out_of_20(
    loses: float, gains: float
) -> None:
    draw = np.random.default_rng(2)
    held = 0
    for lost, gained, _ in draw.multinomial(
        200, [loses, gains, 1 - loses - gains], 2_000
    ):
        low, high = paired_interval(int(lost), int(gained), 200)
        held += low <= loses - gains <= high
    assert 0.93 <= held / 2_000 <= 0.985
