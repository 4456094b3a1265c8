"""Theorem 1, by hand and against its closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastfedul import (
    ClientUpdate,
    FastFedUL,
    MemoryLedger,
    Model,
    Params,
    Round,
    Scalar,
    UnlearnRequest,
)
from fastfedul.methods.fast_fedul.bound import distance_bound, estimate_lipschitz
from fastfedul.records import RoundEntry

LAYOUT = Params.of({"w": np.zeros(2, np.float32)}).layout


def printed(gammas: list[float], alpha: float, lipschitz: float) -> float:
    """The bound as the paper prints it."""
    last = len(gammas)
    base = 1 + lipschitz
    kept = abs(1 + alpha)
    terms = (
        (base ** (last - 1 - j) - kept ** (last - 1 - j)) / (base - kept) * gammas[j]
        for j in range(last - 1)
    )
    return (lipschitz + abs(alpha)) * sum(terms)


@given(
    gammas=st.lists(st.floats(0, 10), min_size=1, max_size=12),
    damping=st.floats(0.01, 1),
    lipschitz=st.floats(0.01, 2),
)
def test_it_is_the_printed_formula_for_one_damping(
    gammas: list[float], damping: float, lipschitz: float
) -> None:
    found = distance_bound(gammas, [damping] * len(gammas), lipschitz)
    assert found == pytest.approx(printed(gammas, -damping, lipschitz), abs=1e-9)


@given(
    gammas=st.lists(st.floats(0, 10), min_size=1, max_size=12), damping=st.floats(0, 1)
)
def test_factor_and_denominator_cancel(gammas: list[float], damping: float) -> None:
    lipschitz, last = 0.3, len(gammas)
    closed = sum(
        ((1 + lipschitz) ** (last - 1 - j) - (1 - damping) ** (last - 1 - j)) * gamma
        for j, gamma in enumerate(gammas)
    )
    found = distance_bound(gammas, [damping] * last, lipschitz)
    assert found == pytest.approx(closed, rel=1e-9, abs=1e-9)


def test_a_bound_beyond_all_floats_is_infinite_and_no_error() -> None:
    assert distance_bound([1.0] * 5000, [0.07] * 5000, 1.5) == math.inf


def test_the_lipschitz_constant_is_the_largest_relative_change_of_the_step() -> None:
    steps = [np.array([3.0, 4.0]), np.array([3.0, 0.0]), np.array([0.0, 0.0])]
    rounds = [
        RoundEntry(
            index,
            1,
            "store",
            float(np.linalg.norm(step)),
            float(step @ steps[index - 1]) if index else 0.0,
        )
        for index, step in enumerate(steps)
    ]
    assert estimate_lipschitz(rounds) == pytest.approx(max(4 / 5, 3 / 3))
    assert estimate_lipschitz(rounds[:1]) is None


def test_it_holds_where_its_assumptions_do() -> None:
    """Clients whose update is linear in the model are Lipschitz; retrain them."""
    pull = 0.3
    centres = {"ann": np.array([4.0, -2.0]), "bob": np.array([0.0, 1.0])}
    centres["cyd"] = np.array([-1.0, 0.5])

    def train(names: list[str]) -> tuple[np.ndarray, list[Round]]:
        model = np.zeros(2)
        rounds = []
        for index in range(8):
            deltas = {name: pull * (centres[name] - model) for name in names}
            rounds.append(
                Round(
                    index,
                    tuple(
                        ClientUpdate(
                            name,
                            1 / len(names),
                            Params(LAYOUT, value.astype(np.float32)),
                        )
                        for name, value in deltas.items()
                    ),
                )
            )
            model = model + sum(deltas.values()) / len(names)
        return model, rounds

    _, rounds = train(["ann", "bob", "cyd"])
    retrained, _ = train(["bob", "cyd"])
    ledger = MemoryLedger.create(Model(Params(LAYOUT, np.zeros(2, np.float32))))
    for round_ in rounds:
        ledger.append(round_)
    exact = FastFedUL(skew=Scalar(pull))(UnlearnRequest(ledger, frozenset({"ann"})))
    np.testing.assert_allclose(exact.params.flat, retrained, atol=1e-5)
    for damping in (0.0, 0.1, 0.6):
        method = FastFedUL(skew=Scalar(damping))
        result = method(UnlearnRequest(ledger, frozenset({"ann"})))
        distance = float(np.linalg.norm(result.params.flat - retrained))
        assert result.bound.lipschitz == pytest.approx(pull, rel=1e-4)
        assert result.bound.value is not None
        assert 0 < distance <= result.bound.value
