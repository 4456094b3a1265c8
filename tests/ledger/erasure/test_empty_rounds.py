"""Rounds in which nobody is left, or nothing is left for the others."""

from __future__ import annotations

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    FastFedUL,
    NoSkew,
    Params,
    Round,
    Scalar,
    UnlearnRefusedError,
    forget,
    params_at,
    read_round,
)
from fastfedul.ledger import checks
from tests.support.histories import (
    CLIENTS,
    LAYOUT,
    TARGET,
    Maker,
    alone,
    assert_adds_up,
    close_to,
    history,
    initial,
    normal,
    recorded,
    steps_of,
)


@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_a_round_with_nobody_else_stays_as_an_empty_round(
    make: Maker, damping: float
) -> None:
    ledger = make()
    method = FastFedUL(skew=Scalar(damping))
    ledger.append(alone(0, "anna", TARGET))
    ledger.append(alone(1, TARGET))
    ledger.append(alone(2, "anna", "carl"))
    gammas = [
        normal(60, 0, 0).astype(np.float64) * 0.5 - normal(60, 0, 1) * 0.5,
        -normal(60, 1, 0).astype(np.float64),
        np.zeros(LAYOUT.size),
    ]
    expected = ledger.final.params.flat.astype(np.float64)
    expected += sum((1 - damping) ** (2 - t) * gamma for t, gamma in enumerate(gammas))
    forget(ledger, [TARGET], method, erase=True)
    close_to(ledger.final.params.flat, expected)
    empty = ledger.rounds()[1]
    assert (empty.num_updates, empty.step_norm) == (0, 0.0)
    np.testing.assert_array_equal(steps_of(ledger)[1], 0)
    assert ledger.updates_in(1) == ()
    assert read_round(ledger, 1).updates == ()
    assert ledger.num_rounds == 3
    assert_adds_up(ledger)
    forget(ledger, ["carl"], method, erase=True)
    ledger.append(alone(3, "anna"))
    forget(ledger, ["anna"], method, erase=True)
    assert [entry.num_updates for entry in ledger.rounds()] == [0, 0, 0, 0]
    for step in steps_of(ledger):
        np.testing.assert_array_equal(step, 0)
    assert_adds_up(ledger)


def test_a_round_is_empty_once_the_last_of_its_clients_is_erased(make: Maker) -> None:
    ledger = make()
    rounds = history(4, partial=False)
    recorded(ledger, rounds)
    method = FastFedUL(skew=NoSkew())
    for name in CLIENTS:
        forget(ledger, [name], method, erase=True)
    for entry in ledger.rounds():
        assert (entry.num_updates, entry.step_norm) == (0, 0.0)
    close_to(ledger.final.params.flat, ledger.initial.params.flat, scale=10)
    close_to(params_at(ledger, 3).flat, initial().params.flat, scale=10)


@pytest.mark.parametrize("shares", [(1.0, 1e-9), (1.0000000005, 1e-10)])
def test_a_round_whose_others_have_no_share_left_is_refused_in_words(
    shares: tuple[float, float],
    make: Maker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger = make()
    delta = Params(LAYOUT, normal(1))
    updates = tuple(
        ClientUpdate(name, share, delta)
        for name, share in zip("ab", shares, strict=True)
    )
    with monkeypatch.context() as older:
        older.setattr(checks, "_check_participants", lambda *_: None)
        ledger.append(Round(0, updates))
    before = ledger.final.params.flat.copy()
    with pytest.raises(UnlearnRefusedError, match="for the others in round 0"):
        forget(ledger, ["a"], erase=True)
    assert np.array_equal(ledger.final.params.flat, before)
    assert ledger.clients()["a"].state == "active"
    assert ledger.clients()["b"].state == "active"
