"""Membership inference by loss: can one tell which images a model was trained on?

S. Yeom et al., "Privacy risk in machine learning", CSF 2018, for the attack by a
threshold on the loss; N. Carlini et al., "Membership inference attacks from first
principles", S&P 2022, for judging it at a low false positive rate; E. DeLong et al.,
"Comparing the areas under two or more correlated receiver operating characteristic
curves", Biometrics 1988, for the variance of the area.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastfedul.errors import InvalidInputError
from fastfedul.evaluate.intervals import NORMAL_QUANTILE, Interval
from fastfedul.evaluate.metrics import (
    Floats,
    checked_labels,
    checked_logits,
    log_softmax,
    predicts,
)
from fastfedul.params import Array


@dataclass(frozen=True, slots=True)
class Membership:
    """How well the loss tells members from non-members.

    Attributes:
        auc: Chance that a member has a lower loss than a non-member; equal losses
            count half. 0.5 is guessing. The aim is the retrained model's value.
        tpr_at_1_fpr: Share of members that the attack finds when it takes at most 1 %
            of the non-members for members; with fewer than 100 non-members, none.
        num_members: Number of images of the members.
        num_nonmembers: Number of images of the non-members.
        auc_interval: 95 % interval of the area; None if it cannot be estimated.
    """

    auc: float
    tpr_at_1_fpr: float
    num_members: int
    num_nonmembers: int
    auc_interval: Interval | None


def per_example_loss(logits: Array, labels: Array) -> Floats:
    """Return the cross-entropy of each image, in nats.

    Infinite where the model rules the label out, or predicts nothing.

    >>> per_example_loss(np.zeros((1, 2)), np.array([1])).round(4)
    array([0.6931])
    """
    scores = checked_logits(logits)
    column = checked_labels(labels, scores)[:, None]
    losses = -np.take_along_axis(log_softmax(scores), column, axis=1)[:, 0]
    losses[~predicts(scores)] = np.inf
    # A loss of 0 must not come out as -0.0.
    return np.abs(losses)


def membership(member_losses: Array, nonmember_losses: Array) -> Membership:
    """Return how well a threshold on the loss finds the members.

    Args:
        member_losses: Losses of images in the training; a lower loss means member.
        nonmember_losses: Losses of comparable images that were not in the training.

    Raises:
        InvalidInputError: If there are no losses on one side, or one is NaN.

    >>> membership(np.array([0.1, 0.3]), np.array([0.2, 0.4])).auc
    0.75
    """
    members = _checked_losses(member_losses, "members")
    nonmembers = _checked_losses(nonmember_losses, "non-members")
    wins = _doubled_wins(members, nonmembers)
    auc = separation(members, nonmembers)
    above = wins / (2 * nonmembers.size)
    below = 1 - _doubled_wins(nonmembers, members) / (2 * members.size)
    return Membership(
        auc=auc,
        tpr_at_1_fpr=found_at(members, nonmembers, 100),
        num_members=members.size,
        num_nonmembers=nonmembers.size,
        auc_interval=_auc_interval(auc, above, below),
    )


def separation(members: Floats, nonmembers: Floats) -> float:
    """Return the chance that a member has the lower loss; equal losses count half."""
    wins = int(_doubled_wins(members, nonmembers).sum())
    return wins / (2 * members.size * nonmembers.size)


def found_at(members: Floats, nonmembers: Floats, one_in: int) -> float:
    """Return the share of members found if one non-member in so many is taken for one.

    The n // one_in lowest of n non-members may lie below the threshold. A member that
    ties with the next non-member does not count, because no threshold separates the
    two.

    >>> found_at(np.array([0.1, 0.3]), np.array([0.2, 0.4]), 100)
    0.5
    """
    place = nonmembers.size // one_in
    limit = np.partition(nonmembers, place)[place]
    return float((members < limit).mean())


def _doubled_wins(losses: Floats, others: Floats) -> npt.NDArray[np.int64]:
    """Return for each loss twice the number of others above it, ties counted half."""
    ordered = np.sort(others)
    not_above = np.searchsorted(ordered, losses, side="right")
    below = np.searchsorted(ordered, losses, side="left")
    return 2 * others.size - not_above - below


def _auc_interval(auc: float, above: Floats, below: Floats) -> Interval | None:
    """Return DeLong's 95 % interval on the scale of log odds, which keeps it in 0 to 1.

    None with fewer than two images on a side, and when the variance is estimated as 0:
    perfect separation or losses that are all equal say nothing about the spread.

    Args:
        auc: The area.
        above: For each member the share of non-members with a higher loss.
        below: For each non-member the share of members with a lower loss.
    """
    if min(above.size, below.size) < 2:
        return None
    variance = above.var(ddof=1) / above.size + below.var(ddof=1) / below.size
    if variance <= 0 or not 0 < auc < 1:
        return None
    odds = math.log(auc / (1 - auc))
    half = NORMAL_QUANTILE * math.sqrt(variance) / (auc * (1 - auc))
    low, high = (0.5 + 0.5 * math.tanh(x / 2) for x in (odds - half, odds + half))
    return min(low, auc), max(high, auc)


def _checked_losses(losses: Array, whose: str) -> Floats:
    array = np.asarray(losses, np.float64)
    if array.ndim != 1 or array.size == 0 or np.isnan(array).any():
        raise InvalidInputError(
            f"membership needs at least one loss of {whose}, and none that is NaN"
        )
    return array
