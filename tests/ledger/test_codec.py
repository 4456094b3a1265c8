from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fastfedul.errors import InvalidInputError
from fastfedul.ledger.store import codec
from fastfedul.ledger.store.codec import SCALE_BLOCK, STORAGE_DTYPES
from fastfedul.params import Flat
from fastfedul.records import StorageDtype
from fastfedul.rng import stream
from tests.support.stored_vectors import error_bound, through

LARGEST = float(np.finfo(np.float32).max)
LARGEST_BFLOAT16 = float(np.uint32(0x7F7F0000).view(np.float32))
SIZES = (1, 2, 1023, 1024, 1025, 65_536 + 3)
law = settings(max_examples=100, deadline=None)

each_dtype = pytest.mark.parametrize("dtype", STORAGE_DTYPES)


def normal(size: int, scale: float = 1.0) -> Flat:
    values = stream(1, "codec", size).normal(size=size) * scale
    return values.astype(np.float32)


def assert_within_bound(vector: Flat, dtype: StorageDtype) -> None:
    decoded = through(vector, dtype)
    assert decoded.dtype == np.float32
    assert decoded.shape == vector.shape
    assert np.isfinite(decoded).all()
    error = np.abs(decoded.astype(np.float64) - vector)
    bound = error_bound(vector, dtype)
    assert bound.shape == vector.shape
    assert (error <= bound).all(), np.abs(error - bound).max()


@each_dtype
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-7, 1, 1e7, 1e30])
def test_the_decoded_error_is_within_its_bound(
    dtype: StorageDtype, size: int, scale: float
) -> None:
    assert_within_bound(normal(size, scale), dtype)


@each_dtype
@pytest.mark.parametrize("scale", [1e-30, 1e-7, 1, 1e30])
def test_the_bound_is_a_small_part_of_the_update(
    dtype: StorageDtype, scale: float
) -> None:
    vector = normal(5000, scale)
    bound = np.linalg.norm(error_bound(vector, dtype).astype(np.float64))
    relative = bound / np.linalg.norm(vector.astype(np.float64))
    at_most = {"float32": 0.0, "bfloat16": 4e-3, "float16": 5e-4, "int8": 2e-2}
    assert relative <= at_most[dtype]


@each_dtype
@pytest.mark.parametrize("size", SIZES)
def test_zeros_stay_zeros(dtype: StorageDtype, size: int) -> None:
    np.testing.assert_array_equal(through(np.zeros(size, np.float32), dtype), 0)


@each_dtype
def test_values_of_very_different_sizes_in_neighbouring_blocks_do_not_disturb(
    dtype: StorageDtype,
) -> None:
    vector = np.concatenate(
        [normal(SCALE_BLOCK, s) for s in (1e30, 1e-7, 1, 1e-30)] + [normal(3, 1e-7)]
    ).astype(np.float32)
    assert_within_bound(vector, dtype)
    decoded = through(vector, dtype)
    small = slice(SCALE_BLOCK, 2 * SCALE_BLOCK)
    gap = np.linalg.norm(decoded[small].astype(np.float64) - vector[small])
    assert gap <= 0.02 * np.linalg.norm(vector[small].astype(np.float64))


@each_dtype
@pytest.mark.parametrize("size", SIZES)
def test_a_stored_vector_takes_the_bytes_it_promises(
    dtype: StorageDtype, size: int
) -> None:
    encoded = codec.encode(normal(size), dtype)
    assert encoded.values.nbytes == size * codec.VALUE_BYTES[dtype]
    scales = 0 if encoded.scales is None else encoded.scales.size
    assert scales == codec.num_scales(dtype, size)
    blocks = -(-size // SCALE_BLOCK)
    assert scales == (blocks if dtype in ("float16", "int8") else 0)


@each_dtype
def test_encoding_leaves_the_vector_alone(dtype: StorageDtype) -> None:
    vector = normal(3000)
    before = vector.copy()
    codec.encode(vector, dtype)
    np.testing.assert_array_equal(vector, before)


@each_dtype
def test_encoding_what_was_decoded_changes_nothing_more(dtype: StorageDtype) -> None:
    once = through(normal(3000, 1e-3), dtype)
    np.testing.assert_allclose(through(once, dtype), once, rtol=1e-6, atol=0)


@each_dtype
@pytest.mark.parametrize("size", [1024 * 64, 1024 * 3])
def test_a_slice_that_begins_with_a_scale_block_decodes_on_its_own(
    dtype: StorageDtype, size: int
) -> None:
    vector = normal(65_536 + 3 * 1024 + 5)
    encoded = codec.encode(vector, dtype)
    whole = through(vector, dtype)
    first, stop = size, size + 1024 + 5
    scales = encoded.scales
    if scales is not None:
        scales = scales[first // SCALE_BLOCK : -(-stop // SCALE_BLOCK)]
    out = np.empty(stop - first, np.float32)
    codec.decode_into(encoded.values[first:stop], scales, dtype, out)
    np.testing.assert_array_equal(out, whole[first:stop])


def test_float32_is_exact() -> None:
    vector = np.concatenate([normal(100, 1e-30), normal(100, 1e30)])
    np.testing.assert_array_equal(through(vector, "float32"), vector)


# Rounding, against NumPy and by hand.


def unscaled(vector: Flat) -> Flat:
    """Values of a block whose largest lies in [2**14, 2**15): its scale is 1."""
    assert vector.size <= SCALE_BLOCK
    block = np.append(vector, np.float32(2.0**14)).astype(np.float32)
    encoded = codec.encode(block, "float16")
    assert encoded.scales is not None
    assert encoded.scales.tolist() == [1.0]
    assert encoded.values.dtype == np.float16
    found: Flat = encoded.values[:-1]
    return found


NORMAL_FLOAT16 = st.floats(2.0**-14, 2.0**14, width=32)
SMALL_FLOAT16 = st.floats(0, 2.0**-14, width=32)


@law
@given(hnp.arrays(np.float32, st.integers(1, 64), elements=NORMAL_FLOAT16))
def test_float16_rounds_as_numpy_does(vector: Flat) -> None:
    np.testing.assert_array_equal(unscaled(vector), vector.astype(np.float16))
    np.testing.assert_array_equal(unscaled(-vector), (-vector).astype(np.float16))


@law
@given(hnp.arrays(np.float32, st.integers(1, 64), elements=SMALL_FLOAT16))
def test_small_float16_values_are_at_most_one_unit_from_numpys(vector: Flat) -> None:
    units = unscaled(vector).view(np.int16) - vector.astype(np.float16).view(np.int16)
    assert (np.abs(units) <= 1).all()


def test_every_float16_comes_back_as_itself() -> None:
    every = np.arange(0x10000, dtype=np.uint16).view(np.float16)
    every = every[np.isfinite(every) & (np.abs(every) < 2.0**15)]
    out = np.empty(every.size, np.float32)
    scales = np.ones(codec.num_scales("float16", every.size), np.float32)
    codec.decode_into(every, scales, "float16", out)
    np.testing.assert_array_equal(out, every.astype(np.float32))
    for part in np.array_split(every.astype(np.float32), 64):
        np.testing.assert_array_equal(unscaled(part), part)


def test_float16_ties_go_to_the_even_neighbour() -> None:
    unit = 2.0**-10
    vector = np.array([1 + 0.5 * unit, 1 + 1.5 * unit, 1 + 2.5 * unit], np.float32)
    np.testing.assert_array_equal(
        unscaled(vector).astype(np.float64), [1, 1 + 2 * unit, 1 + 2 * unit]
    )


def bfloat16_by_hand(value: float) -> float:
    """Round to 8 significant bits, ties to even, in float64 arithmetic."""
    if value == 0:
        return 0.0
    exponent = max(int(np.frexp(np.float32(value))[1]) - 8, -133)
    rounded = float(np.rint(np.float64(value) / 2.0**exponent)) * 2.0**exponent
    return float(np.clip(rounded, -LARGEST_BFLOAT16, LARGEST_BFLOAT16))


@law
@given(
    hnp.arrays(
        np.float32,
        st.integers(1, 64),
        elements=st.floats(
            width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True
        ),
    )
)
def test_bfloat16_rounds_to_nearest_with_ties_to_even(vector: Flat) -> None:
    expected = [bfloat16_by_hand(float(value)) for value in vector]
    np.testing.assert_array_equal(
        through(vector, "bfloat16"), np.array(expected, np.float32)
    )


def test_bfloat16_ties_go_to_the_even_neighbour() -> None:
    unit = 2.0**-7
    vector = np.array([1 + 0.5 * unit, 1 + 1.5 * unit, -1 - 2.5 * unit], np.float32)
    np.testing.assert_array_equal(
        through(vector, "bfloat16"), [1, 1 + 2 * unit, -1 - 2 * unit]
    )


@law
@given(
    hnp.arrays(np.float32, st.integers(1, 64), elements=st.floats(-1e4, 1e4, width=32))
)
def test_int8_is_the_nearest_of_255_levels(vector: Flat) -> None:
    encoded = codec.encode(vector, "int8")
    assert encoded.scales is not None
    scale = float(encoded.scales[0])
    assert abs(int(encoded.values.min())) <= 127
    np.testing.assert_allclose(
        encoded.values.astype(np.float64) * scale, vector, rtol=0, atol=scale * 0.5001
    )


# The ends of the range.


@each_dtype
@pytest.mark.parametrize("size", [1, 3, 1024, 1025])
def test_the_largest_floats_saturate_and_never_become_infinite(
    dtype: StorageDtype, size: int
) -> None:
    vector = np.full(size, LARGEST, np.float32)
    vector[::2] *= -1
    assert_within_bound(vector, dtype)


def test_bfloat16_saturates_at_its_largest_finite_value() -> None:
    vector = np.array([LARGEST, -LARGEST, 3.39e38], np.float32)
    np.testing.assert_array_equal(
        through(vector, "bfloat16"),
        np.array([LARGEST_BFLOAT16, -LARGEST_BFLOAT16, LARGEST_BFLOAT16], np.float32),
    )


@each_dtype
def test_subnormal_floats_are_within_the_bound(dtype: StorageDtype) -> None:
    smallest = 2.0**-149
    vector = np.array([smallest, -smallest, 1e-40, -1e-39, 0, 1.2e-38], np.float32)
    assert_within_bound(vector, dtype)


any_float = st.floats(
    width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True
)


@law
@given(
    vector=hnp.arrays(np.float32, st.integers(1, 40), elements=any_float),
    dtype=st.sampled_from(STORAGE_DTYPES),
    repeat=st.sampled_from([1, 30, 60]),
)
def test_any_finite_vector_decodes_within_its_bound(
    vector: Flat, dtype: StorageDtype, repeat: int
) -> None:
    assert_within_bound(np.tile(vector, repeat), dtype)


def test_an_unknown_storage_dtype_is_refused_by_name() -> None:
    unknown: Any = "float8"
    with pytest.raises(InvalidInputError, match="'float8'"):
        codec.encode(normal(3), unknown)
