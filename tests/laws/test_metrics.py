"""Laws of the metrics."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fastfedul.evaluate.closeness import angle_degrees, distance, unit_angles
from fastfedul.evaluate.intervals import Proportion, mean_interval
from fastfedul.evaluate.membership import membership, per_example_loss
from fastfedul.evaluate.metrics import (
    accuracy,
    prediction_change,
    prediction_kl,
)
from fastfedul.params import Params, scale

Floats = npt.NDArray[np.float64]

law = settings(max_examples=100, deadline=None)

# Whole numbers make ties, and monotone maps keep them apart.
losses = arrays.arrays(np.float64, st.integers(1, 30), elements=st.integers(0, 12))
logits = arrays.arrays(np.float64, (5, 4), elements=st.floats(-1e4, 1e4))
vectors = arrays.arrays(
    np.float32, 6, elements=st.floats(-1e6, 1e6, width=32, allow_subnormal=False)
)

RISING: list[Callable[[Floats], Floats]] = [
    np.exp,
    np.sqrt,
    lambda x: 3 * x - 7,
    lambda x: x**3,
]


def model(vector: npt.NDArray[np.float32]) -> Params:
    return Params.of({"f.weight": vector[:4].reshape(2, 2), "f.bias": vector[4:]})


@law
@given(total=st.integers(1, 10**9), data=st.data())
def test_a_wilson_interval_lies_in_0_to_1_around_the_value(
    total: int, data: st.DataObject
) -> None:
    share = Proportion(data.draw(st.integers(0, total)), total)
    assert share.interval is not None
    assert share.value is not None
    low, high = share.interval
    assert 0 <= low <= share.value <= high <= 1
    assert low < high


@law
@given(successes=st.integers(0, 1000), failures=st.integers(1, 1000))
def test_the_interval_of_failures_mirrors_that_of_successes(
    successes: int, failures: int
) -> None:
    total = successes + failures
    one, other = Proportion(successes, total), Proportion(failures, total)
    assert one.interval is not None
    assert other.interval is not None
    assert one.interval == pytest.approx([1 - x for x in other.interval[::-1]])


@law
@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30),
    offset=st.floats(-1e3, 1e3),
)
def test_the_interval_of_a_mean_moves_with_the_values(
    values: list[float], offset: float
) -> None:
    one, other = mean_interval(values), mean_interval([v + offset for v in values])
    assert one.interval is not None
    assert other.interval is not None
    assert one.interval[0] <= one.value <= one.interval[1]
    moved = [x + offset for x in one.interval]
    assert other.interval == pytest.approx(moved, abs=1e-7)


@law
@given(members=losses, others=losses)
def test_swapping_the_sides_gives_the_opposite_area(
    members: Floats, others: Floats
) -> None:
    one, other = membership(members, others), membership(others, members)
    assert one.auc == pytest.approx(1 - other.auc, abs=1e-15)
    assert (one.auc_interval is None) == (other.auc_interval is None)
    if one.auc_interval and other.auc_interval:
        mirrored = [1 - x for x in other.auc_interval[::-1]]
        assert one.auc_interval == pytest.approx(mirrored)


@law
@given(members=losses, others=losses, data=st.data())
def test_membership_depends_on_the_order_of_the_losses_alone(
    members: Floats, others: Floats, data: st.DataObject
) -> None:
    rising = data.draw(st.sampled_from(RISING))
    found = membership(members, others)
    assert membership(rising(members), rising(others)) == found
    shuffled = data.draw(st.permutations(members.tolist()))
    again = membership(np.array(shuffled), others)
    assert (again.auc, again.tpr_at_1_fpr) == (found.auc, found.tpr_at_1_fpr)


@law
@given(members=losses, others=losses)
def test_areas_and_their_intervals_lie_in_0_to_1(
    members: Floats, others: Floats
) -> None:
    found = membership(members, others)
    assert 0 <= found.auc <= 1
    assert 0 <= found.tpr_at_1_fpr <= 1
    if found.auc_interval:
        assert 0 <= found.auc_interval[0] < found.auc < found.auc_interval[1] <= 1


@law
@given(members=losses, others=losses, copies=st.integers(1, 40))
def test_no_threshold_at_one_percent_finds_more_members(
    members: Floats, others: Floats, copies: int
) -> None:
    others = np.repeat(others, copies) + np.arange(others.size * copies) % 7
    thresholds = np.unique([*members, *others])
    found = [
        np.mean(members <= limit)
        for limit in thresholds
        if 100 * np.sum(others <= limit) <= others.size
    ]
    assert membership(members, others).tpr_at_1_fpr == max(found, default=0)


@law
@given(one=logits, other=logits)
def test_kl_is_never_negative_and_0_for_equal_predictions(
    one: Floats, other: Floats
) -> None:
    divergence = prediction_kl(one, other)
    assert divergence is not None
    assert divergence >= 0
    assert prediction_kl(one, one) == 0


@law
@given(one=logits, other=logits, offset=st.integers(-1000, 1000))
def test_an_offset_of_all_logits_changes_no_prediction(
    one: Floats, other: Floats, offset: int
) -> None:
    one, other = np.round(one), np.round(other)
    labels = np.arange(5) % 4
    assert prediction_kl(one + offset, other) == prediction_kl(one, other)
    assert prediction_change(one + offset, one) == 0
    assert accuracy(one + offset, labels) == accuracy(one, labels)
    np.testing.assert_array_equal(
        per_example_loss(one + offset, labels), per_example_loss(one, labels)
    )


@law
@given(one=logits, other=logits)
def test_predictions_change_alike_both_ways_and_by_at_most_root_2(
    one: Floats, other: Floats
) -> None:
    change = prediction_change(one, other)
    assert change == prediction_change(other, one)
    assert change is not None
    assert 0 <= change <= math.sqrt(2) * (1 + 1e-12)


@law
@given(one=vectors, other=vectors, exponent=st.integers(-20, 20))
def test_angles_are_symmetric_and_blind_to_scale(
    one: npt.NDArray[np.float32], other: npt.NDArray[np.float32], exponent: int
) -> None:
    left, right = model(one), model(other)
    angle = angle_degrees(left, right)
    assert angle == angle_degrees(right, left)
    np.testing.assert_array_equal(unit_angles(left, right), unit_angles(right, left))
    assert (angle is None) == (not one.any() or not other.any())
    if angle is not None:
        assert 0 <= angle <= 180
        # Below this the scaled values would fall among the subnormal numbers.
        if np.abs(other[other != 0]).min() > 1e-30:
            scaled = scale(right, 2.0**exponent)
            assert angle_degrees(left, scaled) == pytest.approx(angle, abs=1e-9)
            opposite = angle_degrees(left, scale(right, -1))
            assert opposite == pytest.approx(180 - angle, abs=1e-9)


@law
@given(first=vectors, second=vectors, third=vectors)
def test_distances_are_a_metric(
    first: npt.NDArray[np.float32],
    second: npt.NDArray[np.float32],
    third: npt.NDArray[np.float32],
) -> None:
    one, two, three = model(first), model(second), model(third)
    assert distance(one, one) == 0
    assert distance(one, two) == distance(two, one)
    detour = distance(one, three) + distance(three, two)
    assert distance(one, two) <= detour * (1 + 1e-12)
