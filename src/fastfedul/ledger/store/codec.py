"""How a flat float32 vector is stored in fewer bytes.

float16 and int8 work in blocks of 1,024 values with one float32 scale each, so that
an update of size 1e-7 keeps its precision. Decoding float16 avoids NumPy's own
conversion, which is several times slower than these integer operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fastfedul.errors import InvalidInputError
from fastfedul.params import Array, Flat
from fastfedul.records import StorageDtype

SCALE_BLOCK = 1024
"""Values that share one scale."""

STORAGE_DTYPES: tuple[StorageDtype, ...] = ("float32", "bfloat16", "float16", "int8")
SAFETENSORS_NAMES = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int8": "I8",
}
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}

_FLOAT16_BIAS = np.float32(2.0**112)
_LARGEST_FLOAT16 = np.float32(32752)
_HUGE = np.float32(3e38)
_SMALLEST_NORMAL = np.float32(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A stored vector: values in the storage dtype, and a scale per block or None."""

    values: Array
    scales: Flat | None


def has_scales(dtype: StorageDtype) -> bool:
    """Return whether a storage dtype keeps one scale per block."""
    return dtype in ("float16", "int8")


def num_scales(dtype: StorageDtype, size: int) -> int:
    """Return how many scales a vector of this many values has."""
    return -(-size // SCALE_BLOCK) if has_scales(dtype) else 0


@lru_cache(maxsize=64)
def encoded_bytes(dtype: StorageDtype, size: int) -> int:
    """Return the bytes of a vector of so many values, without the header of its file.

    >>> encoded_bytes("float32", 1000), encoded_bytes("int8", 1000)
    (4000, 1004)
    """
    return size * VALUE_BYTES[dtype] + 4 * num_scales(dtype, size)


def encode(vector: Flat, dtype: StorageDtype) -> Encoded:
    """Return the vector in a storage dtype; values must be finite."""
    if dtype == "float32":
        return Encoded(np.ascontiguousarray(vector), None)
    if dtype == "bfloat16":
        return Encoded(_to_bfloat16(vector), None)
    if dtype not in STORAGE_DTYPES:
        raise InvalidInputError(
            f"unknown storage dtype {dtype!r}; choose {', '.join(STORAGE_DTYPES)}"
        )
    blocks = _in_blocks(vector)
    largest = np.abs(blocks).max(axis=1)
    if dtype == "float16":
        # Powers of two, so that scaling is exact: the largest value lands in
        # [2**14, 2**15), far from float16's overflow.
        exponents = np.frexp(largest)[1] - 15
        scales = np.ldexp(np.float32(1), np.clip(exponents, -126, 127))
        # Values that round up to 2**15 would decode to infinity near float32's end.
        scaled = np.clip(blocks / scales[:, None], -_LARGEST_FLOAT16, _LARGEST_FLOAT16)
        values = _to_float16_bits(scaled).view(np.float16)
    else:
        scales = np.maximum(largest / np.float32(127), _SMALLEST_NORMAL)
        # Rounded down, lest 127 times the scale be beyond the largest float32.
        huge = largest > _HUGE
        scales[huge] = np.nextafter(scales[huge], np.float32(0))
        values = np.rint(blocks / scales[:, None]).astype(np.int8)
    return Encoded(
        np.ascontiguousarray(values.reshape(-1)[: vector.size]),
        scales.astype(np.float32),
    )


def decode_into(
    values: Array, scales: Flat | None, dtype: StorageDtype, out: Flat
) -> None:
    """Write the decoded values to `out`.

    Args:
        values: Stored values, beginning at the start of a scale block.
        scales: Their scales, or None where the dtype has none.
        dtype: How they are stored.
        out: Float32 vector of the same length.
    """
    if dtype == "float32":
        np.copyto(out, values)
        return
    bits = out.view(np.int32)
    if dtype == "bfloat16":
        np.copyto(bits, values.view(np.int16))
        np.left_shift(bits, 16, out=bits)
        return
    assert scales is not None
    if dtype == "float16":
        # Sign, exponent and mantissa move to float32's places. The multiplication
        # makes up for the difference of the two exponent biases.
        np.copyto(bits, values.view(np.int16))
        np.left_shift(bits, 13, out=bits)
        np.bitwise_and(bits, np.int32(-0x70002000), out=bits)
        np.multiply(out, _FLOAT16_BIAS, out=out)
        _scale_blocks(out, scales)
        return
    np.copyto(out, values)
    _scale_blocks(out, scales)


def _to_bfloat16(vector: Flat) -> Array:
    bits = np.ascontiguousarray(vector).view(np.uint32)
    # Round to nearest, ties to even; the largest floats would round to infinity,
    # so they stop at the largest finite bfloat16.
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    overflow = (rounded & 0x7F80) == 0x7F80
    rounded[overflow] = (rounded[overflow] & 0x8000) | 0x7F7F
    return rounded.astype(np.uint16)


def _to_float16_bits(vector: Flat) -> Array:
    bits = (vector / _FLOAT16_BIAS).view(np.uint32)
    rounded = (bits + (((bits >> 13) & 1) + np.uint32(0xFFF))) >> 13
    return ((rounded & 0x7FFF) | ((bits >> 16) & 0x8000)).astype(np.uint16)


def _in_blocks(vector: Flat) -> Flat:
    blocks = np.zeros((num_scales("int8", vector.size), SCALE_BLOCK), np.float32)
    blocks.reshape(-1)[: vector.size] = vector
    return blocks


def _scale_blocks(out: Flat, scales: Flat) -> None:
    whole = out.size // SCALE_BLOCK * SCALE_BLOCK
    blocks = out[:whole].reshape(-1, SCALE_BLOCK)
    np.multiply(blocks, scales[: len(blocks), None], out=blocks)
    if whole < out.size:
        out[whole:] *= scales[-1]
