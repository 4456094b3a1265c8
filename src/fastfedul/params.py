"""Model parameters: named arrays over one flat float32 vector, and arithmetic on it.

Sums run block by block in a fixed order. So no number depends on the threads of the
linear algebra library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fastfedul.errors import InvalidInputError
from fastfedul.limits import require_type, show

Flat = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

FLOAT_DTYPES = ("float16", "float32", "float64")
_SUM_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Slot:
    """Name, shape and original dtype of one parameter array."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Where each named array lies in the flat vector, in the order given."""

    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, arrays: Mapping[str, npt.ArrayLike]) -> Layout:
        """Return the layout of these arrays.

        Raises:
            InvalidInputError: If there is no array or one is not of a float dtype.
        """
        require_type("a model", arrays, Mapping, "a mapping of names to arrays")
        if not arrays:
            raise InvalidInputError("a model needs at least one parameter array")
        slots = []
        for name, value in arrays.items():
            check_array_name(name)
            array = as_array(name, value)
            if array.dtype.name not in FLOAT_DTYPES:
                raise InvalidInputError(
                    f"parameter {name!r} has dtype {array.dtype}; parameters are "
                    "float16, float32 or float64, anything else is a buffer"
                )
            slots.append(Slot(name, array.shape, array.dtype.name))
        layout = cls(tuple(slots))
        if layout.size == 0:
            raise InvalidInputError("the parameter arrays hold no value at all")
        return layout

    @cached_property
    def size(self) -> int:
        """Number of values of the flat vector."""
        return sum(slot.size for slot in self.slots)

    @cached_property
    def _places(self) -> dict[str, tuple[Slot, int]]:
        places, start = {}, 0
        for slot in self.slots:
            places[slot.name] = (slot, start)
            start += slot.size
        return places

    def place(self, name: str) -> tuple[Slot, int]:
        """Return the slot of a name and the offset of its first value."""
        return self._places[name]

    def flatten(self, arrays: Mapping[str, npt.ArrayLike]) -> Flat:
        """Return the arrays as one new flat float32 vector.

        Raises:
            InvalidInputError: If a name is missing or unknown, or a shape is wrong.
        """
        require_type("a model", arrays, Mapping, "a mapping of names to arrays")
        if set(arrays) != set(self._places):
            wrong = show_names(set(arrays) ^ set(self._places))
            raise InvalidInputError(
                f"parameter names differ from the ledger's: {wrong}"
            )
        flat = np.empty(self.size, np.float32)
        for name, (slot, start) in self._places.items():
            array = as_array(name, arrays[name])
            if array.shape != slot.shape:
                raise InvalidInputError(
                    f"parameter {name!r} has shape {array.shape}, not {slot.shape}"
                )
            if array.dtype.name not in FLOAT_DTYPES:
                raise InvalidInputError(
                    f"parameter {name!r} has dtype {array.dtype}, not {slot.dtype}"
                )
            # A float64 value too large for float32 becomes infinite and is refused
            # where finite values are required.
            with np.errstate(over="ignore"):
                flat[start : start + slot.size] = array.reshape(-1)
        return flat

    def to_json(self) -> str:
        """Return the layout as canonical JSON text."""
        rows = [[slot.name, list(slot.shape), slot.dtype] for slot in self.slots]
        return json.dumps(rows, separators=(",", ":"), ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Return the layout that `to_json` wrote."""
        rows = json.loads(text)
        return cls(tuple(Slot(name, tuple(shape), dt) for name, shape, dt in rows))


class Params(Mapping[str, Array]):
    """Named arrays that are read-only views of one flat float32 vector."""

    __slots__ = ("flat", "layout")

    def __init__(self, layout: Layout, flat: Flat) -> None:
        require_type("the layout", layout, Layout, "a Layout")
        require_type("the flat vector", flat, np.ndarray, "an array")
        if flat.shape != (layout.size,) or flat.dtype != np.float32:
            raise InvalidInputError(
                f"the flat vector must be float32 of length {layout.size}, "
                f"not {flat.dtype} of shape {flat.shape}"
            )
        view = flat.view()
        view.flags.writeable = False
        self.layout = layout
        self.flat: Flat = view

    @classmethod
    def of(
        cls, arrays: Mapping[str, npt.ArrayLike], layout: Layout | None = None
    ) -> Params:
        """Return the arrays as parameters, checked against a layout if one is given.

        >>> Params.of({"w": np.array([[1.0, 2.0]]), "b": np.zeros(1)}).flat
        array([1., 2., 0.], dtype=float32)
        """
        layout = Layout.of(arrays) if layout is None else layout
        require_type("the layout", layout, Layout, "a Layout")
        return cls(layout, layout.flatten(arrays))

    @classmethod
    def zeros(cls, layout: Layout) -> Params:
        """Return parameters that are all zero."""
        return cls(layout, np.zeros(layout.size, np.float32))

    def __getitem__(self, name: str) -> Array:
        slot, start = self.layout.place(name)
        return self.flat[start : start + slot.size].reshape(slot.shape)

    def __iter__(self) -> Iterator[str]:
        return (slot.name for slot in self.layout.slots)

    def __len__(self) -> int:
        return len(self.layout.slots)

    def exported(self) -> dict[str, Array]:
        """Return the arrays as copies in the dtypes the model came with."""
        return {s.name: self[s.name].astype(s.dtype) for s in self.layout.slots}


def show_names(names: Iterable[object]) -> str:
    """Return a few names for an error message, however strange they are."""
    return ", ".join(sorted(show(name) for name in names)[:5])


def as_array(name: str, value: npt.ArrayLike) -> Array:
    """Return a value as an array.

    Raises:
        InvalidInputError: If it is none, such as a list of rows of unequal lengths.
    """
    try:
        return np.asarray(value)
    except Exception as error:  # A tensor on another device may fail in any way.
        raise InvalidInputError(f"{name!r:.40} is no array: {error!s:.200}") from None


def check_array_name(name: object) -> None:
    """Raise unless an array of this name can be written to a safetensors file."""
    try:
        storable = isinstance(name, str) and bool(name.encode())
    except UnicodeEncodeError:
        storable = False
    if not storable or name == "__metadata__":
        raise InvalidInputError(
            f"{show(name)} cannot be the name of an array in a safetensors file"
        )


def subtract(left: Params, right: Params) -> Params:
    """Return left minus right, value by value."""
    return Params(left.layout, left.flat - right.flat)


def scale(params: Params, factor: float) -> Params:
    """Return the parameters times a number."""
    if factor == 1:
        return params
    return Params(params.layout, params.flat * np.float32(factor))


def weighted_sum(vectors: Sequence[Flat], weights: Sequence[float]) -> Flat:
    """Return the weighted sum of at least one vector, added in the order given."""
    total = vectors[0] * np.float32(weights[0])
    scratch = np.empty_like(total)
    for vector, weight in zip(vectors[1:], weights[1:], strict=True):
        np.multiply(vector, np.float32(weight), out=scratch)
        total += scratch
    return total


def dot(left: Flat, right: Flat) -> float:
    """Return the inner product; not finite only if a value or the product is not.

    >>> dot(np.float32([1e30, 2]), np.float32([1e30, 3])) > 9e59
    True
    """
    with np.errstate(over="ignore", invalid="ignore"):
        result = _blockwise_dot(left, right)
        if not math.isfinite(result):
            result = sum(
                float(
                    np.dot(
                        left[i : i + _SUM_BLOCK].astype(np.float64),
                        right[i : i + _SUM_BLOCK].astype(np.float64),
                    )
                )
                for i in range(0, left.size, _SUM_BLOCK)
            )
    return result


def _blockwise_dot(left: Flat, right: Flat) -> float:
    whole = left.size // _SUM_BLOCK * _SUM_BLOCK
    rows = np.vecdot(
        left[:whole].reshape(-1, _SUM_BLOCK), right[:whole].reshape(-1, _SUM_BLOCK)
    )
    rest = np.vecdot(left[whole:], right[whole:])
    return float(rows.sum(dtype=np.float64) + np.float64(rest))


def norm(vector: Flat) -> float:
    """Return the Euclidean norm."""
    return math.sqrt(dot(vector, vector))
