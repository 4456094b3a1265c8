"""U-LiRA: can a forgotten client's example be told from one that was never there?

J. Hayes et al., "Inexact unlearning needs more careful evaluations to avoid a false
sense of privacy", SaTML 2025, for the attack on unlearned models; N. Carlini et al.,
"Membership inference attacks from first principles", S&P 2022, for the likelihood ratio
of each example.

Shadow federations come in pairs: each example is in one of the two and out of the
other. A pair is scored by distributions that the other pairs give, so its two scores of
an example are exchangeable where membership leaves no trace. Then the attack is at
chance and finds as many members as non-members, whatever the number of pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastfedul.errors import InvalidInputError
from fastfedul.evaluate.intervals import Interval
from fastfedul.evaluate.membership import found_at, separation
from fastfedul.evaluate.metrics import Floats
from fastfedul.params import Array
from fastfedul.rng import stream

LEAST_SHADOWS = 8
"""Shadow federations below which nothing is scored: three pairs judge a fourth."""

ENOUGH_SHADOWS = 16
"""Shadow federations below which intervals over pairs say little."""

_OWN_SPREAD = 64
"""Shadow federations from which on each example has a spread of its own.

With fewer, Carlini et al. found one spread for all examples better.
"""

_LEAST_ALARMS = 5
"""False alarms below which a rate is not known within a factor of about two."""

_LEAST_SPREAD = 1e-6
"""Variance of margins below which their spread is rounding."""

_RESAMPLES = 400

RATES = {"1 %": 100, "0.1 %": 1000}
"""False positive rates: their names, and of how many non-members one is taken."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Measured:
    """A number with its interval, and its distance from the reference.

    Attributes:
        value: The number.
        interval: 95 % interval over the pairs of shadow federations.
        more: The number minus the reference's.
        more_interval: 95 % interval of it, over the same pairs.
    """

    value: float
    interval: Interval
    more: float
    more_interval: Interval

    @property
    def differs(self) -> bool:
        """Whether the whole interval of the distance lies on one side of 0."""
        low, high = self.more_interval
        return low > 0 or high < 0


@dataclass(frozen=True, slots=True)
class Attacked:
    """How well the attack tells members from non-members.

    Attributes:
        auc: Chance that a member has the higher score; 0.5 is guessing.
        found: Share of members found, by the name of the false positive rate; None
            where there are too few non-members for the rate.
        num_members: Scores of members; as many of non-members.
        num_shadows: Shadow federations.
    """

    auc: Measured
    found: Mapping[str, Measured | None]
    num_members: int
    num_shadows: int


def lira_scores(margins: Array, members: Mask) -> tuple[Floats, Floats]:
    """Return the scores of members and of non-members: a row per pair of shadows.

    A score is the log likelihood ratio of the margin: as of a member over as of a
    non-member, under normal distributions fitted to the margins of all other pairs.

    Args:
        margins: Log odds of the label: a row per shadow, a column per example.
        members: Whether the example was in the shadow. Rows 0 and 1 are a pair, 2 and
            3, and so on: what is in the one is out of the other.

    Raises:
        InvalidInputError: If there are too few shadows or rows are not in pairs.
    """
    values, masks = np.asarray(margins, np.float64), np.asarray(members, bool)
    count = len(values)
    if values.ndim != 2 or values.shape != masks.shape or not values.size:
        raise InvalidInputError(
            f"margins of shape {values.shape} and members of shape {masks.shape} do "
            "not fit; give a row per shadow and a column per example"
        )
    if count < LEAST_SHADOWS or count % 2:
        raise InvalidInputError(
            f"{count} shadow federations; the attack needs {LEAST_SHADOWS} or more, in "
            "pairs"
        )
    if (masks[::2] == masks[1::2]).any() or not np.isfinite(values).all():
        raise InvalidInputError(
            "shadow federations come in pairs of opposite members, with finite margins"
        )
    inside = np.where(masks[::2], values[::2], values[1::2])
    outside = np.where(masks[::2], values[1::2], values[::2])
    (in_mean, in_spread), (out_mean, out_spread) = (
        _fits_without_each(side, own=count >= _OWN_SPREAD) for side in (inside, outside)
    )

    def ratio(margin: Floats) -> Floats:
        as_member = np.square(margin - in_mean) / in_spread + np.log(in_spread)
        as_other = np.square(margin - out_mean) / out_spread + np.log(out_spread)
        found: Floats = 0.5 * (as_other - as_member)
        return found

    return ratio(inside), ratio(outside)


def attack_rates(
    scores: Mapping[str, tuple[Floats, Floats]], reference: str
) -> dict[str, Attacked]:
    """Return by name how well scores find members, beside a reference such as chance.

    All scores come from the same pairs, so distances are taken pair by pair.

    Args:
        scores: Scores of members and of non-members by name, from `lira_scores`.
        reference: The name with which the others are compared.
    """
    pairs = len(scores[reference][0])
    rng = stream(0, "resampled pairs of shadows")
    draws = rng.integers(0, pairs, (_RESAMPLES, pairs))
    values = {name: _rates(*own) for name, own in scores.items()}
    drawn = {
        name: np.array([_rates(inside[draw], outside[draw]) for draw in draws])
        for name, (inside, outside) in scores.items()
    }
    found = {}
    for name, (inside, _) in scores.items():
        rows = [
            Measured(
                float(values[name][at]),
                _middle(drawn[name][:, at]),
                float(values[name][at] - values[reference][at]),
                _middle(drawn[name][:, at] - drawn[reference][:, at]),
            )
            for at in range(1 + len(RATES))
        ]
        told = {
            rate: row if inside.size // one_in >= _LEAST_ALARMS else None
            for (rate, one_in), row in zip(RATES.items(), rows[1:], strict=True)
        }
        found[name] = Attacked(rows[0], told, inside.size, 2 * pairs)
    return found


def _rates(inside: Floats, outside: Floats) -> Floats:
    """Return the area and the shares of members found at each rate."""
    # A high score means member; the functions on losses take a low one for it.
    members, others = -inside.ravel(), -outside.ravel()
    at = [found_at(members, others, one_in) for one_in in RATES.values()]
    return np.array([separation(members, others), *at])


def _middle(values: Floats) -> Interval:
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def _fits_without_each(side: Floats, *, own: bool) -> tuple[Floats, Floats]:
    """Return mean and variance of each column over all rows but one, for each row."""
    left = len(side) - 1
    centre = side.mean(axis=0)
    moved = side - centre
    mean = -moved / left
    squares = np.square(moved).sum(axis=0) - np.square(moved)
    variance = np.maximum(squares - left * np.square(mean), 0.0) / (left - 1)
    if not own:
        variance = np.broadcast_to(variance.mean(axis=1, keepdims=True), side.shape)
    return centre + mean, np.maximum(variance, _LEAST_SPREAD)
