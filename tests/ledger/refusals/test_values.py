"""Updates and steps with values, shapes or types that no model has."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    InvalidInputError,
    MemoryLedger,
    Model,
    Params,
    Round,
    read_round,
)
from tests.support.refusals import (
    LARGE,
    LAYOUT,
    WritableLedger,
    arrays,
    assert_refused,
    handed_in,
    params,
    round_of,
    state_of,
    with_value,
)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_update_with_a_value_that_is_no_number(
    ledger: WritableLedger, value: float
) -> None:
    good = round_of(2, "a", "b")
    bad = replace(good.updates[1], delta=with_value(value))
    assert_refused(
        ledger, replace(good, updates=(good.updates[0], bad)), "'b'", "round 2", "NaN"
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_kept_is_checked_all_the_same(
    ledger: WritableLedger, value: float
) -> None:
    good = round_of(2, "a", "b")
    bad = replace(
        good.updates[1], delta=with_value(value), kept=False, keep_probability=0.5
    )
    assert_refused(
        ledger, replace(good, updates=(good.updates[0], bad)), "'b'", "round 2"
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_step_with_a_value_that_is_no_number(
    ledger: WritableLedger, value: float
) -> None:
    bad = replace(round_of(2, "a", "b"), step=with_value(value))
    assert_refused(ledger, bad, "step", "round 2", "NaN")


def test_a_float64_value_beyond_float32(ledger: WritableLedger) -> None:
    huge = arrays(bias=np.full(7, 1e300))
    bad = Round(2, (ClientUpdate("a", 1.0, huge),))
    assert_refused(ledger, bad, "'a'", "infinite")


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_value_beyond_the_first_block_of_a_large_model(
    kind: str, value: float, tmp_path: Path
) -> None:
    initial = Model(Params.zeros(LARGE))
    ledger: WritableLedger = (
        MemoryLedger.create(initial)
        if kind == "memory"
        else DiskLedger.create(tmp_path / "ledger", initial)
    )
    flat = params(1, layout=LARGE).flat.copy()
    flat[-1] = value
    bad = Params(LARGE, flat)
    with pytest.raises(InvalidInputError, match=r"^client 'a' sent NaN or infinite"):
        ledger.append(Round(0, (ClientUpdate("a", 1.0, bad),), step=bad))
    assert ledger.num_rounds == 0
    if isinstance(ledger, DiskLedger):
        ledger.close()


@pytest.mark.parametrize("kind", ["memory", "rounds", "sums"])
def test_an_update_whose_squares_overflow_is_refused_or_summed_without_infinity(
    kind: Any, tmp_path: Path
) -> None:
    initial = Model(Params.zeros(LAYOUT))
    ledger: WritableLedger = (
        MemoryLedger.create(initial)
        if kind == "memory"
        else DiskLedger.create(tmp_path / "ledger", initial, history=kind)
    )
    huge = Params(LAYOUT, np.full(LAYOUT.size, 1e30, np.float32))
    before = state_of(ledger)
    try:
        ledger.append(Round(0, (ClientUpdate("a", 1.0, huge),)))
    except InvalidInputError:
        assert state_of(ledger) == before
    else:
        assert np.isfinite(ledger.own_difference("a")).all()
    finally:
        if isinstance(ledger, DiskLedger):
            ledger.close()


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_round_that_makes_the_model_infinite(kind: str, tmp_path: Path) -> None:
    huge = Params(LAYOUT, np.full(LAYOUT.size, 3e38, np.float32))
    ledger: WritableLedger = (
        MemoryLedger.create(Model(huge))
        if kind == "memory"
        else DiskLedger.create(tmp_path / "ledger", Model(huge))
    )
    with pytest.raises(InvalidInputError, match="no training gives"):
        ledger.append(Round(0, (ClientUpdate("a", 1.0, huge),)))
    unseen = ClientUpdate("a", 1.0, None, kept=False)
    with pytest.raises(InvalidInputError, match="round 0 makes the model infinite"):
        ledger.append(Round(0, (unseen,), huge))
    assert ledger.num_rounds == 0
    if isinstance(ledger, DiskLedger):
        ledger.close()


@pytest.mark.parametrize(
    "bad",
    [
        arrays(bias=np.zeros(8)),
        arrays(bias=np.zeros((7, 1))),
        arrays(weight=np.zeros((6, 5))),
        arrays(weight=np.zeros(30)),
        arrays(bias=np.zeros(0)),
        arrays(bias=np.array(0.0)),
    ],
)
@pytest.mark.parametrize("part", ["update", "step"])
def test_a_wrong_shape(ledger: WritableLedger, bad: Any, part: str) -> None:
    name = "bias" if bad["weight"].shape == (5, 6) else "weight"
    if part == "update":
        round_ = Round(2, (ClientUpdate("a", 1.0, bad),))
        assert_refused(ledger, round_, "client 'a'", repr(name), "shape")
    else:
        round_ = replace(round_of(2, "a"), step=bad)
        assert_refused(ledger, round_, "step", repr(name), "shape")


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (arrays(bias=None), "bias"),
        (arrays(extra=np.zeros(2)), "extra"),
        (arrays(bias=None, Bias=np.zeros(7)), "Bias"),
        ({}, "weight"),
    ],
)
@pytest.mark.parametrize("part", ["update", "step"])
def test_a_missing_or_an_extra_parameter(
    ledger: WritableLedger, bad: Any, named: str, part: str
) -> None:
    if part == "update":
        round_ = Round(2, (ClientUpdate("a", 1.0, bad),))
    else:
        round_ = replace(round_of(2, "a"), step=bad)
    assert_refused(ledger, round_, named)


@pytest.mark.parametrize("name", ["two\nlines", "x" * 10_000, 7])
def test_an_extra_parameter_with_a_name_of_its_own_kind(
    ledger: WritableLedger, name: Any
) -> None:
    bad = handed_in({**params(5), name: np.zeros(2)})
    assert_refused(ledger, Round(2, (ClientUpdate("a", 1.0, bad),)), "names differ")


@pytest.mark.parametrize(
    "dtype", ["int64", "int8", "bool", "complex64", "object", "U3"]
)
@pytest.mark.parametrize("part", ["update", "step"])
def test_a_dtype_that_is_no_float(
    ledger: WritableLedger, dtype: str, part: str
) -> None:
    bad = arrays(bias=np.zeros(7).astype(dtype))
    if part == "update":
        round_ = Round(2, (ClientUpdate("a", 1.0, bad),))
        assert_refused(ledger, round_, "client 'a'", "'bias'", "dtype")
    else:
        round_ = replace(round_of(2, "a"), step=bad)
        assert_refused(ledger, round_, "step", "'bias'", "dtype")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4", ">f8"])
def test_any_float_dtype_is_taken(ledger: WritableLedger, dtype: str) -> None:
    given = {name: array.astype(dtype) for name, array in params(8).items()}
    ledger.append(Round(2, (ClientUpdate("a", 1.0, handed_in(given)),)))
    kept = read_round(ledger, 2).updates[0].delta
    assert kept is not None
    for name, array in given.items():
        np.testing.assert_array_equal(kept[name], array.astype(np.float32))
