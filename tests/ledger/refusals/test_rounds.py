"""Rounds that do not follow, steps that are no mean, training that makes no sense."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    InvalidInputError,
    LedgerReader,
    LocalSGD,
    MemoryLedger,
    Model,
    Params,
    Round,
    forget,
    verify,
)
from fastfedul.params import Array
from tests.support.refusals import (
    LAYOUT,
    WritableLedger,
    assert_refused,
    params,
    round_of,
)


@pytest.mark.parametrize("index", [-1, 0, 1, 3, 1000])
def test_a_round_out_of_order(ledger: WritableLedger, index: int) -> None:
    assert_refused(
        ledger,
        replace(round_of(2, "a"), index=index),
        f"round {index}",
        "next one is 2",
    )


@pytest.mark.parametrize("use", ["", "both", "Store", None])
def test_a_use_that_is_none(ledger: WritableLedger, use: Any) -> None:
    assert_refused(ledger, replace(round_of(2, "a"), use=use), repr(use))


@pytest.mark.parametrize("relative", [1.2e-4, 1e-3, 1.0])
def test_a_step_that_is_not_the_mean(ledger: WritableLedger, relative: float) -> None:
    good = round_of(2, "a", "b")
    deltas = [u.delta.flat for u in good.updates if u.delta is not None]
    mean = np.mean(deltas, axis=0, dtype=np.float64)
    other = params(77).flat.astype(np.float64)
    other *= relative * np.linalg.norm(mean) / np.linalg.norm(other)
    step = Params(LAYOUT, np.asarray(mean + other, np.float32))
    assert_refused(ledger, replace(good, step=step), "step of round 2", "mean")


@pytest.mark.parametrize("relative", [0.0, 5e-5])
def test_a_step_as_close_to_the_mean_as_rounding_leaves_it_is_taken(
    ledger: WritableLedger, relative: float
) -> None:
    good = round_of(2, "a", "b")
    deltas = [u.delta.flat for u in good.updates if u.delta is not None]
    mean = np.mean(deltas, axis=0, dtype=np.float64)
    step = Params(LAYOUT, np.asarray(mean * (1 + relative), np.float32))
    before = ledger.final.params.flat
    ledger.append(replace(good, step=step))
    np.testing.assert_array_equal(ledger.final.params.flat, before + step.flat)


def test_a_step_whose_mean_overflows_is_not_taken_on_trust(
    ledger: WritableLedger,
) -> None:
    huge = Params(LAYOUT, np.full(LAYOUT.size, 3e38, np.float32))
    opposite = Params(LAYOUT, -huge.flat)
    bad = Round(
        2,
        (ClientUpdate("a", 0.5, huge, 0.1), ClientUpdate("b", 0.5, opposite, 0.1)),
        step=params(5),
        use="aggregate",
    )
    assert_refused(ledger, bad, "round 2")


@pytest.mark.parametrize(
    ("buffers", "named"),
    [
        ({}, "seen"),
        ({"seen": np.array([3, 4]), "more": np.array(1)}, "more"),
        ({"seen": np.array([3, 4], complex)}, "'seen'"),
        ({"seen": np.array(["a"])}, "'seen'"),
        ({"seen": np.array([object()])}, "'seen'"),
        ({"seen": np.array([3, 4]), "two\nlines": np.array(1)}, "lines"),
    ],
)
def test_buffers_that_are_not_those_of_the_model(
    ledger: WritableLedger, buffers: Mapping[str, Array], named: str
) -> None:
    assert_refused(ledger, replace(round_of(2, "a"), buffers=buffers), named)


@pytest.mark.parametrize(
    ("buffers", "named"),
    [
        (None, "no buffers"),
        ([3, 4], "other buffers"),
        ({}, "other buffers"),
        ({"seen": np.array([3, 4]), "more": np.array(1)}, "other buffers"),
        ({"seen": np.array([3, 4, 5])}, "'seen'"),
        ({"seen": np.array([3.0, 4.0])}, "'seen'"),
        ({"seen": np.array([object(), 4])}, "'seen'"),
    ],
)
def test_a_clients_buffers_that_are_not_those_of_the_model(
    ledger: WritableLedger, buffers: Any, named: str
) -> None:
    good = round_of(2, "a", "b")
    a, b = good.updates
    a = replace(a, buffers=ledger.final.buffers)
    bad = replace(good, updates=(a, replace(b, buffers=buffers)))
    assert_refused(ledger, bad, named)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_clients_buffers_that_are_not_finite(tmp_path: Path, value: float) -> None:
    start = Model(params(0), {"mean": np.zeros(2, np.float32)})
    ledger = MemoryLedger.create(start)
    [update] = round_of(0, "a").updates
    bad = {"mean": np.array([0, value], np.float32)}
    with pytest.raises(InvalidInputError, match="'mean' of client 'a' has NaN"):
        ledger.append(Round(0, (replace(update, buffers=bad),)))
    assert ledger.num_rounds == 0


def test_a_round_number_from_numpy_is_a_number(ledger: WritableLedger) -> None:
    number: Any = np.int64(2)
    ledger.append(replace(round_of(2, "a"), index=number))
    assert ledger.rounds()[-1].index == 2


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *(("lr", value, "learning rate") for value in (0, -0.1, math.nan, math.inf)),
        *(("momentum", value, "momentum") for value in (-0.1, 1.0, math.nan)),
        *(("batch_size", value, "batch size") for value in (0, -8, math.nan)),
        *(("epochs", value, "number of epochs") for value in (0, -1, math.inf)),
    ],
)
def test_local_training_that_makes_no_sense_is_refused(
    name: str, value: float, said: str
) -> None:
    good: dict[str, Any] = {"lr": 0.1, "momentum": 0, "batch_size": 8, "epochs": 1}
    with pytest.raises(InvalidInputError, match=said) as caught:
        LocalSGD(**{**good, name: value})
    assert "\n" not in str(caught.value)
    assert "choose" in str(caught.value)


def test_how_clients_trained_comes_back_and_unknown_stays_unknown(
    ledger: WritableLedger,
) -> None:
    local = LocalSGD(lr=0.05, momentum=0.9, batch_size=32, epochs=0.5)
    ledger.append(replace(round_of(2, "a", "b"), local=local))
    ledger.append(round_of(3, "a", "b"))
    assert [entry.local for entry in ledger.rounds()] == [None, None, local, None]
    forget(ledger, ["a"], erase=True)
    assert [entry.local for entry in ledger.rounds()] == [None, None, local, None]
    if isinstance(ledger, DiskLedger):
        with LedgerReader(ledger.path) as reader:
            assert reader.rounds() == ledger.rounds()
            assert verify(reader).problems == ()


@pytest.mark.parametrize("index", [0.0, "0", None, math.nan])
def test_a_round_without_a_whole_number_is_refused(index: Any) -> None:
    ledger = MemoryLedger.create(Model(params(0)))
    with pytest.raises(InvalidInputError, match="number of a round"):
        ledger.append(replace(round_of(0, "a"), index=index))
    assert ledger.num_rounds == 0


def test_in_a_round_that_never_was_nobody_took_part(tmp_path: Path) -> None:
    with DiskLedger.create(tmp_path / "ledger", Model(params(0))) as ledger:
        ledger.append(round_of(0, "a", "b"))
        assert [len(ledger.updates_in(index)) for index in (-1, 0, 1)] == [0, 2, 0]
