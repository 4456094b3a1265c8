"""The spread that chooses itself, the recursion, and the bound that goes with them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastfedul import (
    ClientUpdate,
    FastFedUL,
    InvalidInputError,
    MemoryLedger,
    Model,
    Params,
    Round,
    UnlearnRequest,
)
from fastfedul.unlearn.bound import distance_bound
from fastfedul.unlearn.choosing import LIMIT, SPREADS, choose_spread
from fastfedul.unlearn.removal import Removal
from fastfedul.unlearn.skew import CoordinateTerms

SIZE = 30
LAYOUT = Params.of({"w": np.zeros(SIZE, np.float32)}).layout
NAMES = ("a", "b", "c", "d", "e")


def ledger_of(
    seed: int, *, push: float = 0.0, factor: float = 1.0, rounds: int = 8
) -> MemoryLedger:
    """Return a federation in which `a` pushes every value by as much each round."""
    rng = np.random.default_rng(seed)
    ledger = MemoryLedger.create(Model(Params.zeros(LAYOUT)))
    for index in range(rounds):
        common = rng.normal(1, 0.1, SIZE)
        updates = []
        for name in NAMES:
            delta = common + rng.normal(0, 0.3, SIZE) + push * (name == "a")
            vector = (factor * delta).astype(np.float32)
            updates.append(ClientUpdate(name, 0.2, Params(LAYOUT, vector)))
        ledger.append(Round(index, tuple(updates)))
    return ledger


def forgotten(ledger: MemoryLedger, *names: str) -> Removal:
    return FastFedUL()(UnlearnRequest(ledger, frozenset(names)))


def test_an_ordinary_client_is_forgotten_with_the_usual_spread() -> None:
    found = forgotten(ledger_of(1), "b")
    assert found.skew == "coordinate"
    assert found.spread == SPREADS[0]
    assert found.choice is not None
    assert found.choice.kept
    assert found.choice.curve[0][1] <= LIMIT


def test_the_spread_is_the_least_that_keeps_to_the_limit() -> None:
    found = forgotten(ledger_of(2, push=-6.0), "a")
    assert found.choice is not None
    assert found.spread is not None
    moved = dict(found.choice.curve)
    assert tuple(moved) == SPREADS
    assert found.spread > SPREADS[0]
    assert moved[found.spread] <= LIMIT
    assert all(moved[s] > LIMIT for s in SPREADS if s < found.spread)
    falling = list(moved.values())
    assert falling == sorted(falling, reverse=True)


def test_what_no_spread_can_keep_to_gets_the_largest_and_is_told() -> None:
    """All clients agree on nearly every value, and the model went nowhere."""
    flat = np.ones(SIZE, np.float32)
    terms = CoordinateTerms(
        removed=flat,
        spread=np.where(np.arange(SIZE) == 0, 1, 1e-6).astype(np.float32),
        persistence=0 * flat,
        clipped=0.0,
        gamma_norms=(),
        num_unseen=0,
        movement=1e-3 * flat,
    )
    found = choose_spread(terms, 1.0)
    assert found.value == SPREADS[-1]
    assert not found.kept


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 99), st.floats(-8, 8), st.sampled_from([1e-3, 0.1, 8.0, 100.0]))
def test_the_choice_does_not_depend_on_the_size_of_all_updates(
    seed: int, push: float, factor: float
) -> None:
    one = forgotten(ledger_of(seed, push=push), "a")
    other = forgotten(ledger_of(seed, push=push, factor=factor), "a")
    assert one.choice is not None
    assert other.choice is not None
    for (_, mine), (_, yours) in zip(one.choice.curve, other.choice.curve, strict=True):
        assert yours == pytest.approx(mine, rel=1e-2, abs=1e-9)


def test_a_model_that_never_moved_is_no_reason_to_fail() -> None:
    ledger = MemoryLedger.create(Model(Params.zeros(LAYOUT)))
    nothing = Params.zeros(LAYOUT)
    ledger.append(Round(0, tuple(ClientUpdate(n, 0.2, nothing) for n in NAMES)))
    found = forgotten(ledger, "a")
    assert not found.delta.flat.any()
    assert found.spread == SPREADS[0]


def test_a_median_is_forgotten_from_with_the_papers_damping() -> None:
    ledger = MemoryLedger.create(Model(Params.zeros(LAYOUT)), aggregation="median")
    for round_ in range(2):
        updates = tuple(
            ClientUpdate(n, 0.2, Params(LAYOUT, np.full(SIZE, float(i), np.float32)))
            for i, n in enumerate(NAMES)
        )
        ledger.append(Round(round_, updates))
    found = forgotten(ledger, "a")
    assert (found.skew, found.damping) == ("scalar", (0.07, 0.07))


def test_a_damping_is_the_papers_and_does_not_go_with_coordinates() -> None:
    request = UnlearnRequest(ledger_of(1), frozenset({"a"}))
    assert FastFedUL(damping=0.1)(request).skew == "scalar"
    assert FastFedUL(damping=0)(request).skew == "none"
    with pytest.raises(InvalidInputError, match="one number for all coordinates"):
        FastFedUL(damping=0.1, skew="coordinate")
    with pytest.raises(InvalidInputError, match="a recursion needs a spread"):
        FastFedUL(skew="coordinate", recursion=True)


@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0])
@pytest.mark.parametrize("persistence", [0.0, 2.0])
def test_the_recursion_is_the_formula_round_by_round(
    spread: float, persistence: float
) -> None:
    ledger = ledger_of(5, push=1.0)
    request = UnlearnRequest(ledger, frozenset({"a", "c"}))
    method = FastFedUL(spread=spread, persistence=persistence, recursion=True)
    found = method(request).delta.flat
    undamped = FastFedUL(spread=0, persistence=0)(request).delta.flat
    once = FastFedUL(spread=1, persistence=0)(request).delta.flat
    relative = -np.log(once.astype(np.float64) / undamped)
    own = FastFedUL(spread=0, persistence=persistence)(request).delta.flat / undamped
    iterations = FastFedUL(damping=0).iterations(request)
    start = ledger.final.params.flat
    before: np.ndarray = np.zeros(SIZE)
    expected = np.zeros(SIZE)
    for params in iterations:
        total = params.flat - start
        expected = np.exp(-spread / 10 * relative) * expected + (total - before)
        before = total
    np.testing.assert_allclose(found, own * expected, rtol=2e-3, atol=2e-4)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(0, 3), st.booleans())
def test_the_bound_holds_where_its_assumption_does(
    seed: int, spread: float, recursion: bool
) -> None:
    """Clients whose updates are linear in the model, so that K is known."""
    rng = np.random.default_rng(seed)
    lipschitz = 0.4
    slopes = rng.uniform(0, lipschitz, (len(NAMES), SIZE))
    aims = rng.normal(0, 1, (len(NAMES), SIZE)) + 3 * np.eye(len(NAMES), 1)

    def train(here: list[int]) -> tuple[MemoryLedger, np.ndarray]:
        ledger = MemoryLedger.create(Model(Params.zeros(LAYOUT)))
        for index in range(6):
            model = ledger.final.params.flat
            updates = tuple(
                ClientUpdate(
                    NAMES[i],
                    1 / len(here),
                    Params(LAYOUT, (slopes[i] * (aims[i] - model)).astype(np.float32)),
                )
                for i in here
            )
            ledger.append(Round(index, updates))
        return ledger, ledger.final.params.flat

    ledger, _ = train([0, 1, 2, 3, 4])
    _, retrained = train([1, 2, 3, 4])
    request = UnlearnRequest(ledger, frozenset({"a"}))
    found = FastFedUL(spread=spread, recursion=recursion)(request)
    undamped = FastFedUL(damping=0)(request)
    left_in = float(np.linalg.norm(undamped.delta.flat - found.delta.flat))
    known = distance_bound(found.gamma_norms, [0.0] * 6, lipschitz) + left_in
    assert np.linalg.norm(found.params.flat - retrained) <= known * (1 + 1e-4) + 1e-5
    assert found.bound.value is not None
    assert undamped.bound.value is not None
    assert found.bound.value == pytest.approx(undamped.bound.value + left_in, rel=1e-3)
