"""Forgetting by hand: shares, dropped updates, refusals, replayed aggregations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fastfedul import (
    Aggregation,
    ClientUpdate,
    FastFedUL,
    InvalidInputError,
    Keep,
    Kronecker,
    MemoryLedger,
    Model,
    NoSkew,
    Params,
    Removal,
    Round,
    Scalar,
    UnlearnRefusedError,
    UnlearnRequest,
    forget,
)
from fastfedul.errors import AlreadyForgottenError
from fastfedul.methods.buffers import OLD_BUFFERS
from fastfedul.records import VectorRef
from paper.iterations import iterations
from tests.support.by_hand import Updates, ledger_from, params


def empty(aggregation: str = "mean") -> MemoryLedger:
    return MemoryLedger.create(Model(params(0, 0)), aggregation=aggregation)


def ledger_of(*rounds: Updates, aggregation: str = "mean") -> MemoryLedger:
    return ledger_from(params(0, 0), *rounds, aggregation=aggregation)


def without(
    ledger: MemoryLedger, *clients: str, method: FastFedUL | None = None
) -> Removal:
    return (method or FastFedUL(skew=NoSkew()))(
        UnlearnRequest(ledger, frozenset(clients))
    )


def test_shares_count() -> None:
    ledger = ledger_of(
        {"a": (0.5, (1, 0)), "b": (0.25, (0, 4)), "c": (0.25, (2, 0))},
    )
    # Without a: (0.25 (0, 4) + 0.25 (2, 0)) / 0.5 = (1, 2).
    np.testing.assert_allclose(without(ledger, "a").params.flat, [1, 2])


def test_the_iterations_follow_the_recursion_and_end_with_the_answer() -> None:
    ledger = ledger_of(
        {"a": (0.5, (2, 0)), "b": (0.5, (0, 0))},
        {"b": (1.0, (0, 1))},
        {"a": (0.5, (0, 4)), "b": (0.5, (0, 0))},
    )
    # gamma is (-1, 0), then 0, then (0, -2); the model now is (1, 3).
    skew = Scalar(0.5)
    found = iterations(UnlearnRequest(ledger, frozenset({"a"})), skew)
    expected = ((0, 3), (0.5, 3), (0.75, 1))
    for one, values in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.flat, values)
    answer = without(ledger, "a", method=FastFedUL(skew=skew)).params.flat
    assert np.array_equal(found[-1].flat, answer)


def test_damping_applies_also_in_rounds_without_the_client() -> None:
    ledger = ledger_of(
        {"a": (0.5, (2, 0)), "b": (0.5, (0, 0))},
        {"b": (0.5, (0, 1)), "c": (0.5, (0, 1))},
    )
    result = without(ledger, "a", method=FastFedUL(skew=Scalar(0.25)))
    # gamma_0 = (0, 0) - (1, 0); one round later three quarters of it are left.
    np.testing.assert_allclose(result.delta.flat, [-0.75, 0])


def test_a_round_with_nobody_else_would_not_have_happened() -> None:
    ledger = ledger_of({"a": (1.0, (2, 3))}, {"b": (1.0, (1, 1))})
    np.testing.assert_allclose(without(ledger, "a").params.flat, [1, 1])


def test_the_papers_variants_are_settings() -> None:
    rounds: list[Updates] = [{"a": (0.5, (1, 0)), "b": (0.5, (0, 0))}] * 4
    ledger = ledger_of(*rounds)
    skew = Scalar(0.5, damped="alternate")
    alternate = without(ledger, "a", method=FastFedUL(skew=skew))
    # Damped before rounds 0 and 2: ((0 + g) + g) / 2 + g + g, with g = -1/2.
    np.testing.assert_allclose(alternate.delta.flat, [-1.5, 0])
    assert alternate.skew == skew
    assert skew.per_round(4) == (0.5, 0.0, 0.5, 0.0)
    np.testing.assert_allclose(without(ledger, "a").delta.flat, [-2, 0])


def test_alternate_damping_is_the_papers_without_a_number_too() -> None:
    assert Scalar(damped="alternate").per_round(4) == (0.07, 0.0, 0.07, 0.0)


def test_whoever_names_no_skew_gets_kronecker_on_means_and_scalar_on_medians() -> None:
    rounds: Updates = {
        "a": (0.5, (1, 0)),
        "b": (0.25, (0, 1)),
        "c": (0.25, (0, 2)),
    }
    on_means = without(ledger_of(rounds), "a", method=FastFedUL())
    assert on_means.skew.name == "kronecker"
    assert on_means.reaction is not None
    medians = ledger_of(rounds, aggregation="median")
    on_medians = without(medians, "a", method=FastFedUL())
    assert on_medians.skew == Scalar(0.07)
    assert on_medians.reaction is None
    with pytest.raises(UnlearnRefusedError, match="needs weighted means"):
        without(medians, "a", method=FastFedUL(skew=Kronecker()))


@pytest.mark.parametrize("skew", ["kronecker", 0.07, {}])
def test_what_is_no_skew_is_refused(skew: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"a skew is Kronecker\(\)"):
        FastFedUL(skew=skew)


def test_without_damping_the_last_iteration_is_the_answer_of_no_skew() -> None:
    rounds: list[Updates] = [{"a": (0.5, (1, 0)), "b": (0.5, (0, 0))}] * 3
    ledger = ledger_of(*rounds)
    request = UnlearnRequest(ledger, frozenset({"a"}))
    last = iterations(request, Scalar(0.0))[-1]
    assert np.array_equal(last.flat, without(ledger, "a").params.flat)


def test_a_damping_per_round_is_logged_round_by_round() -> None:
    rounds: list[Updates] = [{"a": (0.5, (1, 0)), "b": (0.5, (0, 0))}] * 3
    ledger = ledger_of(*rounds)
    forget(ledger, ["a"], FastFedUL(skew=Scalar((0.0, 0.5, 0.0))), erase=False)
    settings: Any = ledger.events()[-1].details["settings"]
    assert settings["damping"] == [0.0, 0.5, 0.0]
    assert settings["damped"] == "all"


def dropped(use: str, kept: tuple[bool, ...], probability: float) -> MemoryLedger:
    ledger = empty()
    for index, keep in enumerate(kept):
        updates = (
            ClientUpdate("a", 0.5, params(1, 0), probability, keep),
            ClientUpdate("b", 0.5, params(0, 1)),
        )
        ledger.append(Round(index, updates, use=use))  # type: ignore[arg-type]
    return ledger


def test_a_kept_update_stands_for_those_that_were_dropped() -> None:
    ledger = dropped("store", (True, False), 0.5)
    result = without(ledger, "a")
    # Kept with probability 1/2, so its weight 0.5 counts twice: gamma_0 is
    # (0.5 (0.5, 0.5) - 1 (1, 0)) / 0.5, gamma_1 only 0.5 (0.5, 0.5) / 0.5.
    np.testing.assert_allclose(result.delta.flat, [-1.5 + 0.5, 0.5 + 0.5])
    assert result.coverage == 0.5
    assert result.bound.value is None
    # Each round: (1 - p) / p a^2 |U|^2 / (1 - a)^2 = 1.
    assert result.standard_error == pytest.approx(math.sqrt(2))
    assert "50%" in result.warnings[0]


def test_what_was_never_aggregated_needs_no_removal() -> None:
    ledger = dropped("aggregate", (True, False), 0.5)
    result = without(ledger, "a")
    assert result.coverage == 1
    # Another draw would have aggregated others: how far that goes is not known.
    assert result.standard_error is None
    # The step was 2 * 0.5 (1, 0) + 0.5 (0, 1), then 0.5 (0, 1) alone.
    np.testing.assert_allclose(ledger.final.params.flat, [1, 1])
    np.testing.assert_allclose(result.params.flat, [0, 2])


def test_too_little_coverage_is_refused_with_the_number() -> None:
    ledger = dropped("store", (True, *[False] * 9), 0.1)
    with pytest.raises(UnlearnRefusedError, match="10%"):
        without(ledger, "a")
    lenient = without(ledger, "a", method=FastFedUL(minimum_coverage=0.05))
    assert lenient.coverage == pytest.approx(0.1)


def test_one_badly_covered_client_is_refused_even_beside_a_good_one() -> None:
    ledger = dropped("store", (False, False), 0.5)
    with pytest.raises(UnlearnRefusedError, match="'a'"):
        without(ledger, "a", "b")


def test_there_is_no_standard_error_for_what_was_not_drawn_at_random() -> None:
    ledger = empty()
    keep = Keep("top", 1)
    for index, size in enumerate((3.0, 1.0)):
        updates = (
            ClientUpdate("a", 0.5, params(size, 0)),
            ClientUpdate("b", 0.5, params(0, 2)),
        )
        ledger.append(keep(Round(index, updates)))
    assert without(ledger, "a").standard_error is None


def test_an_update_the_server_never_had_lowers_the_coverage() -> None:
    ledger = empty()
    updates = (
        ClientUpdate("a", 0.5, None, kept=False),
        ClientUpdate("b", 0.5, params(0, 2)),
    )
    ledger.append(Round(0, updates, params(1, 1)))
    with pytest.raises(UnlearnRefusedError, match="0%"):
        without(ledger, "a")


MEDIAN_ROUNDS: list[Updates] = [
    {"a": (1 / 3, (9, 0)), "b": (1 / 3, (1, 1)), "c": (1 / 3, (2, 5))},
    {"a": (1 / 3, (0, 9)), "b": (1 / 3, (3, 1)), "c": (1 / 3, (4, 2))},
]


def test_a_median_is_replayed() -> None:
    ledger = ledger_of(*MEDIAN_ROUNDS, aggregation="median")
    np.testing.assert_allclose(ledger.final.params.flat, [2 + 3, 1 + 2])
    result = without(ledger, "a")
    np.testing.assert_allclose(result.params.flat, [1.5 + 3.5, 3 + 1.5])
    np.testing.assert_allclose(
        result.gamma_norms, [math.hypot(0.5, 2), math.hypot(0.5, 0.5)]
    )


def test_a_replayed_history_can_be_erased_and_forgotten_from_again() -> None:
    once = ledger_of(*MEDIAN_ROUNDS, aggregation="median")
    forget(once, ["a", "b"], FastFedUL(skew=NoSkew()), erase=False)
    for erase in (True, False):
        ledger = ledger_of(*MEDIAN_ROUNDS, aggregation="median")
        forget(ledger, ["a"], FastFedUL(skew=NoSkew()), erase=erase)
        forget(ledger, ["b"], FastFedUL(skew=NoSkew()), erase=erase)
        np.testing.assert_allclose(
            ledger.final.params.flat, once.final.params.flat, atol=1e-6
        )
    np.testing.assert_allclose(once.final.params.flat, [2 + 4, 5 + 2])


def test_a_trimmed_mean_is_replayed() -> None:
    rounds: Updates = {
        name: (0.25, (float(i), float(i * i))) for i, name in enumerate("abcd")
    }
    ledger = ledger_of(rounds, aggregation="trimmed-mean:0.25")
    np.testing.assert_allclose(ledger.final.params.flat, [1.5, 2.5])
    np.testing.assert_allclose(without(ledger, "d").params.flat, [1, 5 / 3])


def test_any_function_the_caller_passes_is_replayed() -> None:
    def largest(updates: np.ndarray, shares: np.ndarray) -> np.ndarray:
        assert shares.sum() == pytest.approx(1)
        chosen: np.ndarray = updates[np.argmax(np.linalg.norm(updates, axis=1))]
        return chosen

    ledger = MemoryLedger.create(
        Model(params(0, 0)),
        aggregation="largest",
        custom={"largest": Aggregation(largest)},
    )
    for index in range(2):
        updates = (
            ClientUpdate("a", 0.5, params(5, 0)),
            ClientUpdate("b", 0.5, params(0, 1)),
        )
        ledger.append(Round(index, updates))
    np.testing.assert_allclose(without(ledger, "a").params.flat, [0, 2])


def test_a_replay_without_all_updates_is_refused() -> None:
    ledger = empty("median")
    updates = (
        ClientUpdate("a", 0.5, params(1, 0)),
        ClientUpdate("b", 0.5, params(0, 1), 0.5, kept=False),
    )
    ledger.append(Round(0, updates))
    with pytest.raises(UnlearnRefusedError, match="median"):
        without(ledger, "a")


@pytest.mark.parametrize("name", ["FedAdam", "fedyogi", "fed-adagrad", "FedAvgM"])
def test_server_optimizers_with_memory_are_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidInputError, match=name):
        empty(name)


@pytest.mark.parametrize("damping", [-1.01, 1.01, math.nan, (0.1, 2.0)])
def test_a_damping_beyond_1_is_refused(damping: Any) -> None:
    with pytest.raises(InvalidInputError, match="damping"):
        Scalar(damping)


def test_a_damping_below_0_is_the_printed_formula_with_a_warning_and_no_bound() -> None:
    ledger = ledger_of(
        {"a": (0.5, (2, 0)), "b": (0.5, (0, 1))},
        {"a": (0.5, (1, 1)), "b": (0.5, (1, 0))},
        {"b": (0.5, (0, 1)), "c": (0.5, (0, 1))},
    )
    printed = without(ledger, "a", method=FastFedUL(skew=Scalar(-0.5)))
    # gamma is (-1, 0.5), then (0, -0.5), then 0: 1.5 (1.5 gamma_0 + gamma_1).
    np.testing.assert_allclose(printed.delta.flat, [-2.25, 0.375])
    assert any("as printed" in text for text in printed.warnings)
    assert printed.bound.value is None
    assert "below 0" in printed.bound.source
    usual = without(ledger, "a", method=FastFedUL(skew=Scalar(0.5)))
    assert not any("as printed" in text for text in usual.warnings)
    assert usual.bound.value is not None


def test_as_many_dampings_as_rounds_are_needed() -> None:
    ledger = ledger_of({"a": (0.5, (1, 0)), "b": (0.5, (0, 4))})
    with pytest.raises(InvalidInputError, match="2 dampings"):
        without(ledger, "a", method=FastFedUL(skew=Scalar((0.1, 0.1))))


def test_a_forgotten_client_cannot_be_forgotten_twice() -> None:
    ledger = ledger_of({"a": (0.5, (1, 0)), "b": (0.5, (0, 4))})
    forget(ledger, ["a"], erase=False)
    with pytest.raises(AlreadyForgottenError, match="forgotten already"):
        forget(ledger, ["a"], erase=False)


def test_buffers_stay_where_no_clients_buffers_are_recorded_and_it_says_so() -> None:
    buffers = {"count": np.array(3), "mean": np.array([0.5], np.float32)}
    ledger = MemoryLedger.create(Model(params(0, 0), buffers))
    after = {"count": np.array(4), "mean": np.array([0.75], np.float32)}
    updates = (
        ClientUpdate("a", 0.5, params(5, 0)),
        ClientUpdate("b", 0.5, params(0, 1)),
    )
    ledger.append(Round(0, updates, buffers=after))
    assert OLD_BUFFERS in forget(ledger, ["a"], erase=False).warnings
    assert ledger.final.buffers["count"] == 4
    assert ledger.final.buffers["mean"] == np.float32(0.75)


def test_gammas_of_clients_that_hardly_differ_have_their_true_norms() -> None:
    """Products in float32 say nothing of a ten-thousandth of the updates."""
    rng = np.random.default_rng(3)
    size, names = 100_000, ("a", "b", "c", "d")
    ledger = MemoryLedger.create(Model(Params.of({"w": np.zeros(size)})))
    base, norms = rng.normal(size=size), []
    for index in range(3):
        sent = (base + 1e-4 * rng.normal(size=(4, size))).astype(np.float32)
        ledger.append(
            Round(
                index,
                tuple(
                    ClientUpdate(name, 0.25, Params.of({"w": row}))
                    for name, row in zip(names, sent, strict=True)
                ),
            )
        )
        mean = sent.astype(float).mean(axis=0)
        norms.append(np.linalg.norm(sent[1:].astype(float).mean(axis=0) - mean))
    np.testing.assert_allclose(without(ledger, "a").gamma_norms, norms, rtol=0.01)


def test_lengths_of_crowded_rounds_come_from_the_vectors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Products of every two of thousands of leavers would take minutes, and memory."""
    rng, names = np.random.default_rng(4), [f"c{i}" for i in range(12)]
    ledger = MemoryLedger.create(Model(Params.of({"w": np.zeros((5, 8))})))
    for index in range(3):
        updates = (
            ClientUpdate(name, 1 / 12, Params.of({"w": rng.normal(size=(5, 8))}))
            for name in names
        )
        ledger.append(Round(index, tuple(updates)))
    leavers = names[:9]
    by_pairs = without(ledger, *leavers)
    monkeypatch.setattr("fastfedul.methods.fast_fedul.tracing._MOST_IN_PAIRS", 8)
    by_vectors = without(ledger, *leavers)
    np.testing.assert_allclose(by_vectors.gamma_norms, by_pairs.gamma_norms, rtol=1e-5)
    np.testing.assert_allclose(
        by_vectors.delta.flat, by_pairs.delta.flat, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("clients", ["ab", [3], [None], [""]])
def test_names_that_are_no_list_of_names_are_refused(clients: Any) -> None:
    ledger = ledger_of({"a": (0.5, (1, 0)), "b": (0.5, (0, 1))})
    with pytest.raises(InvalidInputError, match="name"):
        forget(ledger, clients, erase=False)
    assert {entry.state for entry in ledger.clients().values()} == {"active"}


def test_a_vector_named_twice_counts_twice() -> None:
    ledger = ledger_of({"a": (1.0, (1, 2))})
    twice = ledger.combine([VectorRef(0, "a")] * 2, [[1, 2]])
    np.testing.assert_array_equal(twice.sums, [[3, 6]])


def test_a_choosing_server_is_named_in_the_warnings() -> None:
    for aggregation, wanted in (("krum:0", True), ("median", False)):
        ledger = MemoryLedger.create(Model(params(0, 0)), aggregation=aggregation)
        updates = tuple(
            ClientUpdate(name, 1 / 4, params(i, 1)) for i, name in enumerate("abcd")
        )
        ledger.append(Round(0, updates))
        warned = [w for w in without(ledger, "a").warnings if "chose among" in w]
        assert bool(warned) == wanted
