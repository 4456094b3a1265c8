from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize  # type: ignore[import-untyped]

from fastfedul.ledger.keeping import optimal_probabilities

Floats = npt.NDArray[np.float64]

law = settings(max_examples=100, deadline=None)

moderate = st.floats(1e-3, 1e3)
any_size = st.one_of(
    st.just(0.0),
    moderate,
    st.floats(0, 1e300, allow_subnormal=True),
    st.sampled_from([1.0, 2.0, 1e-30, 1e30, 5e-324, 1e-300, 1e300]),
)
budgets = st.integers(1, 12)


def variance(probabilities: Floats, sizes: Floats) -> float:
    spread = (1 - probabilities) / probabilities * sizes**2
    return float(spread[sizes > 0].sum())


def literal(sizes: list[float], budget: int) -> Floats:
    """METHOD.md 4 word for word, for magnitudes above zero and m below N."""
    count = len(sizes)
    ascending = sorted(sizes)
    below = max(
        number
        for number in range(1, count + 1)
        if 0
        < budget + number - count
        <= math.fsum(ascending[:number]) / ascending[number - 1] * (1 + 1e-12)
    )
    total = math.fsum(ascending[:below])
    left = budget + below - count
    return np.array([min(1.0, left * size / total) for size in sizes])


def by_water_level(sizes: list[float], budget: int) -> Floats:
    """The level h with sum of min(1, size / h) equal to the budget, by bisection."""
    values = np.array(sizes)
    low, high = values.min() / 2, values.sum() * 2
    for _ in range(200):
        level = math.sqrt(low * high)
        if np.minimum(1, values / level).sum() > budget:
            low = level
        else:
            high = level
    return np.minimum(1, values / math.sqrt(low * high))


@law
@given(sizes=st.lists(any_size, min_size=1, max_size=10), budget=budgets)
def test_probabilities_sum_to_the_budget_and_never_exceed_1(
    sizes: list[float], budget: int
) -> None:
    found = optimal_probabilities(sizes, budget)
    assert ((found >= 0) & (found <= 1)).all()
    assert math.isclose(found.sum(), min(budget, len(sizes)), rel_tol=1e-9)


@law
@given(sizes=st.lists(any_size, min_size=1, max_size=10), budget=budgets)
def test_a_larger_magnitude_never_has_the_smaller_probability(
    sizes: list[float], budget: int
) -> None:
    found = optimal_probabilities(sizes, budget)
    in_order = found[np.argsort(sizes, kind="stable")]
    assert (np.diff(in_order) >= -1e-12).all()


@law
@given(
    size=st.floats(1e-300, 1e300), count=st.integers(1, 12), budget=st.integers(1, 12)
)
def test_equal_magnitudes_have_equal_probabilities(
    size: float, count: int, budget: int
) -> None:
    found = optimal_probabilities([size] * count, budget)
    np.testing.assert_allclose(found, min(1.0, budget / count), rtol=1e-12)


@law
@given(
    sizes=st.lists(moderate, min_size=2, max_size=10),
    budget=budgets,
    exponent=st.integers(-900, 900),
)
def test_the_scale_of_the_magnitudes_is_irrelevant(
    sizes: list[float], budget: int, exponent: int
) -> None:
    scaled = np.ldexp(sizes, exponent)
    np.testing.assert_allclose(
        optimal_probabilities(scaled, budget),
        optimal_probabilities(sizes, budget),
        rtol=1e-12,
    )


@law
@given(
    sizes=st.lists(moderate | st.just(0.0), min_size=1, max_size=10),
    budget=budgets,
    data=st.data(),
)
def test_the_order_of_the_clients_is_irrelevant(
    sizes: list[float], budget: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(sizes))))
    permuted = optimal_probabilities([sizes[i] for i in order], budget)
    np.testing.assert_allclose(
        permuted, optimal_probabilities(sizes, budget)[list(order)], rtol=1e-9
    )


@law
@given(sizes=st.lists(moderate, min_size=2, max_size=12), budget=budgets)
def test_probabilities_are_those_of_the_printed_formula(
    sizes: list[float], budget: int
) -> None:
    if budget >= len(sizes):
        budget = len(sizes) - 1
    np.testing.assert_allclose(
        optimal_probabilities(sizes, budget), literal(sizes, budget), rtol=1e-9
    )


@law
@given(sizes=st.lists(moderate, min_size=2, max_size=12), budget=budgets)
def test_probabilities_are_the_magnitudes_over_one_water_level(
    sizes: list[float], budget: int
) -> None:
    if budget >= len(sizes):
        budget = len(sizes) - 1
    np.testing.assert_allclose(
        optimal_probabilities(sizes, budget), by_water_level(sizes, budget), rtol=1e-7
    )


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.floats(0.05, 20), min_size=2, max_size=7),
    budget=st.integers(1, 6),
)
def test_a_numeric_solver_finds_no_smaller_variance(
    sizes: list[float], budget: int
) -> None:
    if budget >= len(sizes):
        budget = len(sizes) - 1
    values = np.array(sizes)
    found = variance(optimal_probabilities(values, budget), values)
    solved = minimize(
        lambda p: float(((1 - p) / p * values**2).sum()),
        np.full(len(sizes), budget / len(sizes)),
        jac=lambda p: -((values / p) ** 2),
        bounds=[(1e-6, 1)] * len(sizes),
        constraints={
            "type": "eq",
            "fun": lambda p: p.sum() - budget,
            "jac": lambda p: np.ones_like(p),
        },
        method="SLSQP",
        options={"maxiter": 500, "ftol": 1e-12},
    )
    # The solver's point counts only once it is made to satisfy the constraints.
    point = np.clip(solved.x, 1e-6, 1)
    reachable = float((values**2).sum())
    assert abs(point.sum() - budget) < 1e-5
    assert found <= variance(point, values) + 1e-4 * reachable
    if solved.success:
        assert math.isclose(
            found, variance(point, values), rel_tol=1e-3, abs_tol=1e-4 * reachable
        )


@law
@given(
    sizes=st.lists(moderate, min_size=3, max_size=8),
    budget=st.integers(1, 7),
    data=st.data(),
)
def test_moving_probability_between_two_clients_never_helps(
    sizes: list[float], budget: int, data: st.DataObject
) -> None:
    values = np.array(sizes)
    best = optimal_probabilities(values, min(budget, len(sizes) - 1))
    left, right = data.draw(
        st.tuples(*[st.integers(0, len(sizes) - 1)] * 2).filter(lambda p: p[0] != p[1])
    )
    room = min(best[left], 1 - best[right])
    other = best.copy()
    amount = 0.5 * room * data.draw(st.floats(0, 1))
    other[left] -= amount
    other[right] += amount
    assert variance(other, values) >= variance(best, values) * (1 - 1e-9)
