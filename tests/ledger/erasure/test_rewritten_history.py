"""The history is that of a training in which the client never took part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastfedul import (
    DiskLedger,
    FastFedUL,
    InvalidInputError,
    Scalar,
    erase,
    forget,
    params_at,
    read_round,
    verify,
)
from fastfedul.ledger.protocol import models
from tests.support.histories import (
    TARGET,
    Maker,
    assert_adds_up,
    close_to,
    difference,
    flat_of,
    history,
    mean_without,
    recorded,
    steps_of,
    without,
)


@pytest.mark.parametrize("damping", [0.0, 0.07, 1.0])
@pytest.mark.parametrize("at_once", [True, False])
def test_the_rewritten_history_is_the_one_without_the_client(
    make: Maker, damping: float, at_once: bool
) -> None:
    ledger = make()
    rounds = history(8)
    before = recorded(ledger, rounds)
    if at_once:
        forget(ledger, [TARGET], FastFedUL(skew=Scalar(damping)), erase=True)
    else:
        forget(ledger, [TARGET], FastFedUL(skew=Scalar(damping)), erase=False)
        erase(ledger, [TARGET])
    gone = frozenset({TARGET})
    close_to(ledger.final.params.flat, before[-1] + difference(rounds, gone, damping))
    model = ledger.initial.params.flat.astype(np.float64)
    steps = steps_of(ledger)
    for index, round_ in enumerate(rounds):
        close_to(params_at(ledger, index).flat, model)
        close_to(steps[index], mean_without(round_, gone))
        model += mean_without(round_, gone)
        entry = ledger.rounds()[index]
        stayed = {u.client: u.share for u in without(round_, {TARGET}).updates}
        assert entry.num_updates == len(stayed)
        shares = {u.client: u.share for u in ledger.updates_in(index)}
        assert shares == pytest.approx(stayed, rel=1e-12)
        assert {u.client: u.share for u in read_round(ledger, index).updates} == shares
        assert entry.step_norm == pytest.approx(np.linalg.norm(steps[index]), rel=1e-5)
        if index:
            product = float(steps[index - 1].astype(np.float64) @ steps[index])
            assert entry.previous_product == pytest.approx(product, rel=1e-4, abs=1e-4)
    np.testing.assert_array_equal(params_at(ledger, 8).flat, ledger.final.params.flat)
    assert ledger.updates_of(TARGET) == ()
    assert_adds_up(ledger)
    with pytest.raises(InvalidInputError, match=f"'{TARGET}' was forgotten"):
        ledger.append(replace(history(9, partial=False)[8], index=8))


def test_rounds_without_the_client_stay_as_they_were_to_the_last_bit(
    make: Maker,
) -> None:
    ledger = make()
    rounds = history(8)
    recorded(ledger, rounds)
    before = steps_of(ledger)
    away = [r.index for r in rounds if all(u.client != TARGET for u in r.updates)]
    assert away
    forget(ledger, [TARGET], erase=True)
    after = steps_of(ledger)
    for index in away:
        np.testing.assert_array_equal(after[index], before[index])
        shares = {u.client: u.share for u in rounds[index].updates}
        assert {u.client: u.share for u in ledger.updates_in(index)} == shares


def test_the_updates_of_those_who_stay_are_untouched(make: Maker) -> None:
    ledger = make(update_dtype="int8")
    rounds = history(8, drop=True)
    recorded(ledger, rounds)

    def kept() -> dict[tuple[int, str], bytes]:
        return {
            (index, update.client): update.delta.flat.tobytes()
            for index in range(8)
            for update in read_round(ledger, index).updates
            if update.client != TARGET and update.delta is not None
        }

    def entries() -> list[object]:
        return [
            (u.round, u.client, u.keep_probability, u.kept, u.entered, u.norm)
            for index in range(8)
            for u in ledger.updates_in(index)
            if u.client != TARGET
        ]

    before = kept(), entries()
    forget(ledger, [TARGET], FastFedUL(minimum_coverage=0), erase=True)
    assert (kept(), entries()) == before


def test_a_model_before_a_forgetting_is_still_what_the_server_had(
    make: Maker,
) -> None:
    ledger = make()
    rounds = history(8)
    had = recorded(ledger, rounds[:5])
    forget(ledger, [TARGET], erase=False)
    cleaned = ledger.final.params.flat.copy()
    later = [without(r, {TARGET}) for r in rounds[5:]]
    had[5:] = recorded(ledger, later)
    np.testing.assert_array_equal(had[5], cleaned)
    for index, expected in enumerate(had):
        np.testing.assert_array_equal(params_at(ledger, index).flat, expected)
    assert_adds_up(ledger)


def test_a_model_between_two_forgettings_at_one_time_is_what_the_server_had(
    make: Maker,
) -> None:
    ledger = make()
    rounds = history(8)
    recorded(ledger, rounds[:5])
    forget(ledger, [TARGET], erase=False)
    forget(ledger, ["emil"], erase=False)
    cleaned = ledger.final.params.flat.copy()
    ledger.append(without(rounds[5], {TARGET, "emil"}))
    np.testing.assert_allclose(params_at(ledger, 5).flat, cleaned, rtol=1e-5)


def test_a_late_erasure_changes_no_model_since_the_forgetting(make: Maker) -> None:
    ledger = make()
    rounds = history(9)
    recorded(ledger, rounds[:5])
    forget(ledger, [TARGET], FastFedUL(skew=Scalar(0.3)), erase=False)
    recorded(ledger, [without(r, {TARGET}) for r in rounds[5:]])
    before = [params.flat.copy() for params in models(ledger)]
    final = ledger.final.params.flat.tobytes()
    erase(ledger, [TARGET])
    assert ledger.final.params.flat.tobytes() == final
    after = [params.flat for params in models(ledger)]
    for index in range(5, 10):
        close_to(after[index], before[index], scale=10)
    model = ledger.initial.params.flat.astype(np.float64)
    for index in range(5):
        close_to(after[index], model)
        model += mean_without(rounds[index], frozenset({TARGET}))
    assert_adds_up(ledger)


def test_forgetting_and_erasing_later_equals_doing_both_at_once(make: Maker) -> None:
    rounds = history(8)
    one, other = make(), make()
    for ledger in (one, other):
        recorded(ledger, rounds)
    forget(one, [TARGET, "dora"], erase=True)
    forget(other, [TARGET, "dora"], erase=False)
    forgotten = other.final.params.flat.tobytes()
    erase(other, [TARGET, "dora"])
    assert other.final.params.flat.tobytes() == forgotten
    assert one.final.params.flat.tobytes() == forgotten
    assert one.rounds() == other.rounds()
    for mine, yours in zip(steps_of(one), steps_of(other), strict=True):
        np.testing.assert_array_equal(mine, yours)
    for one_model, other_model in zip(models(one), models(other), strict=True):
        np.testing.assert_array_equal(one_model.flat, other_model.flat)
    if isinstance(one, DiskLedger) and isinstance(other, DiskLedger):
        assert one.chain == other.chain


def test_clients_forgotten_at_different_times_are_erased_one_by_one(
    make: Maker,
) -> None:
    ledger = make()
    rounds = history(8)
    recorded(ledger, rounds[:4])
    forget(ledger, [TARGET], erase=False)
    recorded(ledger, [without(r, {TARGET}) for r in rounds[4:6]])
    forget(ledger, ["emil"], erase=False)
    recorded(ledger, [without(r, {TARGET, "emil"}) for r in rounds[6:]])
    final = ledger.final.params.flat.tobytes()
    with pytest.raises(InvalidInputError, match="forgotten together"):
        erase(ledger, [TARGET, "emil"])
    erase(ledger, ["emil"])
    erase(ledger, [TARGET])
    assert ledger.final.params.flat.tobytes() == final
    for index, round_ in enumerate(rounds):
        rest = frozenset({TARGET, "emil"})
        close_to(steps_of(ledger)[index], mean_without(round_, rest), scale=5)
    assert_adds_up(ledger)


def test_a_step_that_the_client_cannot_leave_wholly_is_the_mean_of_the_others(
    make: Maker,
) -> None:
    ledger = make()
    rounds = history(8, drop=True)
    recorded(ledger, rounds)
    forget(ledger, [TARGET], FastFedUL(minimum_coverage=0), erase=True)
    for round_, step in zip(rounds, steps_of(ledger), strict=True):
        if all(update.client != TARGET for update in round_.updates):
            continue
        kept = [u for u in round_.updates if u.client != TARGET and u.kept]
        total = sum(update.share for update in kept)
        expected = np.zeros(step.size)
        for update in kept:
            expected += update.share / total * flat_of(update)
        close_to(step, expected)
    assert_adds_up(ledger)


def test_a_sample_that_was_aggregated_loses_exactly_the_client(make: Maker) -> None:
    ledger = make()
    rounds = [replace(r, use="aggregate") for r in history(6, drop=True)]
    recorded(ledger, rounds)
    forget(ledger, [TARGET], FastFedUL(minimum_coverage=0), erase=True)
    for round_, step in zip(rounds, steps_of(ledger), strict=True):
        rest = [u for u in round_.updates if u.client != TARGET]
        left = sum(update.share for update in rest)
        expected = np.zeros(step.size)
        for update in rest:
            if update.kept:
                weight = update.share / update.keep_probability / left
                expected += weight * flat_of(update)
        close_to(step, expected)


def test_the_first_model_takes_up_every_adjustment(make: Maker) -> None:
    ledger = make()
    rounds = history(6)
    recorded(ledger, rounds[:4])
    first = ledger.initial
    forget(ledger, ["emil"], FastFedUL(skew=Scalar(0.3)), erase=False)
    recorded(ledger, [without(r, {"emil"}) for r in rounds[4:]])
    assert len(ledger.adjustments()) == 1
    assert np.array_equal(ledger.initial.params.flat, first.params.flat)
    forget(ledger, [TARGET], FastFedUL(skew=Scalar(0.3)), erase=True)
    assert ledger.adjustments() == {}
    assert not np.allclose(ledger.initial.params.flat, first.params.flat)
    assert ledger.initial.buffers.keys() == first.buffers.keys()
    assert_adds_up(ledger)
    if isinstance(ledger, DiskLedger):
        assert verify(ledger).problems == ()
