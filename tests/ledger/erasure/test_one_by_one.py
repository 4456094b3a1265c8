"""Forgetting one client after the other equals forgetting both at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastfedul import FastFedUL, MemoryLedger, Scalar, UnlearnRequest, erase, forget
from fastfedul.ledger.protocol import models
from tests.support.histories import (
    CLIENTS,
    TARGET,
    Maker,
    assert_adds_up,
    close_to,
    difference,
    history,
    initial,
    recorded,
    steps_of,
)


@pytest.mark.parametrize("damping", [0.0, 0.07])
@pytest.mark.parametrize("first_erased", [False, True])
@pytest.mark.parametrize("second_erased", [False, True])
def test_one_after_the_other_equals_both_at_once(
    make: Maker, damping: float, first_erased: bool, second_erased: bool
) -> None:
    method = FastFedUL(skew=Scalar(damping))
    rounds = history(8)
    together, apart = make(), make()
    for ledger in (together, apart):
        before = recorded(ledger, rounds)[-1]
    forget(together, [TARGET, "dora"], method, erase=True)
    forget(apart, [TARGET], method, erase=first_erased)
    forget(apart, ["dora"], method, erase=second_erased)
    both = frozenset({TARGET, "dora"})
    close_to(together.final.params.flat, before + difference(rounds, both, damping))
    close_to(apart.final.params.flat, together.final.params.flat, scale=5)
    for name, erased in ((TARGET, first_erased), ("dora", second_erased)):
        if not erased:
            erase(apart, [name])
    close_to(apart.final.params.flat, together.final.params.flat, scale=5)
    for mine, yours in zip(steps_of(apart), steps_of(together), strict=True):
        close_to(mine, yours, scale=5)
    for one_entry, other_entry in zip(apart.rounds(), together.rounds(), strict=True):
        assert one_entry.num_updates == other_entry.num_updates
        for one_update, other_update in zip(
            apart.updates_in(one_entry.index),
            together.updates_in(one_entry.index),
            strict=True,
        ):
            assert one_update.share == pytest.approx(other_update.share, rel=1e-9)
    for one_model, other_model in zip(models(apart), models(together), strict=True):
        close_to(one_model.flat, other_model.flat, scale=5)
    assert_adds_up(apart)
    assert_adds_up(together)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    damping=st.floats(0, 1),
    order=st.permutations(CLIENTS),
    cuts=st.tuples(st.integers(1, 3), st.integers(0, 2)),
    erased=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    drop=st.booleans(),
)
def test_any_sequence_of_requests_equals_one_for_all_of_them(
    seed: int,
    damping: float,
    order: list[str],
    cuts: tuple[int, int],
    erased: tuple[bool, bool, bool],
    drop: bool,
) -> None:
    method = FastFedUL(skew=Scalar(damping), minimum_coverage=0)
    rounds = history(6, drop=drop, seed=seed)
    seen = {u.client for round_ in rounds for u in round_.updates}
    order = [name for name in order if name in seen]
    first, second = cuts[0], cuts[0] + cuts[1]
    groups = [order[:first], order[first:second], order[second : second + 1]]
    together, apart = MemoryLedger.create(initial()), MemoryLedger.create(initial())
    for ledger in (together, apart):
        recorded(ledger, rounds)
    for group, erase_it in zip(groups, erased, strict=True):
        if group:
            # After an erasure the steps of a sample are estimates without the client.
            forget(apart, group, method, erase=erase_it and not drop)
    forget(together, [name for group in groups for name in group], method, erase=False)
    close_to(apart.final.params.flat, together.final.params.flat, scale=20)
    assert_adds_up(apart)


def test_the_standard_error_is_the_same_whether_the_first_was_erased_or_not(
    make: Maker,
) -> None:
    rounds = history(8, drop=True)
    method = FastFedUL(minimum_coverage=0)
    found = []
    for erased in (False, True):
        ledger = make()
        recorded(ledger, rounds)
        forget(ledger, [TARGET], method, erase=erased)
        result = method(UnlearnRequest(ledger, frozenset({"dora"})))
        assert result.standard_error is not None
        found.append(result.standard_error)
    assert found[0] == pytest.approx(found[1], rel=1e-6)
