"""Krum, Multi-Krum and Bulyan: aggregations that choose among a round's updates.

Peva Blanchard, El Mahdi El Mhamdi, Rachid Guerraoui, Julien Stainer: "Machine Learning
with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017. El Mahdi El
Mhamdi, Rachid Guerraoui, Sébastien Rouault: "The Hidden Vulnerability of Distributed
Learning in Byzantium", ICML 2018.

The formulas are those of Flower 1.41. Distances between updates equal distances between
local models, because all clients of a round start from one model. In float64 and
without that model they are exact where Flower's float32 is not.
"""

from __future__ import annotations

import numpy as np

from fastfedul.params import Array


def krum_places(distances: Array, num_malicious: int, num_chosen: int) -> Array:
    """Return the places of the updates that lie closest to others, best first.

    The place decides between equal scores, so the answer is the same in every process.

    Args:
        distances: Squared distances between all updates of a round.
        num_malicious: How many clients may attack.
        num_chosen: How many updates to choose.

    >>> line = np.array([0.0, 1.0, 3.0, 90.0])
    >>> krum_places((line[:, None] - line) ** 2, 1, 2).tolist()
    [0, 1]
    """
    num_closest = max(1, len(distances) - num_malicious - 2)
    nearest = np.sort(distances, axis=1)[:, 1 : num_closest + 1]
    return np.argsort(nearest.sum(axis=1), kind="stable")[:num_chosen]


def weighted_mean(updates: Array, shares: Array) -> Array:
    """Return the mean of updates, weighted by their shares.

    Row by row, so that a slice of the updates gives the same bits as all of them.
    """
    total = np.zeros(updates.shape[1:])
    for row, share in zip(updates, shares, strict=True):
        total += share * row.astype(np.float64)
    return total.astype(np.float32)


def mean_around_median(updates: Array, num_closest: int) -> Array:
    """Return for each value the mean of those that lie closest to the median.

    Args:
        updates: The chosen updates.
        num_closest: How many values count at each place.
    """
    gaps = np.abs(updates - np.median(updates, axis=0))
    places = np.argpartition(gaps, num_closest - 1, axis=0)[:num_closest]
    closest = np.take_along_axis(updates, places, axis=0)
    return weighted_mean(closest, np.full(num_closest, 1 / num_closest))
