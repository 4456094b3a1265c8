"""Distance and angle of a model to a reference, such as the retrained model.

The angle per output unit is the deviation of the Fast-FedUL paper's qualitative study:
arccos(w_u . w_r / (|w_u| |w_r|)) on the last layer. It is computed as twice the
arctangent of |a - b| / |a + b| for the unit vectors a and b, the same angle without
the cancellation of the arccosine near 0 (W. Kahan). Distances in parameter space say
little between networks that were started differently: hidden units may be permuted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastfedul.errors import InvalidInputError
from fastfedul.params import Array, Flat, Params, Slot

Floats = npt.NDArray[np.float64]

_BLOCK = 65536


@dataclass(frozen=True, slots=True)
class Closeness:
    """Distance and angle between a model and a reference.

    Attributes:
        distance: Euclidean distance of all parameters.
        angle_degrees: Angle between all parameters; None if it is not defined.
        last_layer_angle_degrees: Angle within the last layer, bias included; None if
            it is not defined, or for a model without a matrix of weights.
        unit_angles: Angle of each output unit, in degrees, NaN if it is not defined;
            None for a model without a matrix of weights.
    """

    distance: float
    angle_degrees: float | None
    last_layer_angle_degrees: float | None
    unit_angles: tuple[float, ...] | None


def closeness(model: Params, reference: Params) -> Closeness:
    """Return distance and angle to the reference, overall and for the last layer."""
    whole = distance(model, reference), angle_degrees(model, reference)
    found = _find_last_layer(model)
    if found is None:
        return Closeness(*whole, None, None)
    names = [name for name in found if name is not None]
    left, right = only(model, names), only(reference, names)
    return Closeness(
        *whole,
        last_layer_angle_degrees=angle_degrees(left, right),
        unit_angles=tuple(unit_angles(model, reference).tolist()),
    )


def distance(left: Params, right: Params) -> float:
    """Return the Euclidean distance; not finite only if a value is not.

    >>> distance(Params.of({"w": np.zeros(2)}), Params.of({"w": np.array([3.0, 4.0])}))
    5.0
    """
    _require_same_arrays(left, right)
    with np.errstate(invalid="ignore"):
        blocks = _blocks(left.flat, right.flat)
        return math.sqrt(sum(float(np.square(a - b).sum()) for a, b in blocks))


def angle_degrees(left: Params, right: Params) -> float | None:
    """Return the angle, from 0 to 180; None if it is not defined.

    An angle is not defined if a side is all zeros or has a value that is not finite.
    """
    _require_same_arrays(left, right)
    return _angle(left.flat, right.flat)


def unit_angles(left: Params, right: Params) -> Floats:
    """Return the angle per output unit of the last layer, in degrees.

    A unit is a row of the last weight matrix, as PyTorch stores it, with the unit's
    bias appended if there is one. It is a column if the bias fits only the columns. The
    angle is NaN if it is not defined.

    Raises:
        InvalidInputError: If the models differ in form or have no weight matrix.
    """
    _require_same_arrays(left, right)
    pairs = zip(_units(left), _units(right), strict=True)
    angles = [_angle(one, other) for one, other in pairs]
    return np.array([math.nan if angle is None else angle for angle in angles])


def last_layer(params: Params) -> tuple[str, str | None]:
    """Return the names of the last matrix in layout order and of its bias, if any.

    The bias is a vector with one value per row (or column) of the matrix. It comes
    directly after the matrix and belongs to the same layer: the names agree up to the
    last dot or slash. If names have a layer part, the bias may also come before.

    Raises:
        InvalidInputError: If no parameter is a matrix.

    >>> last_layer(Params.of({"fc.weight": np.ones((2, 3)), "fc.bias": np.ones(2)}))
    ('fc.weight', 'fc.bias')
    """
    found = _find_last_layer(params)
    if found is None:
        raise InvalidInputError("the model has no last layer: no parameter is a matrix")
    return found


def only(params: Params, names: Iterable[str]) -> Params:
    """Return the named arrays alone, in the order given."""
    return Params.of({name: params[name] for name in names})


def _find_last_layer(params: Params) -> tuple[str, str | None] | None:
    slots = params.layout.slots
    matrices = [i for i, slot in enumerate(slots) if len(slot.shape) == 2]
    if not matrices:
        return None
    place = matrices[-1]
    weight = slots[place]
    layer = _layer_name(weight)
    neighbours = [*slots[place + 1 : place + 2]]
    if layer and place > 0:
        neighbours.append(slots[place - 1])
    for slot in neighbours:
        fits = len(slot.shape) == 1 and slot.size in weight.shape
        if fits and _layer_name(slot) == layer:
            return weight.name, slot.name
    return weight.name, None


def _layer_name(slot: Slot) -> str:
    head, _, _ = slot.name.replace("/", ".").rpartition(".")
    return head


def _units(params: Params) -> Array:
    weight_name, bias_name = last_layer(params)
    weight = params[weight_name]
    if bias_name is None:
        return weight
    bias = params[bias_name]
    rows = weight if bias.size == weight.shape[0] else weight.T
    return np.column_stack([rows, bias])


def _angle(left: Flat, right: Flat) -> float | None:
    norms = [_norm(left), _norm(right)]
    if not all(0 < norm < math.inf for norm in norms):
        return None
    apart = together = 0.0
    for one, other in _blocks(left, right):
        one /= norms[0]
        other /= norms[1]
        apart += float(np.square(one - other).sum())
        together += float(np.square(one + other).sum())
    return math.degrees(2 * math.atan2(math.sqrt(apart), math.sqrt(together)))


def _norm(vector: Flat) -> float:
    return math.sqrt(sum(float(np.square(a).sum()) for a, _ in _blocks(vector, vector)))


def _blocks(left: Flat, right: Flat) -> Iterator[tuple[Floats, Floats]]:
    """Yield both vectors piece by piece in float64, so that sums are taken in it."""
    for start in range(0, left.size, _BLOCK):
        piece = slice(start, start + _BLOCK)
        yield left[piece].astype(np.float64), right[piece].astype(np.float64)


def _require_same_arrays(left: Params, right: Params) -> None:
    shapes = [{s.name: s.shape for s in side.layout.slots} for side in (left, right)]
    if list(shapes[0].items()) != list(shapes[1].items()):
        different = {n for n, _ in shapes[0].items() ^ shapes[1].items()}
        raise InvalidInputError(
            "the models differ in the name, shape or order of parameters: "
            f"{', '.join(sorted(different)[:5]) or 'order'}"
        )
