"""KLOM and margins: by hand, and against numerical integration."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, stats  # type: ignore[import-untyped]

from fastfedul.errors import InvalidInputError
from fastfedul.evaluate.klom import klom, klom_quantiles
from fastfedul.evaluate.metrics import MOST_MARGIN, margins


def test_klom_is_the_divergence_of_two_normal_distributions() -> None:
    rng = np.random.default_rng(1)
    one, other = rng.normal(1, 2, (6, 3)), rng.normal(0, 1, (6, 3))
    for example, found in enumerate(klom(one, other)):
        p, q = (
            stats.norm(side[:, example].mean(), side[:, example].std(ddof=1))
            for side in (one, other)
        )

        def term(x: float, p: stats.norm = p, q: stats.norm = q) -> float:
            return float(p.pdf(x) * (p.logpdf(x) - q.logpdf(x)))

        assert found == pytest.approx(integrate.quad(term, -30, 30)[0], rel=1e-6)


def test_klom_is_0_for_equal_sides_finite_for_constant_ones_and_has_a_direction() -> (
    None
):
    one = np.array([[0.0, 1.0], [2.0, 1.0]])
    assert klom(one, one).tolist() == [0.0, 0.0]
    other = np.array([[0.0, 2.0], [8.0, 2.0]])
    there, back = klom(one, other), klom(other, one)
    assert there[0] < back[0]
    assert np.isfinite([there, back]).all()
    assert there[1] > 1000


def test_klom_does_not_change_with_scale_and_shift() -> None:
    rng = np.random.default_rng(2)
    one, other = rng.normal(size=(5, 4)), rng.normal(size=(5, 4))
    assert klom(3 * one - 7, 3 * other - 7) == pytest.approx(klom(one, other))


def test_klom_of_one_distribution_shrinks_with_more_models() -> None:
    rng = np.random.default_rng(3)
    few, many = (
        np.median(klom(*rng.normal(size=(2, count, 500)))) for count in (4, 32)
    )
    assert 0 < many < few


@pytest.mark.parametrize("shape", [(1, 3), (4, 2), (4,)])
def test_klom_needs_the_same_models_on_either_side(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInputError, match="same number of models"):
        klom(np.ones(shape), np.ones((1, 3) if shape == (1, 3) else (4, 3)))


def test_quantiles_are_over_examples() -> None:
    assert klom_quantiles(np.arange(101.0)) == {"50 %": 50, "90 %": 90, "95 %": 95}


def test_margins_are_log_odds() -> None:
    logits = np.random.default_rng(4).normal(0, 3, (20, 5))
    labels = np.random.default_rng(5).integers(0, 5, 20)
    chances = np.exp(logits) / np.exp(logits).sum(1)[:, None]
    own = chances[np.arange(20), labels]
    np.testing.assert_allclose(margins(logits, labels), np.log(own / (1 - own)))


def test_margins_stay_within_limits_whatever_a_model_says() -> None:
    inf, nan = math.inf, math.nan
    logits = np.array(
        [[900.0, 0], [0, 900.0], [nan, 0], [inf, 0], [0, -inf], [-inf, 0]]
    )
    found = margins(logits, np.zeros(6, int))
    most = MOST_MARGIN
    assert found.tolist() == [most, -most, -most, -most, most, -most]
    assert margins(np.array([[3.0]]), np.array([0])).tolist() == [most]
