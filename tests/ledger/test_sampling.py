from __future__ import annotations

import itertools
import math
from typing import Any, cast

import numpy as np
import pytest

from fastfedul.errors import FastFedULError, InvalidInputError
from fastfedul.ledger.keeping import POLICIES, Keep, optimal_probabilities
from fastfedul.params import Array, Layout, Params, norm
from fastfedul.records import ClientUpdate, KeepUse, Round
from fastfedul.rng import stream

LAYOUT = Layout.of({"weight": np.zeros((3, 4)), "bias": np.zeros(5)})


def params(flat: Array) -> Params:
    return Params(LAYOUT, np.asarray(flat, np.float32))


def round_of(index: int, num_clients: int, *, shares: Array | None = None) -> Round:
    """A round of updates whose norms differ a lot, in no particular order."""
    rng = stream(7, "test round", index)
    sizes = 10.0 ** rng.uniform(-2, 1, num_clients)
    if shares is None:
        shares = np.full(num_clients, 1 / num_clients)
    return Round(
        index,
        tuple(
            ClientUpdate(
                f"client-{i}",
                float(shares[i]),
                params(sizes[i] * rng.normal(size=LAYOUT.size)),
            )
            for i in range(num_clients)
        ),
    )


def magnitudes(round_: Round) -> Array:
    return np.array(
        [u.share * norm(u.delta.flat) for u in round_.updates if u.delta is not None]
    )


def kept_names(round_: Round) -> set[str]:
    return {update.client for update in round_.updates if update.kept}


# The probabilities.


@pytest.mark.parametrize(
    ("sizes", "budget", "expected"),
    [
        ([1, 1, 2, 10], 2, [0.25, 0.25, 0.5, 1]),
        ([10, 2, 1, 1], 2, [1, 0.5, 0.25, 0.25]),
        ([3, 3, 3, 3], 2, [0.5, 0.5, 0.5, 0.5]),
        ([1, 2, 3, 4], 1, [0.1, 0.2, 0.3, 0.4]),
        ([1, 1, 1, 100, 100], 3, [1 / 3, 1 / 3, 1 / 3, 1, 1]),
        ([1, 1, 2], 2, [0.5, 0.5, 1]),
        ([5], 1, [1]),
        ([5], 7, [1]),
        ([0], 1, [1]),
        ([1, 2, 3], 3, [1, 1, 1]),
        ([1, 2, 3], 99, [1, 1, 1]),
    ],
)
def test_the_probabilities_are_those_worked_out_by_hand(
    sizes: list[float], budget: int, expected: list[float]
) -> None:
    np.testing.assert_allclose(
        optimal_probabilities(sizes, budget), expected, rtol=1e-12
    )


@pytest.mark.parametrize(
    ("sizes", "budget", "expected"),
    [
        ([0, 0, 0, 0], 2, [0.5, 0.5, 0.5, 0.5]),
        ([0, 7, 0, 0], 2, [1 / 3, 1, 1 / 3, 1 / 3]),
        ([0, 7, 0, 1e-9], 3, [0.5, 1, 0.5, 1]),
        ([0, 7, 0, 1e-9], 2, [0, 1, 0, 1]),
        ([0, 1, 3, 0], 1, [0, 0.25, 0.75, 0]),
    ],
)
def test_updates_of_size_zero_share_what_the_others_leave_over(
    sizes: list[float], budget: int, expected: list[float]
) -> None:
    np.testing.assert_allclose(
        optimal_probabilities(sizes, budget), expected, rtol=1e-12
    )


@pytest.mark.parametrize("factor", [1e-320, 1e-300, 1e-30, 1e30, 1e300])
def test_all_magnitudes_tiny_or_huge_give_the_same_probabilities(
    factor: float,
) -> None:
    sizes = np.array([1, 1, 2, 10.0]) * factor
    np.testing.assert_allclose(
        optimal_probabilities(sizes, 2), [0.25, 0.25, 0.5, 1], rtol=2e-3
    )


@pytest.mark.parametrize(
    ("sizes", "budget", "expected"),
    [
        ([1e-300, 1e-300, 1e300], 2, [0.5, 0.5, 1]),
        ([1e-200, 3e-200, 1e200, 1e200], 3, [0.25, 0.75, 1, 1]),
        ([1e-40, 1e30, 1e30], 2, [0, 1, 1]),
    ],
)
def test_tiny_magnitudes_beside_huge_ones_still_get_their_part(
    sizes: list[float], budget: int, expected: list[float]
) -> None:
    np.testing.assert_allclose(
        optimal_probabilities(sizes, budget), expected, rtol=1e-12, atol=1e-60
    )


@pytest.mark.parametrize(
    ("sizes", "budget"),
    [
        ([1.0, math.nan], 1),
        ([1.0, math.inf], 1),
        ([1.0, -1.0], 1),
        ([[1.0, 2.0]], 1),
        ([1.0, 2.0], 0),
        ([1.0, 2.0], -3),
    ],
)
def test_magnitudes_or_budgets_without_meaning_are_refused(
    sizes: list[Any], budget: int
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        optimal_probabilities(sizes, budget)
    assert "\n" not in str(caught.value)


# The policies.


@pytest.mark.parametrize("use", ["store", "aggregate"])
def test_all_keeps_every_update_with_certainty(use: KeepUse) -> None:
    round_ = round_of(3, 6)
    kept = Keep("all", use=use)(round_)
    assert kept.use == use
    assert kept.updates == round_.updates
    assert all(u.kept and u.keep_probability == 1 for u in kept.updates)


@pytest.mark.parametrize("use", ["store", "aggregate"])
def test_top_keeps_the_largest_contributions_without_reweighting(use: KeepUse) -> None:
    shares = np.array([0.4, 0.05, 0.05, 0.3, 0.1, 0.1])
    round_ = round_of(0, 6, shares=shares)
    sizes = magnitudes(round_)
    largest = {f"client-{i}" for i in sorted(range(6), key=lambda i: -sizes[i])[:2]}
    kept = Keep("top", 2, use=use)(round_)
    assert kept.use == use
    assert kept_names(kept) == largest
    for update in kept.updates:
        assert update.keep_probability == (1 if update.kept else 0)


def test_top_gives_ties_to_the_first_in_order_of_name() -> None:
    same = params(np.ones(LAYOUT.size))
    round_ = Round(0, tuple(ClientUpdate(name, 0.25, same) for name in "dcba"))
    assert kept_names(Keep("top", 2)(round_)) == {"a", "b"}


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_kept_does_not_depend_on_the_order_of_arrival(policy: Any) -> None:
    keep = Keep(policy, 3, seed=6)
    for index in range(20):
        round_ = round_of(index, 8)
        backwards = Round(index, round_.updates[::-1])
        assert kept_names(keep(backwards)) == kept_names(keep(round_))
        assert {u.client: u.keep_probability for u in keep(backwards).updates} == {
            u.client: u.keep_probability for u in keep(round_).updates
        }


def test_uniform_keeps_exactly_its_budget_with_equal_probability() -> None:
    counts = dict.fromkeys((f"client-{i}" for i in range(5)), 0)
    keep = Keep("uniform", 2, seed=3)
    for index in range(2000):
        kept = keep(round_of(index, 5))
        assert {update.keep_probability for update in kept.updates} == {0.4}
        names = kept_names(kept)
        assert len(names) == 2
        for name in names:
            counts[name] += 1
    # Binomial with mean 800 and standard deviation 22.
    assert all(abs(count - 800) < 5 * 22 for count in counts.values()), counts


def test_optimal_draws_with_the_probabilities_of_share_times_norm() -> None:
    shares = np.array([0.5, 0.1, 0.1, 0.1, 0.2])
    for index in range(20):
        round_ = round_of(index, 5, shares=shares)
        kept = Keep("optimal", 2)(round_)
        expected = optimal_probabilities(magnitudes(round_), 2)
        found = [update.keep_probability for update in kept.updates]
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        certain = {f"client-{i}" for i in range(5) if expected[i] == 1}
        assert certain <= kept_names(kept)


@pytest.mark.parametrize("policy", ["optimal", "top", "uniform"])
def test_a_budget_of_everybody_or_more_keeps_everybody(policy: str) -> None:
    for budget in (4, 9):
        kept = Keep.parse(f"{policy}:{budget}")(round_of(1, 4))
        assert all(u.kept and u.keep_probability == 1 for u in kept.updates)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_changes_nothing_but_what_is_kept(policy: Any) -> None:
    round_ = round_of(2, 5)
    use: Any = "store" if policy == "sums" else "aggregate"
    kept = Keep(policy, 2, use=use, seed=1)(round_)
    assert (kept.index, kept.step, kept.buffers) == (2, None, None)
    for before, after in zip(round_.updates, kept.updates, strict=True):
        assert (after.client, after.share) == (before.client, before.share)
        assert after.delta is before.delta


@pytest.mark.parametrize("policy", ["optimal", "uniform"])
def test_a_draw_depends_on_seed_and_round_alone(policy: Any) -> None:
    def draws(seed: int, indices: range) -> dict[int, set[str]]:
        keep = Keep(policy, 3, seed=seed)
        return {i: kept_names(keep(round_of(i, 8))) for i in indices}

    first = draws(11, range(30))
    backwards = draws(11, range(29, -1, -1))
    assert backwards == first
    assert draws(11, range(20, 25)) == {i: first[i] for i in range(20, 25)}
    assert draws(12, range(30)) != first
    assert len({frozenset(names) for names in first.values()}) > 5


@pytest.mark.parametrize("policy", ["optimal", "top", "uniform"])
def test_an_update_nobody_has_is_never_kept(policy: Any) -> None:
    present = params(np.ones(LAYOUT.size))
    for index in range(30):
        round_ = Round(
            index,
            (
                ClientUpdate("absent", 0.4, None),
                ClientUpdate("a", 0.3, present),
                ClientUpdate("b", 0.3, present),
            ),
        )
        assert "absent" not in kept_names(Keep(policy, 2, seed=index)(round_))


@pytest.mark.parametrize("policy", POLICIES)
def test_an_empty_round_stays_empty(policy: Any) -> None:
    assert Keep(policy, 2)(Round(0, ())).updates == ()


# The statistics of what is kept.


def test_the_weighted_sum_of_what_is_kept_is_unbiased_with_exactly_its_variance() -> (
    None
):
    num_draws = 10_000
    shares = np.array([0.05, 0.3, 0.1, 0.15, 0.25, 0.15])
    template = round_of(5, 6, shares=shares)
    deltas = np.stack([u.delta.flat for u in template.updates if u.delta is not None])
    mean = shares @ deltas.astype(np.float64)
    keep = Keep("optimal", 3, seed=2)
    first = keep(template)
    probabilities = np.array([u.keep_probability for u in first.updates])
    assert (probabilities < 1).sum() >= 4
    variance = float(
        (
            (1 - probabilities) / probabilities * shares**2 * (deltas**2).sum(axis=1)
        ).sum()
    )
    estimates = np.zeros((num_draws, LAYOUT.size))
    for index in range(num_draws):
        drawn = keep(Round(index, template.updates))
        weights = np.array(
            [u.share / u.keep_probability if u.kept else 0.0 for u in drawn.updates]
        )
        estimates[index] = weights @ deltas
    errors = estimates - mean
    standard_errors = estimates.std(axis=0) / math.sqrt(num_draws)
    assert (np.abs(errors.mean(axis=0)) < 4.5 * standard_errors).all()
    squares = (errors**2).sum(axis=1)
    spread = squares.std() / math.sqrt(num_draws)
    assert spread < 0.04 * variance
    assert abs(squares.mean() - variance) < 4 * spread


def test_a_dependent_sampling_needs_a_larger_v_than_proof_1_gives() -> None:
    """`uniform` draws exactly m of N, so its draws depend on each other.

    The paper's Lemma 1 bounds the squared error by sum v_i / p_i |U_i|^2 for every v
    with Diag(p v) - (P - p p^T) positive semidefinite. Proof 1 says that v_i is then
    at least 1 - p_i; the paper goes on with v_i = 1 - p_i, which only independent draws
    allow.
    """
    num_clients, budget, num_draws = 6, 2, 6000
    keep = Keep("uniform", budget, seed=3)
    sizes = np.ones(num_clients)
    drawn = np.stack([keep.choose(sizes, i)[1] for i in range(num_draws)])
    p = keep.choose(sizes, 0)[0]
    together = budget * (budget - 1) / (num_clients * (num_clients - 1))
    P = np.full((num_clients, num_clients), together)
    np.fill_diagonal(P, p)
    both = drawn.T.astype(np.float64) @ drawn / num_draws
    np.testing.assert_allclose(both, P, atol=5 * math.sqrt(0.25 / num_draws))

    def holds(v: float) -> bool:
        gap = np.diag(p * v) - (P - np.outer(p, p))
        return bool(np.linalg.eigvalsh(gap).min() > -1e-12)

    least = (num_clients - budget) / (num_clients - 1)
    independent = float(1 - p[0])
    assert holds(least)
    assert not holds(0.999 * least)
    assert least > independent

    deltas = stream(5, "dependent").normal(size=(num_clients, 3))
    for centred in (False, True):
        U = deltas - deltas.mean(axis=0) if centred else deltas
        subsets = [list(s) for s in itertools.combinations(range(num_clients), budget)]
        errors = [U[s].sum(axis=0) / p[0] - U.sum(axis=0) for s in subsets]
        exact = float(np.mean([error @ error for error in errors]))
        lengths = float((U**2).sum()) / p[0]
        assert exact <= least * lengths * (1 + 1e-12)
        if centred:
            # The worst case: the lemma's bound is met, the paper's is exceeded.
            assert exact == pytest.approx(least * lengths)
            assert exact > independent * lengths


def test_optimal_keeps_its_budget_on_average() -> None:
    keep = Keep("optimal", 3, seed=4)
    counts = np.array([len(kept_names(keep(round_of(i, 8)))) for i in range(3000)])
    assert counts.std() > 0.1
    assert abs(counts.mean() - 3) < 4.5 * counts.std() / math.sqrt(len(counts))


# Settings.


@pytest.mark.parametrize(
    ("text", "policy", "count"),
    [
        ("all", "all", None),
        ("optimal:5", "optimal", 5),
        ("top:1", "top", 1),
        ("uniform:12", "uniform", 12),
    ],
)
def test_a_policy_is_read_from_its_text(
    text: str, policy: str, count: int | None
) -> None:
    keep = Keep.parse(text, use="aggregate", seed=9)
    assert keep == Keep(cast(Any, policy), count, "aggregate", 9)
    assert (keep.history, keep.sums_from) == ("rounds", 1)


@pytest.mark.parametrize(("text", "least"), [("sums", 1), ("sums:1", 1), ("sums:7", 7)])
def test_sums_may_say_from_how_many_rounds_on(text: str, least: int) -> None:
    keep = Keep.parse(text)
    assert (keep.history, keep.sums_from) == ("sums", least)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "best",
        "optimal",
        "optimal:",
        "optimal:0",
        "optimal:-1",
        "optimal:2.5",
        "all:5",
        "all:",
        "sums:",
        "sums:0",
        "sums:-1",
        "sums:x",
        "optimal:five",
        "optimal:5:6",
        " optimal:5",
        "OPTIMAL:5",
        "top:",
        "uniform:0",
        "all\nevil",
        "optimal:" + "9" * 5000,
    ],
)
def test_a_text_that_is_no_policy_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(FastFedULError) as caught:
        Keep.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "best", "count": 3},
        {"policy": "optimal"},
        {"policy": "top", "count": 0},
        {"policy": "uniform", "count": -1},
        {"policy": "sums", "count": 0},
        {"policy": "sums", "use": "aggregate"},
        {"policy": "all", "use": "both"},
    ],
)
def test_settings_without_meaning_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Keep(**settings)
    assert "\n" not in str(caught.value)
