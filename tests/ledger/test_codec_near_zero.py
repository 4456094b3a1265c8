"""What docs/ledger-format.md says of stored values next to zero."""

from __future__ import annotations

import numpy as np
import pytest

from fastfedul.ledger.store import codec
from fastfedul.records import StorageDtype
from fastfedul.rng import stream


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_tiny_values_are_off_by_no_more_than_documented(dtype: StorageDtype) -> None:
    rng = stream(1, "near zero")
    for _ in range(300):
        exponents = rng.uniform(-149, rng.uniform(-148, -100), 64)
        vector = (rng.standard_normal(64) * 2.0**exponents).astype(np.float32)
        encoded = codec.encode(vector, dtype)
        out = np.empty(64, np.float32)
        codec.decode_into(encoded.values, encoded.scales, dtype, out)
        exact = np.abs(vector.astype(np.float64))
        largest = exact.max()
        allowed = {
            "bfloat16": np.maximum(exact * 2.0**-8, 2.0**-134),
            "float16": exact * 2.0**-11 + largest * 2.0**-38,
            # Scale and product are rounded to float32 once more.
            "int8": np.full(64, max(largest / 254 * 1.0001, 2.0**-127)),
        }[dtype]
        assert (np.abs(out.astype(np.float64) - vector) <= allowed).all()


def test_bfloat16_keeps_some_digits_below_the_smallest_normal_number() -> None:
    vector = np.array([2.0**-127, 2.0**-133, 2.0**-134, 1e-45], np.float32)
    encoded = codec.encode(vector, "bfloat16")
    out = np.empty(4, np.float32)
    codec.decode_into(encoded.values, None, "bfloat16", out)
    assert out.tolist() == [2.0**-127, 2.0**-133, 0, 0]
