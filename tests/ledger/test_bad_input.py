from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    FastFedUL,
    FastFedULError,
    InvalidInputError,
    LedgerError,
    LedgerReader,
    LocalSGD,
    MemoryLedger,
    Model,
    NoSkew,
    Params,
    Round,
    Scalar,
    UnknownClientError,
    UnlearnRequest,
    erase,
    forget,
    read_round,
    verify,
)
from fastfedul.federation.rounds import shares_of
from fastfedul.params import Array, Layout
from fastfedul.rng import stream

LAYOUT = Layout.of({"weight": np.zeros((5, 6)), "bias": np.zeros(7)})
LARGE = Layout.of({"weight": np.zeros(70_000)})
WritableLedger = MemoryLedger | DiskLedger


def params(*key: int, layout: Layout = LAYOUT) -> Params:
    values = stream(3, "bad input", *key).normal(size=layout.size)
    return Params(layout, values.astype(np.float32))


def with_value(value: float, layout: Layout = LAYOUT) -> Params:
    flat = params(99, layout=layout).flat.copy()
    flat[layout.size // 2] = value
    return Params(layout, flat)


def round_of(index: int, *names: str, layout: Layout = LAYOUT) -> Round:
    share = 1 / len(names)
    return Round(
        index,
        tuple(
            ClientUpdate(name, share, params(index, i, layout=layout))
            for i, name in enumerate(names)
        ),
    )


def fill(ledger: WritableLedger) -> None:
    """Two rounds of a, b and c; then d took part once and was forgotten."""
    ledger.append(round_of(0, "a", "b", "c"))
    ledger.append(round_of(1, "a", "b", "c", "d"))
    forget(ledger, ["d"], erase=False)


def initial_model() -> Model:
    return Model(params(0), {"seen": np.array([3, 4])})


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "ledger"
    with DiskLedger.create(path, initial_model()) as made:
        fill(made)
    return path


@pytest.fixture(params=["memory", "disk"])
def ledger(
    request: pytest.FixtureRequest, tmp_path: Path, template: Path
) -> Iterator[MemoryLedger | DiskLedger]:
    if request.param == "memory":
        made = MemoryLedger.create(initial_model())
        fill(made)
        yield made
        return
    shutil.copytree(template, tmp_path / "ledger")
    with DiskLedger(tmp_path / "ledger") as opened:
        yield opened


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "index.sqlite"
    }


def state_of(ledger: WritableLedger) -> tuple[object, ...]:
    common = (
        ledger.num_rounds,
        ledger.final.params.flat.tobytes(),
        {k: (v.dtype, v.tolist()) for k, v in ledger.final.buffers.items()},
        ledger.rounds(),
        dict(ledger.clients()),
        [ledger.updates_in(i) for i in range(ledger.num_rounds)],
        {i: a.tobytes() for i, a in ledger.adjustments().items()},
        ledger.events(),
        [ledger.own_difference(name).tobytes() for name in ledger.clients()],
    )
    if isinstance(ledger, DiskLedger):
        return (*common, ledger.chain, files(ledger.path))
    return common


def assert_refused(
    ledger: WritableLedger,
    round_: Round,
    *named: str,
    error: type[FastFedULError] = InvalidInputError,
) -> None:
    """The round is refused in one line that names the culprit; nothing changes."""
    before = state_of(ledger)
    with pytest.raises(error) as caught:
        ledger.append(round_)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    for word in named:
        assert word in message, message
    assert state_of(ledger) == before
    ledger.append(round_of(2, "a", "b"))
    assert ledger.num_rounds == 3
    if isinstance(ledger, DiskLedger):
        assert verify(ledger).problems == ()


def handed_in(arrays: Mapping[str, Array]) -> Any:
    """Arrays as a careless caller hands them in, unchecked."""
    return arrays


def arrays(**changes: Array | None) -> Any:
    found: dict[str, Array | None] = {**params(5), **changes}
    return {name: array for name, array in found.items() if array is not None}


# Values and shapes.


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
    with pytest.raises(InvalidInputError, match="beyond all sense"):
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


# Who took part, with which share.


def test_a_repeated_client(ledger: WritableLedger) -> None:
    assert_refused(ledger, round_of(2, "a", "b", "a"), "'a'", "twice")


def test_a_round_without_anybody(ledger: WritableLedger) -> None:
    assert_refused(ledger, Round(2, ()), "at least one")
    with pytest.raises(InvalidInputError):
        ledger.append(Round(3, (), step=params(1)))


def test_a_client_that_was_forgotten(ledger: WritableLedger) -> None:
    assert_refused(ledger, round_of(2, "a", "d"), "'d'", "forgotten")


def test_a_client_that_was_erased(ledger: WritableLedger) -> None:
    erase(ledger, ["d"])
    assert_refused(ledger, round_of(2, "a", "d"), "'d'", "forgotten")


@pytest.mark.parametrize(
    ("shares", "named"),
    [
        ((0.5, 0.4), "sum to 0.9"),
        ((0.7, 0.7), "sum to 1.4"),
        ((0.5, 0.50001), "sum to 1.00001"),
        ((1.5, -0.5), "1.5"),
        ((-0.5, 1.0), "-0.5"),
        ((0.0, 1.0), "0.0"),
        ((math.nan, 1.0), "nan"),
        ((math.inf, 1.0), "inf"),
        ((0.5, math.nan), "nan"),
        # The others' share is lost in how far the sum is from 1.
        ((1.0, 1e-9), "is only 1e-09"),
        ((1.0000000005, 1e-10), "is only 1e-10"),
        ((1.0, 1e-20), "is only 1e-20"),
    ],
)
def test_shares_that_are_none(
    ledger: WritableLedger, shares: tuple[float, float], named: str
) -> None:
    good = round_of(2, "a", "b")
    updates = tuple(
        replace(update, share=share)
        for update, share in zip(good.updates, shares, strict=True)
    )
    assert_refused(ledger, replace(good, updates=updates), "share", named)


def test_shares_that_sum_to_1_within_rounding_are_taken(
    ledger: WritableLedger,
) -> None:
    good = round_of(2, *(f"client-{i}" for i in range(7)))
    updates = tuple(replace(u, share=float(np.float32(1 / 7))) for u in good.updates)
    ledger.append(replace(good, updates=updates))
    assert ledger.num_rounds == 3


def test_a_tiny_share_is_taken_if_the_others_leave_room_for_it(
    ledger: WritableLedger,
) -> None:
    good = round_of(2, "a", "b")
    shares = shares_of([10**9, 1], "size")
    updates = tuple(
        replace(update, share=share)
        for update, share in zip(good.updates, shares, strict=True)
    )
    ledger.append(replace(good, updates=updates))
    assert ledger.num_rounds == 3


@pytest.mark.parametrize("probability", [-0.1, 1.1, math.nan, math.inf])
@pytest.mark.parametrize("kept", [True, False])
def test_a_probability_that_is_none(
    ledger: WritableLedger, probability: float, kept: bool
) -> None:
    good = round_of(2, "a", "b")
    bad = replace(good.updates[0], keep_probability=probability, kept=kept)
    assert_refused(
        ledger,
        replace(good, updates=(bad, good.updates[1])),
        "'a'",
        "probability",
        str(probability),
    )


def test_an_update_kept_though_its_probability_was_zero(
    ledger: WritableLedger,
) -> None:
    good = round_of(2, "a", "b")
    bad = replace(good.updates[0], keep_probability=0.0)
    assert_refused(
        ledger, replace(good, updates=(bad, good.updates[1])), "'a'", "probability"
    )


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_dropped_update_with_probability_zero_is_taken_and_can_be_read(
    ledger: WritableLedger, zero: float
) -> None:
    good = round_of(2, "a", "b")
    dropped = replace(good.updates[0], keep_probability=zero, kept=False)
    ledger.append(replace(good, updates=(dropped, good.updates[1])))
    assert ledger.updates_in(2)[0].keep_probability == 0
    if isinstance(ledger, DiskLedger):
        assert verify(ledger).problems == ()


def test_an_update_to_be_kept_that_nobody_has(ledger: WritableLedger) -> None:
    good = round_of(2, "a", "b")
    bad = replace(good.updates[0], delta=None)
    assert_refused(
        ledger,
        replace(good, updates=(bad, good.updates[1]), step=params(1)),
        "'a'",
        "no update",
    )


def test_a_missing_update_without_the_step(ledger: WritableLedger) -> None:
    good = round_of(2, "a", "b")
    unseen = replace(good.updates[0], delta=None, kept=False, keep_probability=0.5)
    assert_refused(
        ledger, replace(good, updates=(unseen, good.updates[1])), "needs its step"
    )


# The round itself.


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


def test_a_round_number_from_numpy_is_a_number(ledger: WritableLedger) -> None:
    number: Any = np.int64(2)
    ledger.append(replace(round_of(2, "a"), index=number))
    assert ledger.rounds()[-1].index == 2


# How the clients trained.


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
    assert "unknown" in str(caught.value)


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


# Names.


@pytest.mark.parametrize(
    ("name", "named"),
    [
        (7, "7"),
        (None, "None"),
        (b"bytes", "b'bytes'"),
        (("a",), "('a',)"),
        ("", "''"),
        ("\ud800", "Unicode"),
        ("a\udfffb", "Unicode"),
        ("x" * 65_537, "65537 bytes"),
        ("\u00e9" * 40_000, "80000 bytes"),
    ],
)
@pytest.mark.parametrize("companions", [(), ("a", "b")])
def test_a_name_that_cannot_be_one(
    ledger: WritableLedger, name: Any, named: str, companions: tuple[str, ...]
) -> None:
    assert_refused(ledger, round_of(2, *companions, name), named)


ODD_NAMES = [
    "../../etc/passwd",
    "/etc/passwd",
    "a/b",
    "a\\b",
    ".",
    "..",
    "a\0b",
    "a\0c",
    "😀",
    "x" * 10_000,
    "x" * 65_536,
    " ",
    "\n",
    "two\nlines",
    "%00",
    "%",
    "_",
    "*",
    "'; DROP TABLE clients; --",
    '"quoted"',
    "A",
    "caf\u00e9",
    "cafe\u0301",
    "\ufeff",
    "nan",
    "1",
    "01",
    "1.0",
]


def test_odd_names_are_plain_data(ledger: WritableLedger, tmp_path: Path) -> None:
    for start in range(0, len(ODD_NAMES), 7):
        ledger.append(round_of(ledger.num_rounds, *ODD_NAMES[start : start + 7]))
    ledger.append(round_of(ledger.num_rounds, *ODD_NAMES, "a"))
    assert set(ledger.clients()) == {*ODD_NAMES, *"abcd"}
    assert [u.client for u in ledger.updates_in(ledger.num_rounds - 1)] == sorted(
        [*ODD_NAMES, "a"]
    )
    for name in ODD_NAMES:
        assert ledger.clients()[name].num_updates == 2
        assert [u.client for u in ledger.updates_of(name)] == [name, name]
        own = np.zeros(LAYOUT.size)
        for index in (update.round for update in ledger.updates_of(name)):
            recorded = read_round(ledger, index)
            assert recorded.step is not None
            [update] = [u for u in recorded.updates if u.client == name]
            assert update.delta is not None
            away = recorded.step.flat.astype(np.float64) - update.delta.flat
            own += update.share / (1 - update.share) * away
        np.testing.assert_allclose(
            ledger.own_difference(name), own, rtol=1e-4, atol=1e-5
        )
    if isinstance(ledger, DiskLedger):
        assert verify(ledger).problems == ()
        assert_only_expected_files(tmp_path)


def assert_only_expected_files(folder: Path) -> None:
    expected = re.compile(
        r"certificates(/event-\d+\.json)?|"
        r"ledger(/(index\.sqlite|lock|arrays(/[0-9a-f]{64}\.safetensors)?))?"
    )
    for path in folder.rglob("*"):
        assert expected.fullmatch(str(path.relative_to(folder))), path


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_client_with_an_odd_name_can_be_forgotten_and_erased(
    ledger: WritableLedger, name: str, tmp_path: Path
) -> None:
    ledger.append(round_of(2, "a", name))
    one = forget(ledger, [name], FastFedUL(skew=NoSkew()), erase=True)
    assert one.clients == (name,)
    assert ledger.clients()[name].state == "erased"
    assert ledger.events()[-1].clients == (name,)
    with pytest.raises(InvalidInputError) as caught:
        ledger.append(round_of(3, "a", name))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    if isinstance(ledger, DiskLedger):
        assert verify(ledger).problems == ()
        ledger.close()
        with LedgerReader(ledger.path) as reader:
            assert reader.clients()[name].state == "erased"
        assert_only_expected_files(tmp_path)


# Asking for what is not there.


@pytest.mark.parametrize("name", ["stranger", "two\nlines", "x" * 10_000, "A", "a "])
def test_forgetting_somebody_unknown_is_refused(
    ledger: WritableLedger, name: str
) -> None:
    before = state_of(ledger)
    with pytest.raises(UnknownClientError) as caught:
        forget(ledger, ["a", name], erase=True)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert state_of(ledger) == before


def test_forgetting_nobody_is_refused(ledger: WritableLedger) -> None:
    before = state_of(ledger)
    with pytest.raises(InvalidInputError, match="at least one"):
        forget(ledger, [], erase=False)
    assert state_of(ledger) == before


def test_forgetting_twice_is_refused(ledger: WritableLedger) -> None:
    before = state_of(ledger)
    with pytest.raises(InvalidInputError, match=r"'d' was forgotten already"):
        forget(ledger, ["d"], erase=False)
    erase(ledger, ["d"])
    after = state_of(ledger)
    assert after != before
    with pytest.raises(InvalidInputError, match=r"'d' was forgotten before"):
        forget(ledger, ["a", "d"], erase=False)
    with pytest.raises(InvalidInputError, match=r"'d' must be forgotten before"):
        erase(ledger, ["d"])
    assert state_of(ledger) == after


def test_erasing_somebody_who_was_not_forgotten_is_refused(
    ledger: WritableLedger,
) -> None:
    before = state_of(ledger)
    with pytest.raises(InvalidInputError, match=r"'a' must be forgotten before"):
        erase(ledger, ["d", "a"])
    assert state_of(ledger) == before


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_forgetting_that_would_make_the_model_infinite_is_refused(
    ledger: WritableLedger, value: float
) -> None:
    before = state_of(ledger)
    with pytest.raises(InvalidInputError, match="infinite"):
        ledger.commit_forgetting(["a"], with_value(value).flat, {}, erase=True)
    assert state_of(ledger) == before


def test_a_request_refused_by_the_method_changes_nothing(
    ledger: WritableLedger,
) -> None:
    before = state_of(ledger)
    with pytest.raises(FastFedULError):
        forget(ledger, ["a"], FastFedUL(skew=Scalar((0.1, 0.1, 0.1))), erase=True)
    with pytest.raises(FastFedULError):
        FastFedUL()(UnlearnRequest(ledger, frozenset({"a", "d"})))
    assert state_of(ledger) == before


# Creating.


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize(
    ("initial", "named"),
    [
        (Model(with_value(math.nan)), "NaN"),
        (Model(with_value(math.inf)), "NaN"),
        (Model(params(0), {"bias": np.zeros(2)}), "'bias'"),
        (Model(params(0), {"kind": np.array(["a"])}), "'kind'"),
        (Model(params(0), {"kind": np.array([1j])}), "'kind'"),
    ],
)
def test_a_model_no_ledger_can_start_from(
    kind: str, initial: Model, named: str, tmp_path: Path
) -> None:
    def create() -> WritableLedger:
        if kind == "memory":
            return MemoryLedger.create(initial)
        return DiskLedger.create(tmp_path / "ledger", initial)

    with pytest.raises(InvalidInputError) as caught:
        create()
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"update_dtype": "float8"}, "'float8'"),
        ({"step_dtype": "int4"}, "'int4'"),
        ({"history": "steps"}, "'steps'"),
        ({"budget": 0}, "choose more"),
        ({"aggregation": "FedAdam"}, "'FedAdam'"),
        ({"aggregation": "fed-avg-m"}, "'fed-avg-m'"),
    ],
)
def test_settings_no_ledger_can_have(
    settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        DiskLedger.create(tmp_path / "ledger", Model(params(0)), **settings)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        with pytest.raises(LedgerError, match=f"{name} exists already"):
            DiskLedger.create(tmp_path / name, Model(params(0)))
    with pytest.raises(LedgerError) as caught:
        DiskLedger.create(tmp_path / "file" / "under", Model(params(0)))
    assert "\n" not in str(caught.value)
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"
    assert (tmp_path / "file").read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir()} == {"full", "file"}


def test_the_folder_one_stands_in_is_taken_or_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused: FastFedULError | None = None
    try:
        DiskLedger.create(".", Model(params(0))).close()
    except FastFedULError as error:
        refused = error
    if refused is None:
        with LedgerReader(tmp_path) as reader:
            assert reader.num_rounds == 0
    else:
        assert "\n" not in str(refused)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [1e9, np.int64(10**9), True, "1e9"])
def test_a_budget_that_is_no_int_is_refused_and_the_ledger_stays(
    tmp_path: Path, value: Any
) -> None:
    path = tmp_path / "ledger"
    with DiskLedger.create(path, Model(params(0))) as ledger:
        ledger.append(round_of(0, "a", "b"))
        with pytest.raises(InvalidInputError, match="budget is a whole number"):
            ledger.set_budget(value)
    with pytest.raises(InvalidInputError, match="whole number"):
        DiskLedger.create(tmp_path / "other", Model(params(0)), budget=value)
    assert not (tmp_path / "other").exists()
    with LedgerReader(path) as reader:
        assert not verify(reader).problems


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


@pytest.mark.parametrize("name", ["a" * 300, "a" * 250, "x\0y"])
def test_a_name_that_no_folder_can_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(LedgerError):
        DiskLedger.create(tmp_path / name, Model(params(0)))
    assert not list(tmp_path.iterdir())
