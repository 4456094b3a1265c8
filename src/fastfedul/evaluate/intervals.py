"""Numbers with their 95 % intervals: a share of counts, a mean over seeds.

SciPy computes the intervals of shares (E. B. Wilson, "Probable inference, the law of
succession, and statistical inference", JASA 1927) and of means (Student's t). The
first interval imports SciPy, because a server that forgets does not need it.
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
    """A share of counted cases.

    Attributes:
        successes: Number of successes.
        total: Number of cases; without a case there is no value and no interval.
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
        """The share, from 0 to 1; None without a case.

        >>> Proportion(3, 4).value
        0.75
        """
        return self.successes / self.total if self.total else None

    @property
    def interval(self) -> Interval | None:
        """The 95 % Wilson interval, inside 0 to 1; None without a case.

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
    """

    value: float
    interval: Interval | None


def paired_interval(lost: int, gained: int, total: int) -> Interval:
    """Return the 95 % interval of the accuracy lost between models on the same images.

    Agresti and Min: "Simple improved confidence intervals for comparing matched
    proportions", Statistics in Medicine 2005. The formula adds half an image to each of
    the four outcomes, so a few unchanged images give no certainty. SciPy does not have
    this interval.

    Args:
        lost: Images that only the first model gets right.
        gained: Images that only the second model gets right.
        total: Number of images.

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
        InvalidInputError: If there is no value, a value is not finite, or there are
            several values and SciPy is not installed.

    >>> mean_interval([0.5])
    Mean(value=0.5, interval=None)
    """
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all():
        raise InvalidInputError("a mean needs at least one value, all of them finite")
    value = float(array.mean())
    if array.size == 1:
        return Mean(value, None)
    stats = _import_stats()
    # `stats.t.interval` has no answer for values that are all equal.
    half = float(stats.t.ppf(_UPPER_TAIL, array.size - 1) * stats.sem(array))
    return Mean(value, (value - half, value + half))


def _import_stats() -> Any:
    with require_extra("evaluate", "intervals need SciPy"):
        from scipy import stats  # type: ignore[import-untyped]
    return stats
