"""Attacks on an erased ledger: least squares for the updates of the client that left.

Every number and vector that the ledger still has may help. An attack is at chance if
its estimates are no nearer to the client's updates than to updates of a stranger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    FastFedUL,
    Keep,
    LedgerReader,
    Model,
    Params,
    Round,
    Scalar,
    ServerOptimizer,
    UnlearnRequest,
    forget,
)
from fastfedul.ledger.protocol import vector
from fastfedul.records import ServerState, VectorRef
from fastfedul.rng import stream

Floats = npt.NDArray[np.float64]
Policy = Literal["rounds", "sums", "optimal"]
LEAVER = "leaver"
WITHOUT_MINIMUM = FastFedUL(minimum_coverage=0)
SCALAR = FastFedUL(skew=Scalar(0.07), minimum_coverage=0)


@dataclass(frozen=True)
class Truth:
    """A ledger before the erasure, and the updates that an attacker looks for.

    Attributes:
        path: The ledger.
        updates: The leaver's updates, a row for each round.
        strangers: Updates of a client that was never there, drawn alike.
        shares: The leaver's share of each round.
        first: The first model.
        products: Inner products of the others' updates with the steps.
        steps: The steps.
    """

    path: Path
    updates: Floats
    strangers: Floats
    shares: Floats
    first: Floats
    products: dict[tuple[int, str], float]
    steps: Floats


def normal(*key: int, size: int) -> npt.NDArray[np.float32]:
    return stream(3, "reconstruction", *key).normal(size=size).astype(np.float32)


def recorded(
    path: Path,
    policy: Policy,
    seed: int,
    size: int,
    rounds: int,
    others: int,
    *,
    steady: bool = False,
    optimizer: ServerOptimizer | None = None,
    taking_part: float = 1.0,
    sums_from: int = 1,
) -> Truth:
    """Record rounds of random updates; unless steady, shares vary between rounds."""
    names = [f"c{i}" for i in range(others)] + [LEAVER]
    start = Params.of({"w": normal(seed, size=size)})
    keep = Keep("optimal", others - 2) if policy == "optimal" else Keep()
    history: Literal["rounds", "sums"] = "sums" if policy == "sums" else "rounds"
    own: list[Floats] = []
    shares: list[float] = []
    options: Any = {
        "history": history,
        "optimizer": optimizer,
        "sums_from": sums_from,
    }
    with DiskLedger.create(path, Model(start), **options) as ledger:
        for index in range(rounds):
            key = 0 if steady else index
            drawn = stream(seed, "shares", key).uniform(0.5, 2.0, len(names))
            there = stream(seed, "there", index).random(len(names)) < taking_part
            there[-3:] = True
            drawn *= there
            part = drawn / drawn.sum()
            updates = tuple(
                ClientUpdate(
                    name,
                    float(part[i]),
                    Params.of({"w": normal(seed, index, i, size=size)}),
                )
                for i, name in enumerate(names)
                if there[i]
            )
            ledger.append(keep(Round(index, updates)))
            own.append(normal(seed, index, others, size=size).astype(np.float64))
            shares.append(float(part[-1]))
        sums = policy == "sums"
        steps = [] if sums else [vector(ledger, VectorRef(t)) for t in range(rounds)]
        products = {
            (update.round, update.client): float(update.step_product or 0.0)
            for index in range(rounds)
            for update in ledger.updates_in(index)
        }
    strangers = [normal(seed, t, others + 1, size=size) for t in range(rounds)]
    return Truth(
        path,
        np.array(own),
        np.array(strangers, np.float64),
        np.array(shares),
        start.flat.astype(np.float64),
        products,
        np.array(steps, np.float64),
    )


def erased(truth: Truth, method: FastFedUL) -> None:
    with DiskLedger(truth.path) as ledger:
        forget(ledger, [LEAVER], method, erase=True, key=None)


@dataclass(frozen=True)
class Remains:
    """Everything linear that an attacker has, by round.

    Attributes:
        updates: Kept updates of the others with their weights.
        steps: The steps.
        products: Known inner products of the others' updates with the old steps.
        shares: Shares of the leaver, or a guess.
        start: The initial model.
        end: The current model.
    """

    updates: list[dict[str, tuple[float, Floats]]]
    steps: Floats
    products: dict[tuple[int, str], float]
    shares: Floats
    start: Floats
    end: Floats


def remains_of(path: Path) -> Remains:
    with LedgerReader(path) as ledger:
        count = ledger.num_rounds
        updates: list[dict[str, tuple[float, Floats]]] = []
        products = {}
        for index in range(count):
            kept = [u for u in ledger.updates_in(index) if u.kept]
            total = sum(u.weight for u in kept)
            vectors = (vector(ledger, VectorRef(index, u.client)) for u in kept)
            updates.append(
                {
                    u.client: (u.weight / total, v.astype(np.float64))
                    for u, v in zip(kept, vectors, strict=True)
                }
            )
            for u in ledger.updates_in(index):
                if u.step_product is not None:
                    products[index, u.client] = u.step_product
        assert ledger.adjustments() == {}
        guess = 1 / (1 + ledger.rounds()[0].num_updates)
        return Remains(
            updates,
            np.array([vector(ledger, VectorRef(t)) for t in range(count)], np.float64),
            products,
            np.full(count, guess),
            ledger.initial.params.flat.astype(np.float64),
            ledger.final.params.flat.astype(np.float64),
        )


def mean_of(updates: dict[str, tuple[float, Floats]]) -> Floats:
    parts = [weight * update for weight, update in updates.values()]
    return np.asarray(np.sum(parts, axis=0))


def from_products(known: Remains) -> Floats:
    """Old steps by least squares from inner products, then what the others did not."""
    found = []
    for index, updates in enumerate(known.updates):
        told = [n for n in updates if (index, n) in known.products]
        if not told:
            found.append(np.zeros_like(known.start))
            continue
        rows = np.array([updates[name][1] for name in told])
        values = np.array([known.products[index, name] for name in told])
        step = np.linalg.lstsq(rows, values, rcond=None)[0]
        share = known.shares[index]
        found.append((step - (1 - share) * mean_of(updates)) / share)
    return np.array(found)


def from_steps(known: Remains) -> Floats:
    """The part of each step that the others' kept updates do not explain."""
    means = np.array([mean_of(updates) for updates in known.updates])
    return np.asarray(known.steps - means)


def from_models(known: Remains) -> Floats:
    """The least-norm updates that explain how the model differs from its steps."""
    count = len(known.steps)
    left = known.end - known.start - known.steps.sum(axis=0)
    decay = (1 - 0.07) ** np.arange(count - 1, -1, -1.0) - 1
    factors = decay * known.shares
    # The sum of factor * (step - update) is what is left.
    rest = factors @ known.steps - left
    return np.outer(factors, rest) / float(factors @ factors)


def from_initial(known: Remains) -> Floats:
    """The initial model itself, which took up the adjustments."""
    return np.tile(known.start, (len(known.steps), 1))


ATTACKS = (from_products, from_steps, from_models, from_initial)


def cosines(found: Floats, wanted: Floats) -> Floats:
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
    products = np.sum(found * wanted, axis=1)
    lengths[lengths == 0] = 1.0
    return np.asarray(products / lengths)


def assert_chance(found: Sequence[Floats], size: int) -> None:
    """Squared cosines of random directions have the mean 1/d and deviation √2/d."""
    squares = np.square(np.concatenate(found))
    limit = (1 + 5 * np.sqrt(2 / len(squares))) / size
    assert squares.mean() < limit, (squares.mean(), limit)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["rounds", "optimal"])
@pytest.mark.parametrize(("size", "rounds", "others"), [(20, 4, 24), (48, 6, 60)])
def test_least_squares_find_nothing_after_an_erasure_and_all_of_it_before(
    size: int, rounds: int, others: int, policy: Policy, tmp_path: Path
) -> None:
    at_chance: dict[str, list[Floats]] = {attack.__name__: [] for attack in ATTACKS}
    restored: dict[str, list[Floats]] = {attack.__name__: [] for attack in ATTACKS}
    for seed in range(5):
        truth = recorded(tmp_path / str(seed), policy, seed, size, rounds, others)
        erased(truth, SCALAR)
        known = remains_of(truth.path)
        assert known.products == {}
        for attack in ATTACKS:
            at_chance[attack.__name__].append(cosines(attack(known), truth.updates))
        # The numbers that the erasure dropped, one by one.
        with_shares = replace(known, shares=truth.shares)
        again = {
            "from_products": replace(with_shares, products=truth.products),
            "from_steps": replace(known, steps=truth.steps),
            "from_models": replace(with_shares, start=truth.first),
        }
        for attack in ATTACKS[:3]:
            estimate = attack(again[attack.__name__])
            restored[attack.__name__].append(cosines(estimate, truth.updates))
    for found in at_chance.values():
        assert_chance(found, size)
    if policy == "rounds":
        assert np.min(np.concatenate(restored["from_products"])) > 0.999
        assert np.min(np.concatenate(restored["from_steps"])) > 0.7
        assert np.mean(np.concatenate(restored["from_models"])) > 0.3
    else:
        assert np.mean(np.concatenate(restored["from_steps"])) > 0.3


def span_of(path: Path) -> Floats:
    """Every vector that the ledger has, and the current and the initial model."""
    with LedgerReader(path) as ledger:
        rounds = range(ledger.num_rounds)
        refs = [VectorRef(p.round, p.client, p.other) for p in ledger.pairs()]
        vectors = [ledger.initial.params.flat, ledger.final.params.flat]
        if ledger.settings.history == "rounds":
            refs += [VectorRef(index) for index in rounds]
            refs += [
                VectorRef(index, update.client)
                for index in rounds
                for update in ledger.updates_in(index)
                if update.kept
            ]
            assert ledger.adjustments() == {}
        else:
            staying = [n for n, c in ledger.clients().items() if c.state == "active"]
            vectors += [ledger.own_difference(name) for name in staying]
        states = [ledger.final.server, *ledger.server_states().values()]
        vectors += [row for state in states if state for row in state.vectors]
        vectors += [vector(ledger, ref) for ref in refs]
    return np.array(vectors, np.float64)


def explained(span: Floats, wanted: Floats) -> Floats:
    """The part of each vector's square that lies in a span."""
    _, values, basis = np.linalg.svd(span, full_matrices=False)
    inside = wanted @ basis[values > 1e-4 * values[0]].T
    return np.asarray(np.sum(inside**2, axis=1) / np.sum(wanted**2, axis=1))


def gaps(
    folder: Path,
    policy: Policy,
    *,
    steady: bool = False,
    optimizer: ServerOptimizer | None = None,
    method: FastFedUL = WITHOUT_MINIMUM,
) -> tuple[float, float, float]:
    """Return the explained part before the erasure, and its excess afterwards.

    The excess is over the explained part of a stranger's updates. Its standard error
    comes third.
    """
    own, other, before = [], [], []
    for seed in range(3):
        truth = recorded(
            folder / str(seed),
            policy,
            seed,
            400,
            4,
            24,
            steady=steady,
            optimizer=optimizer,
        )
        before.append(explained(span_of(truth.path), truth.updates))
        erased(truth, method)
        span = span_of(truth.path)
        own.append(explained(span, truth.updates))
        other.append(explained(span, truth.strangers))
    error = float(np.std(other)) * (2 / np.size(other)) ** 0.5
    return float(np.mean(before)), float(np.mean(own) - np.mean(other)), error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "steady", "found_before"),
    [("rounds", False, 0.99), ("optimal", False, 0.9), ("sums", True, 0.4)],
)
def test_no_linear_attack_can_do_better_than_for_a_stranger(
    policy: Policy, steady: bool, found_before: float, tmp_path: Path
) -> None:
    before, excess, error = gaps(tmp_path, policy, steady=steady)
    assert before > found_before
    assert abs(excess) < 4 * error


def left_in(state: ServerState, path: Path, optimizer: ServerOptimizer) -> Floats:
    """What a state has beyond the steps that the ledger still has, for momentum."""
    beta = optimizer.settings["momentum"]
    with LedgerReader(path) as ledger:
        expected = np.zeros(ledger.settings.layout.size)
        for index in range(ledger.num_rounds):
            expected = beta * expected + vector(ledger, VectorRef(index))
    return np.asarray(state.vectors[0] - expected)


MOMENTUM = ServerOptimizer.make("momentum", lr=0.5, momentum=0.8)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["rounds", "optimal"])
def test_a_server_state_tells_nothing_after_an_erasure_and_much_before(
    policy: Policy, tmp_path: Path
) -> None:
    """Under a damped skew, and where a sample of the updates was kept."""
    at_chance: list[Floats] = []
    restored: list[Floats] = []
    for seed in range(12):
        path = tmp_path / str(seed)
        truth = recorded(path, policy, seed, 48, 3, 40, optimizer=MOMENTUM)
        with LedgerReader(path) as ledger:
            set_by_method = SCALAR(UnlearnRequest(ledger, frozenset({LEAVER}))).server
        erased(truth, SCALAR)
        with LedgerReader(path) as ledger:
            now, [given] = ledger.final.server, ledger.server_states().values()
        assert now is not None
        assert set_by_method is not None
        np.testing.assert_array_equal(now.vectors, given.vectors)
        for state, found in ((given, at_chance), (set_by_method, restored)):
            rest = np.tile(left_in(state, path, MOMENTUM), (3, 1))
            found.append(cosines(rest, truth.updates))
    assert_chance(at_chance, 48)
    with pytest.raises(AssertionError):
        assert_chance(restored, 48)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["rounds", "optimal"])
@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_no_linear_attack_on_states_can_do_better_than_for_a_stranger(
    name: str, policy: Policy, tmp_path: Path
) -> None:
    optimizer = ServerOptimizer.make(name, lr=0.1)
    before, excess, error = gaps(tmp_path, policy, optimizer=optimizer, method=SCALAR)
    assert before > 0.9
    assert abs(excess) < 4 * error


@pytest.mark.slow
@pytest.mark.parametrize("sums_from", [1, 9])
@pytest.mark.parametrize(("others", "taking_part"), [(24, 1.0), (24, 0.4), (4, 1.0)])
def test_sums_of_varying_rounds_tell_nothing_after_an_erasure(
    others: int, taking_part: float, sums_from: int, tmp_path: Path
) -> None:
    """Sums are given up where they cannot be corrected; parts are corrected."""
    own, other, before = [], [], []
    for seed in range(4):
        path = tmp_path / str(seed)
        truth = recorded(
            path,
            "sums",
            seed,
            400,
            6,
            others,
            taking_part=taking_part,
            sums_from=sums_from,
        )
        before.append(explained(span_of(path), truth.updates))
        erased(truth, WITHOUT_MINIMUM)
        with DiskLedger(path) as ledger:
            staying = [c for c in ledger.clients().values() if c.state == "active"]
            first, last = ledger.initial.params.flat, ledger.final.params.flat
            np.testing.assert_array_equal(first, last)
            [event] = ledger.events()
            given_up = event.details["sums_given_up"]
            assert given_up == sum(client.num_dropped > 0 for client in staying)
            assert given_up == (len(staying) if sums_from == 1 else 0)
        span = span_of(path)
        own.append(explained(span, truth.updates))
        other.append(explained(span, truth.strangers))
    error = float(np.std(other)) * (2 / np.size(other)) ** 0.5
    assert np.mean(before) > 0.3
    assert abs(float(np.mean(own) - np.mean(other))) < 4 * error
