"""Flower's arrays as models, and models as Flower's arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord
from flwr.common.constant import SType

from fastfedul.errors import InvalidInputError
from fastfedul.params import Array, Params, norm
from fastfedul.records import Model

_MAGIC = b"\x93NUMPY\x01\x00"
"""First bytes of an array in the format that `numpy.save` writes."""

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""How PyTorch ends the names of arrays that a network keeps but does not learn."""

IsBuffer = Callable[[str, Array], bool]
Buffers = Collection[str] | IsBuffer


def is_buffer(name: str, array: Array) -> bool:
    """Return whether an array is carried along rather than learned.

    >>> is_buffer("norm.running_mean", np.zeros(3)), is_buffer("w", np.zeros(3))
    (True, False)
    """
    return array.dtype.kind != "f" or name.endswith(STATISTICS)


def buffer_rule(buffers: Buffers | None) -> IsBuffer:
    """Return the rule for names that are listed, a rule itself, or the usual one."""
    if buffers is None:
        return is_buffer
    if callable(buffers):
        return buffers
    names = frozenset(buffers)
    return lambda name, array: array.dtype.kind != "f" or name in names


def to_model(record: ArrayRecord, rule: IsBuffer) -> Model:
    """Return Flower's arrays as a model of parameters and buffers."""
    arrays = {name: array.numpy() for name, array in record.items()}
    params = {n: a for n, a in arrays.items() if not rule(n, a)}
    buffers = {n: a for n, a in arrays.items() if rule(n, a)}
    return Model(Params.of(params), buffers)


def to_record(model: Model, order: Sequence[str]) -> ArrayRecord:
    """Return a model as Flower's arrays, in the order given."""
    arrays = {**model.params.exported(), **model.buffers}
    return ArrayRecord({name: FlowerArray(np.asarray(arrays[name])) for name in order})


def decoded(array: FlowerArray) -> Array:
    """Return an array as `array.numpy()` does, but never unpickle or allocate.

    All clients of a federation send the same headers, and reading one takes longer
    than copying a small array, so headers are remembered.

    Raises:
        ValueError: If it is no array of NumPy's first format, or not whole.
    """
    data = array.data
    if array.stype != SType.NUMPY or data[:8] != _MAGIC:
        raise ValueError("it is no array of NumPy's format 1.0")
    end = 10 + int.from_bytes(data[8:10], "little")
    shape, fortran_order, dtype = _header(data[:end])
    # A shape may claim any size; the bytes decide.
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(data) - end:
        raise ValueError(f"{len(data) - end} bytes are no {dtype} of shape {shape}")
    flat = np.frombuffer(data, dtype, math.prod(shape), end)
    return flat.reshape(shape, order="F" if fortran_order else "C")


@lru_cache(1024)
def _header(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    file = BytesIO(data)
    np.lib.format.read_magic(file)
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    return shape, fortran_order, dtype


def disagreement(result: ArrayRecord, own: Params, step_norm: float) -> str:
    """Return how a strategy's result differs from the ledger's model; empty if not.

    Both are the same aggregation added up in different orders and precisions.
    """
    layout = own.layout
    try:
        arrays = {slot.name: decoded(result[slot.name]) for slot in layout.slots}
        flat = layout.flatten(arrays)
    except (KeyError, InvalidInputError) as error:
        return f"other arrays ({error})"
    coarsest = max(np.finfo(slot.dtype).eps for slot in layout.slots)
    rounding = 16 * max(float(coarsest), float(np.finfo(np.float32).eps))
    allowed = 1e-4 * step_norm + rounding * norm(own.flat)
    gap = norm(flat - own.flat)
    return "" if gap <= allowed else f"a distance of {gap:.3g}, allowed {allowed:.3g}"
