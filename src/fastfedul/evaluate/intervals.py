"""Numbers with their 95 % intervals: a share of counts, a mean over seeds.

SciPy computes the intervals of shares (E. B. Wilson, "Probable inference, the law of
succession, and statistical inference", JASA 1927) and of means (Student's t). It is
imported when an interval is asked for, since a server that forgets has no use for it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastfedul.errors import InvalidInputError, require_extra

Interval = tuple[float, float]

_CONFIDENCE = 0.95
_UPPER_TAIL = (1 + _CONFIDENCE) / 2
NORMAL_QUANTILE = statistics.NormalDist().inv_cdf(_UPPER_TAIL)
"""Standard deviations of a normal distribution that a 95 % interval reaches."""


@dataclass(frozen=True, slots=True)
class Proportion:
    """A share of counted things; of 0 things there is no share.

    Attributes:
        successes: Number of successes.
        total: Number of things; 0 gives no value and no interval.
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

        Raises:
            InvalidInputError: If SciPy is not installed.

        >>> low, high = Proportion(9, 10).interval
        >>> print(f"{low:.4f} to {high:.4f}")
        0.5958 to 0.9821
        """
        if not self.total:
            return None
        test = _import_stats().binomtest(self.successes, self.total)
        found = test.proportion_ci(_CONFIDENCE, method="wilson")
        return float(found.low), float(found.high)


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


def paired_interval(lost: int, gained: int, total: int) -> Interval:
    """Return the 95 % interval of the share lost, both models on the same images.

    Agresti and Min: "Simple improved confidence intervals for comparing matched
    proportions", Statistics in Medicine 2005. The formula adds half an image to each
    of the four outcomes, so that few images without a change are no certainty. SciPy
    does not have this interval.

    >>> tuple(round(end, 4) for end in paired_interval(3, 1, 98))
    (-0.0237, 0.0637)
    """
    lost_, gained_, total_ = lost + 0.5, gained + 0.5, total + 2.0
    middle = (lost_ - gained_) / total_
    spread = (lost_ + gained_) - (lost_ - gained_) ** 2 / total_
    reach = NORMAL_QUANTILE * math.sqrt(spread) / total_
    return max(-1.0, middle - reach), min(1.0, middle + reach)


def mean_interval(values: Sequence[float]) -> Mean:
    """Return the mean with its 95 % t interval; one value has no interval.

    Raises:
        InvalidInputError: If there is no value, one is not finite, or there are several
            and SciPy is not installed.

    >>> mean_interval([0.5])
    Mean(value=0.5, interval=None, num_values=1)
    """
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all():
        raise InvalidInputError("a mean needs at least one value, all of them finite")
    value = float(array.mean())
    if array.size == 1:
        return Mean(value, None, 1)
    stats = _import_stats()
    # `stats.t.interval` has no answer for values that are all equal.
    half = float(stats.t.ppf(_UPPER_TAIL, array.size - 1) * stats.sem(array))
    return Mean(value, (value - half, value + half), array.size)


def _import_stats() -> Any:
    with require_extra("evaluate", "intervals need SciPy"):
        from scipy import stats  # type: ignore[import-untyped]
    return stats
