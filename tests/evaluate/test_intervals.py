"""Shares and means with their intervals, against SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats  # type: ignore[import-untyped]

from fastfedul.errors import InvalidInputError
from fastfedul.evaluate.intervals import (
    Proportion,
    mean_interval,
    paired_interval,
    t_quantile,
)

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("total", [1, 2, 7, 100, 5000])
def test_wilson_intervals_are_those_of_scipy(total: int) -> None:
    for successes in {0, 1, total // 3, total - 1, total}:
        expected = stats.binomtest(successes, total).proportion_ci(method="wilson")
        found = Proportion(successes, total).interval
        assert found == pytest.approx((expected.low, expected.high), abs=1e-14)


def test_nothing_out_of_nothing_has_no_value_and_no_interval() -> None:
    assert Proportion(0, 0).value is None
    assert Proportion(0, 0).interval is None


@pytest.mark.parametrize(("successes", "total"), [(2, 1), (-1, 3), (0, -1)])
def test_impossible_counts_are_refused(successes: int, total: int) -> None:
    with pytest.raises(InvalidInputError, match="is not a share"):
        Proportion(successes, total)


def test_t_quantiles_are_those_of_scipy_to_seven_digits() -> None:
    degrees = [*range(1, 200), 1000, 10**6, 10**9]
    expected = stats.t.ppf(0.975, degrees)
    np.testing.assert_allclose([t_quantile(d) for d in degrees], expected, rtol=1e-7)
    with pytest.raises(InvalidInputError, match="start at 1"):
        t_quantile(0)


def test_the_interval_of_a_mean_is_that_of_scipy() -> None:
    values = [0.91, 0.93, 0.90, 0.95, 0.92]
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    found = mean_interval(values)
    assert found.value == pytest.approx(0.922)
    assert found.interval == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert found.num_values == 5


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
