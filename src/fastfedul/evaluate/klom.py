"""KLOM: how far the margins of forgotten models are from those of retrained ones.

K. Georgiev et al., "Attribute-to-delete: machine unlearning via datamodel matching",
ICLR 2025. They bin the margins of a hundred models; with the few dozen models of an
audit most bins stay empty, so two normal distributions are fitted here instead.
"""

from __future__ import annotations

import numpy as np

from fastfedul.errors import InvalidInputError
from fastfedul.evaluate.metrics import Floats
from fastfedul.params import Array

QUANTILES = (0.5, 0.9, 0.95)

_LEAST_SPREAD = 1e-6
"""Variance of margins below which their spread is rounding."""


def klom(margins: Array, reference: Array) -> Floats:
    """Return the KL divergence of each example's margins from the reference's, in nats.

    With N models on either side the divergence is above 0 even where the models come
    from one distribution; compare it with that of two sets of retrained models.

    Args:
        margins: Margins of forgotten models: a row per model, a column per example.
        reference: Margins of retrained models, of the same shape.

    Raises:
        InvalidInputError: If shapes differ or there are fewer than two models.

    >>> klom(np.array([[0.0], [2.0]]), np.array([[1.0], [3.0]]))
    array([0.25])
    """
    one, other = np.asarray(margins, np.float64), np.asarray(reference, np.float64)
    if one.shape != other.shape or one.ndim != 2 or len(one) < 2:
        raise InvalidInputError(
            f"margins of shapes {one.shape} and {other.shape}; give the same number of "
            "models on either side, two or more"
        )
    spread, spread_there = (
        np.maximum(side.var(axis=0, ddof=1), _LEAST_SPREAD) for side in (one, other)
    )
    apart = np.square(one.mean(axis=0) - other.mean(axis=0))
    ratio = spread / spread_there
    found: Floats = 0.5 * (ratio - 1 - np.log(ratio) + apart / spread_there)
    # Rounding can bring the divergence of almost equal sides just below 0.
    return np.maximum(found, 0.0)


def klom_quantiles(divergences: Array) -> dict[str, float]:
    """Return quantiles of divergences over examples, by name.

    >>> klom_quantiles(np.array([1.0, 1.0]))
    {'50 %': 1.0, '90 %': 1.0, '95 %': 1.0}
    """
    values = np.quantile(np.asarray(divergences, np.float64), QUANTILES)
    return {
        f"{100 * share:g} %": float(value)
        for share, value in zip(QUANTILES, values, strict=True)
    }
