"""Numbers with their 95 % intervals: a share of counts, a mean over seeds.

E. B. Wilson, "Probable inference, the law of succession, and statistical inference",
JASA 1927, for shares; Student's t for means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastfedul.errors import InvalidInputError

Interval = tuple[float, float]

NORMAL_QUANTILE = 1.959963984540054
# The 97.5 % quantiles of Student's t for 1 to 20 degrees of freedom.
_T_QUANTILES = (
    *(12.706204736175, 4.302652729750, 3.182446305284, 2.776445105198, 2.570581835636),
    *(2.446911851145, 2.364624251593, 2.306004135204, 2.262157162798, 2.228138851986),
    *(2.200985160092, 2.178812829667, 2.160368656463, 2.144786687918, 2.131449545560),
    *(2.119905299221, 2.109815577833, 2.100922040241, 2.093024054408, 2.085963447266),
)


@dataclass(frozen=True, slots=True)
class Proportion:
    """A share of counted things; out of none at all there is no share.

    Attributes:
        successes: How many of them.
        total: Out of how many; 0 is allowed and gives no value and no interval.
    """

    successes: int
    total: int

    def __post_init__(self) -> None:
        if not 0 <= self.successes <= self.total:
            raise InvalidInputError(
                f"{self.successes} of {self.total} is not a share; successes lie "
                "between 0 and the total"
            )

    @property
    def value(self) -> float | None:
        """The share, from 0 to 1; None out of 0.

        >>> Proportion(3, 4).value
        0.75
        """
        return self.successes / self.total if self.total else None

    @property
    def interval(self) -> Interval | None:
        """The 95 % Wilson interval, inside 0 to 1 and around the value; None out of 0.

        >>> low, high = Proportion(9, 10).interval
        >>> print(f"{low:.4f} to {high:.4f}")
        0.5958 to 0.9821
        """
        value = self.value
        if value is None:
            return None
        pull = NORMAL_QUANTILE**2 / self.total
        center = (value + pull / 2) / (1 + pull)
        variance = (value * (1 - value) + pull / 4) / self.total
        half = NORMAL_QUANTILE * math.sqrt(variance) / (1 + pull)
        low = center - half if self.successes > 0 else 0.0
        high = center + half if self.successes < self.total else 1.0
        return max(0.0, min(low, value)), min(1.0, max(high, value))


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over repetitions, such as seeds.

    Attributes:
        value: The mean.
        interval: 95 % interval by Student's t; None for a single value.
        num_values: How many values it is the mean of.
    """

    value: float
    interval: Interval | None
    num_values: int


def paired_interval(lost: int, gained: int, total: int) -> tuple[float, float]:
    """Return the 95 % interval of the share lost, both models on the same images.

    Agresti and Min: "Simple improved confidence intervals for comparing matched
    proportions", Statistics in Medicine 2005: half an image is added to each of the
    four outcomes, so that no change on few images is not taken for certainty.

    >>> tuple(round(end, 4) for end in paired_interval(3, 1, 98))
    (-0.0237, 0.0637)
    """
    lost_, gained_, total_ = lost + 0.5, gained + 0.5, total + 2.0
    middle = (lost_ - gained_) / total_
    spread = (lost_ + gained_) - (lost_ - gained_) ** 2 / total_
    reach = NORMAL_QUANTILE * math.sqrt(spread) / total_
    return max(-1.0, middle - reach), min(1.0, middle + reach)


def t_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t, correct to a relative 1e-7.

    Up to 20 degrees of freedom from a table, beyond by the Cornish-Fisher expansion
    (Abramowitz and Stegun 26.7.5).

    Args:
        degrees: Degrees of freedom, at least 1.

    >>> print(f"{t_quantile(4):.4f} {t_quantile(100):.4f}")
    2.7764 1.9840
    """
    if degrees < 1:
        raise InvalidInputError(f"degrees of freedom start at 1, not {degrees}")
    if degrees <= len(_T_QUANTILES):
        return _T_QUANTILES[degrees - 1]
    z = NORMAL_QUANTILE
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(
        term / float(degrees) ** power for power, term in enumerate(terms, 1)
    )


def mean_interval(values: Sequence[float]) -> Mean:
    """Return the mean with its 95 % t interval; one value has no interval.

    Raises:
        InvalidInputError: If there is no value or one is not finite.

    >>> mean_interval([0.5])
    Mean(value=0.5, interval=None, num_values=1)
    """
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all():
        raise InvalidInputError("a mean needs at least one value, all of them finite")
    value = float(array.mean())
    if array.size == 1:
        return Mean(value, None, 1)
    error = float(array.std(ddof=1)) / math.sqrt(array.size)
    half = t_quantile(array.size - 1) * error
    return Mean(value, (value - half, value + half), array.size)
