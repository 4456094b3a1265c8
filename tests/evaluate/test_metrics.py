"""Predictions by hand, and against SciPy."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats  # type: ignore[import-untyped]

from fastfedul.errors import InvalidInputError
from fastfedul.evaluate.intervals import Proportion
from fastfedul.evaluate.membership import membership, per_example_loss
from fastfedul.evaluate.metrics import (
    accuracy,
    prediction_change,
    prediction_kl,
)

Floats = npt.NDArray[np.float64]

NAN, INF = math.nan, math.inf


def random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_accuracy_counts_right_answers() -> None:
    logits = np.array([[3, 1, 0], [0, 1, 5], [9, 9, 1], [0, 2, 1]], np.float32)
    assert accuracy(logits, np.array([0, 1, 0, 1], np.uint8)) == Proportion(3, 4)
    assert accuracy(np.empty((0, 3)), np.array([])) == Proportion(0, 0)


@pytest.mark.parametrize(
    "row", [[NAN, 1, 2], [1, 2, NAN], [INF, 0, 0], [-INF, -INF, -INF]]
)
def test_a_diverged_model_predicts_nothing(row: list[float]) -> None:
    logits = np.array([row])
    for label in range(3):
        assert accuracy(logits, np.array([label])) == Proportion(0, 1)
        assert per_example_loss(logits, np.array([label])) == INF
    assert prediction_kl(np.zeros((1, 3)), logits) is None
    assert prediction_change(np.zeros((1, 3)), logits) is None


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.array([0, 3]), "only the classes 0 to 2"),
        (np.array([-1, 0]), "from -1 to 0"),
        (np.array([0]), "2 whole numbers"),
        (np.array([[0], [1]]), "2 whole numbers"),
        (np.array([0.0, 1.0]), "2 whole numbers, not float64"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels: Floats, message: str) -> None:
    for function in (accuracy, per_example_loss):
        with pytest.raises(InvalidInputError, match=message):
            function(np.zeros((2, 3)), labels)


def test_logits_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="one row per image"):
        accuracy(np.zeros(3), np.zeros(3, int))
    with pytest.raises(InvalidInputError, match="shapes"):
        prediction_kl(np.zeros((2, 3)), np.zeros((3, 3)))


def test_kl_is_the_entropy_of_scipy() -> None:
    reference, other = random(0).normal(0, 4, (2, 50, 7))
    probabilities = [np.exp(x) / np.exp(x).sum(1)[:, None] for x in (reference, other)]
    expected = stats.entropy(*probabilities, axis=1).mean()
    assert prediction_kl(reference, other) == pytest.approx(expected, rel=1e-12)


def test_kl_by_hand_and_its_direction() -> None:
    even, skewed = np.log([[0.5, 0.5]]), np.log([[0.75, 0.25]])
    forward = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    backward = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert prediction_kl(even, skewed) == pytest.approx(forward)
    assert prediction_kl(skewed, even) == pytest.approx(backward)


def test_kl_of_huge_and_of_ruled_out_logits() -> None:
    huge = np.array([[1e4, -1e4]])
    assert prediction_kl(huge, huge) == 0
    assert prediction_kl(huge, -huge) == pytest.approx(2e4)
    ruled_out = np.array([[0.0, -INF]])
    assert prediction_kl(ruled_out, np.zeros((1, 2))) == pytest.approx(math.log(2))
    assert prediction_kl(np.zeros((1, 2)), ruled_out) == INF
    widest = np.array([[1.7e308, -1.7e308]])
    assert prediction_kl(widest, widest) == 0
    assert prediction_kl(np.empty((0, 2)), np.empty((0, 2))) is None


def test_prediction_change_by_hand() -> None:
    before = np.array([[1000.0, 0.0], [0.0, 0.0]])
    after = np.array([[0.0, 1000.0], [0.0, 0.0]])
    assert prediction_change(before, after) == pytest.approx(math.sqrt(2) / 2)


def test_metrics_leave_what_they_are_given_alone() -> None:
    logits = random(10).normal(size=(6, 3))
    labels = np.arange(6) % 3
    losses = np.array([3.0, 1.0, 2.0])
    given = [a.copy() for a in (logits, labels, losses)]
    prediction_kl(logits, logits)
    prediction_change(logits, logits)
    per_example_loss(logits, labels)
    membership(losses, losses)
    for before, after in zip(given, (logits, labels, losses), strict=True):
        np.testing.assert_array_equal(before, after)
