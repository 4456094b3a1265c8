"""The remainder of a mark: the part that training would not have pulled back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastfedul.methods.fast_fedul.eigenbases import Basis
from fastfedul.params import Array, Flat

Ages = Sequence[tuple[float, float]]
"""Age of a sum of marks: parts of the training that came after, with weights."""


@dataclass(frozen=True, slots=True)
class Strength:
    """Constants of the part that a variance leaves; fitted on development runs.

    Attributes:
        factor: C, without a unit.
        power: p: 1 where a direction decays by itself, less where a basis mixes
            directions that decay fast with others that decay slowly.
    """

    factor: float
    power: float


WITHIN_LAYERS = Strength(300.0, 0.5)
ALONG_DEVIATIONS = Strength(20_000.0, 1.0)


def left_of(variance: Array, strength: Strength, scale: float, ages: Ages) -> Array:
    """Return the part of a difference that is left along directions, by variance.

    >>> left_of(np.array([0.0, 1.0]), Strength(1.0, 0.5), 15.0, [(1.0, 1.0)])
    array([1.  , 0.25])
    """
    left = np.zeros(variance.shape)
    for age, weight in ages:
        if age == 0:
            left += weight
            continue
        with np.errstate(invalid="ignore"):
            pulled = strength.factor * scale * age * np.maximum(variance, 0)
        left += weight * (1 + pulled) ** -strength.power
    # Where nobody differs nothing is pulled back, also if no round moved the model.
    return np.where(variance > 0, left, 1.0)


def hold_back_by_value(
    marks: Array, ages: Sequence[Ages], rows: Array, scale: float, found: Flat
) -> None:
    """Write the part that is left of an array of one axis, value by value."""
    variance = np.einsum("ij,ij->j", rows, rows, dtype=np.float64)
    found[...] = 0
    for mark, own in zip(marks, ages, strict=True):
        found += mark * left_of(variance, WITHIN_LAYERS, scale, own).astype(np.float32)


def turn_and_hold_back(
    marks: Array,
    ages: Sequence[Ages],
    left: Basis,
    right: Basis,
    scale: float,
    found: Flat,
) -> None:
    """Write the part that is left of an array of more axes, in its sides' bases.

    Where all eigenvectors of a side are known, marks are turned into them and the sum
    over the ages is turned back once.
    """
    if left.trace == 0:
        marks.sum(axis=0, out=found)
        return
    shape = len(left.vectors), len(right.vectors)
    total = np.zeros(shape, np.float32)
    for mark, own in zip(marks, ages, strict=True):
        if not any(age for age, _ in own):
            continue
        turned = mark.reshape(shape)
        if left.rest is None:
            turned = left.vectors.T @ turned
        if right.rest is None:
            turned = turned @ right.vectors
        _add_left(total, turned, left, right, scale, own)
        del turned
    if left.rest is None:
        total = left.vectors @ total
    if right.rest is None:
        np.matmul(total, right.vectors.T, out=found.reshape(shape))
    else:
        found.reshape(shape)[...] = total
    for mark, own in zip(marks, ages, strict=True):
        if not any(age for age, _ in own):
            found += mark


def _add_left(
    total: Array, turned: Array, left: Basis, right: Basis, scale: float, ages: Ages
) -> None:
    """Add the part that is left of a mark, turned where all eigenvectors are known."""

    def kept(of_left: Array, of_right: Array) -> Array:
        variance = np.multiply.outer(of_left, of_right) / left.trace
        return left_of(variance, WITHIN_LAYERS, scale, ages).astype(np.float32)

    both = kept(left.values, right.values)
    if left.rest is None and right.rest is None:
        total += both * turned
        return
    # The part across the vectors of a side is multiplied by one number; along them
    # that is taken off again.
    rest = [np.array([0.0 if s.rest is None else s.rest]) for s in (left, right)]
    by_left, by_right = kept(left.values, rest[1]), kept(rest[0], right.values)
    if right.rest is None:
        inner = left.vectors.T @ turned
        total += left.vectors @ ((both - by_right) * inner)
        total += by_right * turned
        return
    if left.rest is None:
        inner = turned @ right.vectors
        total += ((both - by_left) * inner) @ right.vectors.T
        total += by_left * turned
        return
    across = kept(*rest)
    inner = left.vectors.T @ turned
    middle = (both - by_left - by_right + across) * (inner @ right.vectors)
    total += left.vectors @ (middle @ right.vectors.T + (by_left - across) * inner)
    total += ((by_right - across) * (turned @ right.vectors)) @ right.vectors.T
    total += across * turned
