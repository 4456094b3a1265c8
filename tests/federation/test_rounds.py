"""Who takes part in a round, and what becomes of their updates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastfedul import DiskLedger, Model, Params, Round
from fastfedul.errors import InvalidInputError
from fastfedul.federation.local import LocalResult
from fastfedul.federation.rounds import (
    Schedule,
    advance,
    average_buffers,
    participants,
    run_rounds,
    shares_of,
)
from fastfedul.ledger.keeping import Keep
from fastfedul.ledger.memory import MemoryLedger
from fastfedul.rng import name_key, stream

NAMES = tuple(f"client-{number}" for number in range(12))
SIZES = {name: 10 + number for number, name in enumerate(NAMES)}
START = Model(Params.of({"w": np.linspace(-1, 1, 50), "b": np.zeros(3)}))


def work(model: Model, index: int, names: Sequence[str]) -> list[LocalResult]:
    """Pull the model to a point of each client's own, with some noise."""
    results = []
    for name in names:
        rng = stream(1, "toy", index, name_key(name))
        own = stream(1, "own", name_key(name)).standard_normal(53)
        pull = 0.1 * (own - model.params.flat) + 0.01 * rng.standard_normal(53)
        delta = Params(model.params.layout, pull.astype(np.float32))
        results.append(LocalResult(delta, {}))
    return results


def rounds_of(schedule: Schedule, **rest: object) -> list[Round]:
    arguments = {"model": START, "stop": 6, **rest}
    trained = run_rounds(work, SIZES, schedule, **arguments)  # type: ignore[arg-type]
    return [one.round for one in trained]


def assert_same(left: list[Round], right: list[Round]) -> None:
    assert [r.index for r in left] == [r.index for r in right]
    for one, other in zip(left, right, strict=True):
        assert [u.client for u in one.updates] == [u.client for u in other.updates]
        for u, v in zip(one.updates, other.updates, strict=True):
            assert u.delta is not None
            assert v.delta is not None
            assert u.share == v.share
            assert u.delta.flat.tobytes() == v.delta.flat.tobytes()


def test_everybody_takes_part_by_default_in_the_order_of_names() -> None:
    [first, *_] = rounds_of(Schedule(seed=1))
    assert [u.client for u in first.updates] == sorted(NAMES)


def test_shares_go_by_size_or_are_equal_and_sum_to_one() -> None:
    [first, *_] = rounds_of(Schedule(seed=1, per_round=5))
    total = sum(SIZES[u.client] for u in first.updates)
    assert [u.share for u in first.updates] == [
        SIZES[u.client] / total for u in first.updates
    ]
    assert shares_of([3, 9, 27], "equal") == [1 / 3] * 3


def test_so_many_are_drawn_and_others_in_other_rounds() -> None:
    schedule = Schedule(seed=3, per_round=4)
    drawn = [participants(NAMES, schedule, index) for index in range(40)]
    assert {len(names) for names in drawn} == {4}
    assert len(set(drawn)) > 20
    assert set().union(*drawn) == set(NAMES)


def test_dropout_is_as_frequent_as_asked() -> None:
    schedule = Schedule(seed=3, dropout=0.3)
    present = [len(participants(NAMES, schedule, index)) for index in range(200)]
    assert np.mean(present) == pytest.approx(0.7 * len(NAMES), rel=0.05)


@given(
    st.integers(0, 5), st.integers(0, 30), st.sampled_from(NAMES), st.integers(2, 12)
)
def test_an_absent_client_leaves_its_slot_empty(
    seed: int, index: int, gone: str, per_round: int
) -> None:
    schedule = Schedule(seed=seed, per_round=per_round, dropout=0.2)
    everybody = participants(NAMES, schedule, index)
    rest = participants(NAMES, schedule, index, {gone})
    expected = tuple(name for name in everybody if name != gone)
    assert rest == expected or not expected


def test_leaving_one_out_changes_nobody_elses_first_update() -> None:
    with_all = rounds_of(Schedule(seed=2, per_round=6), stop=1)[0]
    gone = with_all.updates[2].client
    without = rounds_of(Schedule(seed=2, per_round=6), stop=1, absent={gone})[0]
    before = {u.client: u.delta for u in with_all.updates}
    assert {u.client for u in without.updates} == set(before) - {gone}
    for update in without.updates:
        kept = before[update.client]
        assert kept is not None
        assert update.delta is not None
        assert update.delta.flat.tobytes() == kept.flat.tobytes()


def test_a_round_is_never_empty() -> None:
    schedule = Schedule(seed=0, per_round=1, dropout=0.9)
    for index in range(100):
        assert participants(NAMES, schedule, index, set(NAMES[:-2]))


def test_with_nobody_left_there_is_an_error() -> None:
    with pytest.raises(InvalidInputError, match="no client is left"):
        participants(NAMES, Schedule(seed=0), 0, set(NAMES))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"per_round": 0}, "1 or more"),
        ({"dropout": 1.0}, "below 1"),
        ({"dropout": -0.1}, "0 or more"),
        ({"weighting": "loudest"}, "size or equal"),
    ],
)
def test_a_bad_schedule_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Schedule(seed=0, **wrong)  # type: ignore[arg-type]


def test_more_cannot_be_drawn_than_there_are() -> None:
    with pytest.raises(InvalidInputError, match="at most 12"):
        participants(NAMES, Schedule(seed=0, per_round=13), 0)


@pytest.mark.parametrize("start", [0, 1, 4, 6])
def test_a_run_taken_up_anywhere_gives_the_same_rest(start: int) -> None:
    schedule = Schedule(seed=5, per_round=7, dropout=0.3)
    whole = rounds_of(schedule)
    model = START
    for round_ in whole[:start]:
        model = advance(model, round_)
    assert_same(rounds_of(schedule, start=start, model=model), whole[start:])


@pytest.mark.parametrize("policy", ["all", "optimal:3", "top:2", "uniform:4"])
@pytest.mark.parametrize("use", ["store", "aggregate"])
def test_the_next_model_has_the_very_bits_of_the_ledgers(
    policy: str, use: str, tmp_path: Path
) -> None:
    keep = Keep.parse(policy, use=use, seed=3)  # type: ignore[arg-type]
    path = tmp_path / "ledger"
    memory = MemoryLedger.create(START)
    model = START
    with DiskLedger.create(path, START) as disk:
        for round_ in rounds_of(Schedule(seed=4, per_round=5), select=keep):
            memory.append(round_)
            disk.append(round_)
            model = advance(model, round_)
        for ledger in (memory, disk):
            expected = ledger.final.params.flat.tobytes()
            assert model.params.flat.tobytes() == expected


def test_attackers_scale_their_updates() -> None:
    plain = rounds_of(Schedule(seed=1), stop=1)[0]
    scaled = rounds_of(Schedule(seed=1), stop=1, scales={"client-3": 4.0})[0]
    for before, after in zip(plain.updates, scaled.updates, strict=True):
        assert before.delta is not None
        assert after.delta is not None
        factor = 4 if before.client == "client-3" else 1
        np.testing.assert_array_equal(after.delta.flat, factor * before.delta.flat)


def test_buffers_are_averaged_and_counters_take_the_largest() -> None:
    current = {"mean": np.zeros(2, np.float32), "count": np.array(3)}
    local = [
        {"mean": np.array([1, 2], np.float32), "count": np.array(5)},
        {"mean": np.array([3, 6], np.float32), "count": np.array(9)},
        {"mean": np.array([100, 100], np.float32), "count": np.array(99)},
    ]
    after = average_buffers(local, [0.5, 1.5, 0.0], current)
    np.testing.assert_array_equal(after["mean"], np.array([2.5, 5.0], np.float32))
    assert after["mean"].dtype == np.float32
    assert after["count"] == 9
    assert average_buffers(local, [0, 0, 0], current) is current
