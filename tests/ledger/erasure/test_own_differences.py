"""What forgetting one client alone takes, before and after erasures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from fastfedul import FastFedUL, NoSkew, Round, Scalar, UnlearnRequest, erase, forget
from fastfedul.params import Layout
from fastfedul.records import History
from tests.support.histories import (
    CLIENTS,
    TARGET,
    Floats,
    Maker,
    WritableLedger,
    close_to,
    difference,
    history,
    initial,
    recorded,
    without,
)


def own_differences(rounds: Sequence[Round]) -> dict[str, Floats]:
    """How far all rounds together would have gone elsewhere without each client."""
    names = {u.client for round_ in rounds for u in round_.updates}
    return {name: difference(rounds, frozenset({name}), 0.0) for name in names}


def assert_differences_are(ledger: WritableLedger, rounds: Sequence[Round]) -> None:
    expected = own_differences(rounds)
    assert set(expected) == set(ledger.clients())
    for name, own in expected.items():
        close_to(ledger.own_difference(name), own, scale=5)


@pytest.mark.parametrize("kind", ["rounds", "sums"])
def test_a_clients_own_difference_is_that_of_its_rounds(
    make: Maker, kind: History
) -> None:
    rounds = history(10)
    ledger = make(history=kind)
    for round_ in rounds:
        ledger.append(round_)
        assert_differences_are(ledger, rounds[: round_.index + 1])


@pytest.mark.parametrize("kind", ["rounds", "sums"])
def test_a_clients_own_difference_is_right_beyond_the_first_block(
    make: Maker, kind: History
) -> None:
    layout = Layout.of({"w": np.zeros(70_000)})
    rounds = history(5, layout=layout)
    ledger = make(initial(layout), history=kind)
    recorded(ledger, rounds)
    assert_differences_are(ledger, rounds)


def test_a_dropped_update_counts_as_far_as_those_that_were_kept_stand_for_it(
    make: Maker,
) -> None:
    """The same as forgetting the client without any skew."""
    ledger = make()
    recorded(ledger, history(8, drop=True))
    method = FastFedUL(skew=NoSkew(), minimum_coverage=0)
    for name in CLIENTS:
        expected = method(UnlearnRequest(ledger, frozenset({name}))).delta.flat
        close_to(ledger.own_difference(name), expected)


@pytest.mark.parametrize("at_once", [True, False])
def test_after_an_erasure_own_differences_are_those_of_a_training_without_it(
    make: Maker, at_once: bool
) -> None:
    ledger = make()
    rounds = history(10)
    recorded(ledger, rounds[:7])
    forget(ledger, [TARGET], FastFedUL(skew=Scalar()), erase=at_once)
    if not at_once:
        erase(ledger, [TARGET])
    later = [without(round_, {TARGET}) for round_ in rounds[7:]]
    recorded(ledger, later)
    assert not ledger.own_difference(TARGET).any()
    never = own_differences([without(round_, {TARGET}) for round_ in rounds])
    for name, expected in never.items():
        close_to(ledger.own_difference(name), expected, scale=5)


@pytest.mark.parametrize("kind", ["rounds", "sums"])
def test_a_forgotten_client_keeps_its_difference_until_it_is_erased(
    make: Maker, kind: History
) -> None:
    ledger = make(history=kind)
    rounds = history(5)
    recorded(ledger, rounds)
    forget(ledger, [TARGET], erase=False)
    assert_differences_are(ledger, rounds)
    later = [without(r, {TARGET}) for r in history(8)[5:]]
    recorded(ledger, later)
    assert_differences_are(ledger, [*rounds, *later])
