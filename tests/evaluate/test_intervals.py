"""Shares and means with their intervals, against SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats  # type: ignore[import-untyped]

from fastfedul.errors import InvalidInputError
from fastfedul.evaluate.intervals import Proportion, mean_interval, t_quantile

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
