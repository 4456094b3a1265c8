"""Membership inference by hand, and against scikit-learn."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats  # type: ignore[import-untyped]
from sklearn.metrics import log_loss, roc_auc_score, roc_curve

from fastfedul.errors import InvalidInputError
from fastfedul.evaluate.membership import Membership, membership, per_example_loss

Floats = npt.NDArray[np.float64]

NAN, INF = math.nan, math.inf


def random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_losses_are_those_of_scikit_learn() -> None:
    logits, labels = random(1).normal(0, 3, (40, 5)), random(2).integers(0, 5, 40)
    probabilities = np.exp(logits) / np.exp(logits).sum(1)[:, None]
    expected = log_loss(labels, probabilities, labels=range(5))
    losses = per_example_loss(logits, labels)
    assert losses.mean() == pytest.approx(expected, rel=1e-12)
    assert losses[3] == pytest.approx(-math.log(probabilities[3, labels[3]]))


def test_a_certain_prediction_keeps_its_tiny_loss() -> None:
    losses = per_example_loss(
        np.array([[50.0, 0], [60, 0], [9e9, 0]]), np.zeros(3, int)
    )
    np.testing.assert_allclose(losses[:2], np.exp([-50.0, -60.0]), rtol=1e-12)
    assert str(losses[2]) == "0.0"


@pytest.mark.parametrize("digits", [1, 12])
def test_auc_is_that_of_scikit_learn_with_and_without_ties(digits: int) -> None:
    members = random(3).exponential(0.7, 150).round(digits)
    others = random(4).exponential(1.0, 230).round(digits)
    truth = np.repeat([1, 0], [150, 230])
    scores = -np.concatenate([members, others])
    found = membership(members, others)
    assert found.auc == pytest.approx(roc_auc_score(truth, scores), rel=1e-12)
    false, true, _ = roc_curve(truth, scores, drop_intermediate=False)
    assert found.tpr_at_1_fpr == pytest.approx(true[false <= 0.01].max())
    assert (found.num_members, found.num_nonmembers) == (150, 230)


def test_true_positives_at_one_percent_by_hand() -> None:
    others = np.arange(1.0, 201)
    assert membership(np.array([0.5, 1, 2, 2.9]), others).tpr_at_1_fpr == 1
    assert membership(np.array([0.5, 2.5, 3, 9]), others).tpr_at_1_fpr == 0.5
    few = others[:99]
    assert membership(np.array([0.5, 1, 2]), few).tpr_at_1_fpr == pytest.approx(1 / 3)


def test_equal_losses_tell_nothing() -> None:
    found = membership(np.zeros(10), np.zeros(300))
    assert found == Membership(0.5, 0.0, 10, 300, None)
    assert membership(np.full(3, INF), np.full(4, INF)).auc == 0.5


def test_perfect_separation_has_no_interval() -> None:
    found = membership(np.array([0.1, 0.2]), np.array([0.3, 0.4]))
    assert found == Membership(1.0, 1.0, 2, 2, None)
    assert membership(np.array([0.3]), np.array([0.2, 0.4])).auc_interval is None


def test_the_variance_is_that_of_delong_pair_by_pair() -> None:
    members, others = random(5).integers(0, 9, 12), random(6).integers(1, 9, 17)
    wins = (members[:, None] < others) + 0.5 * (members[:, None] == others)
    auc = wins.mean()
    rows, columns = wins.mean(axis=1), wins.mean(axis=0)
    variance = rows.var(ddof=1) / len(rows) + columns.var(ddof=1) / len(columns)
    half = stats.norm.ppf(0.975) * math.sqrt(variance) / (auc * (1 - auc))
    odds = math.log(auc / (1 - auc))
    expected = [1 / (1 + math.exp(-x)) for x in (odds - half, odds + half)]
    found = membership(members, others)
    assert found.auc == pytest.approx(auc)
    assert found.auc_interval == pytest.approx(expected)


@pytest.mark.parametrize(("shift", "spread"), [(0.0, 1.0), (1.0, 1.0), (0.3, 3.0)])
def test_the_interval_of_the_area_covers_it_95_times_in_100(
    shift: float, spread: float
) -> None:
    true = stats.norm.cdf(shift / math.hypot(1, spread))
    draw = random(7)
    hits, runs = 0, 1000
    for _ in range(runs):
        found = membership(draw.normal(0, 1, 60), draw.normal(shift, spread, 80))
        assert found.auc_interval is not None
        low, high = found.auc_interval
        hits += low <= true <= high
    assert 0.93 < hits / runs < 0.97


@pytest.mark.parametrize("losses", [np.array([]), np.array([NAN]), np.zeros((1, 1))])
def test_membership_of_nobody_is_refused(losses: Floats) -> None:
    for sides in ((losses, np.ones(2)), (np.ones(2), losses)):
        with pytest.raises(InvalidInputError, match="at least one loss of"):
            membership(*sides)


def test_areas_of_all_small_cases_are_counts_of_pairs() -> None:
    levels = (0.0, 1.0, 2.0)
    for members in itertools.product(levels, repeat=2):
        for others in itertools.product(levels, repeat=3):
            pairs = list(itertools.product(members, others))
            wins = sum((a < b) + 0.5 * (a == b) for a, b in pairs)
            assert membership(np.array(members), np.array(others)).auc == wins / 6
