"""How stored vectors come back, and how far off they may be."""

from __future__ import annotations

import numpy as np

from fastfedul.ledger.store import codec
from fastfedul.ledger.store.codec import SCALE_BLOCK
from fastfedul.params import Flat
from fastfedul.records import StorageDtype

SMALLEST_NORMAL = np.float32(np.finfo(np.float32).tiny)


def through(vector: Flat, dtype: StorageDtype) -> Flat:
    """Return a vector as it comes back from storage."""
    encoded = codec.encode(vector, dtype)
    out = np.empty(vector.size, np.float32)
    codec.decode_into(encoded.values, encoded.scales, dtype, out)
    return out


def error_bound(vector: Flat, dtype: StorageDtype) -> Flat:
    """Return, value by value, how far a decoded value may be from the original."""
    if dtype == "float32":
        return np.zeros_like(vector)
    magnitude = np.abs(vector)
    if dtype == "bfloat16":
        return magnitude * np.float32(2.0**-8) + SMALLEST_NORMAL
    starts = np.arange(0, vector.size, SCALE_BLOCK)
    largest = np.repeat(np.maximum.reduceat(magnitude, starts), SCALE_BLOCK)
    largest = largest[: vector.size]
    if dtype == "float16":
        return magnitude * np.float32(2.0**-11) + np.maximum(
            largest * np.float32(2.0**-38), SMALLEST_NORMAL
        )
    return np.maximum(largest * np.float32(0.501 / 127), SMALLEST_NORMAL)
