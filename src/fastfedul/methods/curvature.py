"""The curvature of a client's loss, from how its updates changed along the way.

Richard Byrd, Jorge Nocedal, Robert Schnabel: "Representations of quasi-Newton matrices
and their use in limited memory methods", Mathematical Programming 63, 1994: the compact
form of L-BFGS, here for the product of a vector with the matrix, not with its inverse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastfedul.params import Flat, dot, norm, weighted_sum

_LEAST_COSINE = 1e-6
"""Smallest cosine between the halves of a pair; below it is rounding."""


@dataclass(frozen=True, slots=True)
class SecantPair:
    """The evidence of a client's answer in one round about its curvature.

    Attributes:
        moved: Recovered minus stored model, a column of the paper's delta W.
        turned: Stored minus exact update, a column of its delta G.
    """

    moved: Flat
    turned: Flat


def secant_pair(
    moved: Flat, turned: Flat, max_curvature: float | None = None
) -> SecantPair | None:
    """Return the pair, or None if the curvature along the way is not positive.

    The L-BFGS matrix of a pair has the eigenvalue |turned|^2 / (moved . turned), which
    chance can make very large: the less the two point the same way, the larger. Above
    the limit, the part of `turned` that is across the way is made smaller until it is
    met, as Powell damps an update; the curvature along the way stays the same.
    """
    along = dot(moved, turned)
    least = _LEAST_COSINE * norm(moved) * norm(turned)
    if not (math.isfinite(along) and along > least):
        return None
    sigma = along / dot(moved, moved)
    across = turned - np.float32(sigma) * moved
    excess = dot(across, across) / along
    if max_curvature is None or sigma + excess <= max_curvature:
        return SecantPair(moved, turned)
    rest = max(0.0, max_curvature - sigma)
    factors = [min(sigma, max_curvature), math.sqrt(rest / excess) if rest else 0.0]
    return SecantPair(moved, weighted_sum([moved, across], factors))


def curvature_times(pairs: Sequence[SecantPair], way: Flat) -> Flat:
    """Return the L-BFGS matrix of the pairs, the latest last, times a vector.

    Pairs that give no finite answer are left out, the oldest first; without any the
    curvature is unknown and the answer 0.
    """
    for oldest in range(len(pairs)):
        try:
            product = _compact_product(pairs[oldest:], way)
        except np.linalg.LinAlgError:
            continue
        if np.isfinite(product).all():
            return product
    return np.zeros_like(way)


def _compact_product(pairs: Sequence[SecantPair], way: Flat) -> Flat:
    """Return sigma v - [sigma S, Y] M^-1 [sigma S^T v; Y^T v].

    S has the pairs' `moved` as columns, Y their `turned`, and
    M = [[sigma S^T S, L], [L^T, -D]] with L below and D on the diagonal of S^T Y.
    """
    moved = [pair.moved for pair in pairs]
    turned = [pair.turned for pair in pairs]
    across = np.array([[dot(s, y) for y in turned] for s in moved])
    within = np.array([[dot(s, other) for other in moved] for s in moved])
    sigma = across[-1, -1] / within[-1, -1]
    lower = np.tril(across, -1)
    middle = np.block(
        [[sigma * within, lower], [lower.T, -np.diag(np.diagonal(across))]]
    )
    right = [sigma * dot(s, way) for s in moved] + [dot(y, way) for y in turned]
    parts = np.linalg.solve(middle, np.array(right))
    factors = [-sigma * part for part in parts[: len(pairs)]]
    factors += [-part for part in parts[len(pairs) :]]
    return weighted_sum([way, *moved, *turned], [float(sigma), *map(float, factors)])
