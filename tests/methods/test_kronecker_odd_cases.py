"""Forgetting in the Kronecker basis where the history is odd."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from fastfedul import Keep, NoSkew
from fastfedul.methods.fast_fedul import remainder
from fastfedul.methods.fast_fedul.columns import rows_of
from fastfedul.methods.fast_fedul.deviations import longest_that_counts
from fastfedul.methods.fast_fedul.remainder import left_of
from fastfedul.methods.fast_fedul.tracing import leaving
from fastfedul.methods.fast_fedul.undamped import undamped
from fastfedul.records import UpdateEntry
from tests.support.kronecker import (
    LAYOUT,
    NAMES,
    gap,
    in_memory,
    made_up,
    on_disk,
    removal,
    rounds_of,
)


@pytest.mark.parametrize("policy", [Keep("uniform", 4, seed=1), Keep("all")])
def test_a_leavers_own_mark_is_not_held_back(policy: Keep) -> None:
    """Also of a sample, in which the leaver is out of the steps on average only."""
    rng = np.random.default_rng(20)
    mark = rng.standard_normal(LAYOUT.size)
    mark *= 3 / np.linalg.norm(mark)
    marked = [
        [(c, a, (u + mark).astype(np.float32) if c == "c0" else u) for c, a, u in own]
        for own in made_up(20, equal=True, num_rounds=20)
    ]
    ledger = in_memory([policy(r) for r in rounds_of(marked)])

    found = removal(ledger, "c0").delta.flat @ mark
    whole = removal(ledger, "c0", skew=NoSkew()).delta.flat @ mark

    assert found / whole > 0.1


def test_who_is_left_alone_differs_from_nobody() -> None:
    history = made_up(9)
    pair = [[entry for entry in u if entry[0] in ("c0", "c1")] for u in history]
    two = [[(c, 0.5, u) for c, _, u in updates] for updates in pair]
    ledger = in_memory(rounds_of(two))

    found = removal(ledger, "c0")

    whole = removal(ledger, "c0", skew=NoSkew()).delta.flat
    np.testing.assert_allclose(found.delta.flat, whole, atol=1e-6)
    assert found.reaction is not None
    assert found.reaction.num_updates == 0


def test_if_nobody_stays_everything_goes() -> None:
    ledger = in_memory(rounds_of(made_up(10)))

    found = removal(ledger, *NAMES)

    np.testing.assert_allclose(found.params.flat, ledger.initial.params.flat, atol=1e-6)


def test_stayers_that_never_differ_hold_nothing_back() -> None:
    history = made_up(11, equal=True)
    alike = [
        [(c, a, u if c == "c0" else updates[1][2]) for c, a, u in updates]
        for updates in history
    ]
    ledger = in_memory(rounds_of(alike))

    found = removal(ledger, "c0")

    whole = removal(ledger, "c0", skew=NoSkew()).delta.flat
    assert gap(found.delta.flat, whole) < 1e-4


def test_updates_of_zero_change_nothing() -> None:
    still = [
        [(c, a, np.zeros_like(u)) for c, a, u in updates] for updates in made_up(12)
    ]
    found = removal(in_memory(rounds_of(still)), "c0")

    np.testing.assert_array_equal(found.delta.flat, 0)
    assert found.reaction is not None
    assert found.reaction.scale == np.inf


def test_rounds_that_cancel_out_hold_back_all_that_differs() -> None:
    """No step moves the model, so g is 0; along a deviation nothing may be removed."""
    rng = np.random.default_rng(0)
    push = rng.standard_normal(LAYOUT.size).astype(np.float32)
    ledger = in_memory(
        rounds_of([[("c0", 0.5, push), ("c1", 0.25, push), ("c2", 0.25, -3 * push)]])
    )
    found = removal(ledger, "c0")

    assert np.isfinite(found.delta.flat).all()


def test_a_stranger_changes_nothing() -> None:
    found = removal(in_memory(rounds_of(made_up(13))), "nobody")
    np.testing.assert_array_equal(found.delta.flat, 0)


def test_rounds_in_which_nobody_is_left_count() -> None:
    history = made_up(14)
    alone = [("c0", 1.0, 0.2 * np.ones(LAYOUT.size, np.float32))]
    more = in_memory(rounds_of([*history, alone]))
    fewer = in_memory(rounds_of(history))

    ratio = removal(more, "c0").reaction.scale / removal(fewer, "c0").reaction.scale  # type: ignore[union-attr]

    assert ratio == pytest.approx((9 / 8) ** 0.5)


def test_a_larger_variance_is_pulled_back_more() -> None:
    variance = np.array([0.0, 1e-6, 1e-3, 1.0])
    kept = left_of(variance, remainder.WITHIN_LAYERS, 30.0, [(0.5, 1.0)])
    assert kept[0] == 1
    assert (np.diff(kept) < 0).all()


def test_nobody_has_reacted_to_the_last_round() -> None:
    history = made_up(18)
    history[:-1] = [
        [(c, a / (1 - updates[0][1]), u) for c, a, u in updates[1:]]
        for updates in history[:-1]
    ]
    assert history[-1][0][0] == "c0"
    ledger = in_memory(rounds_of(history))

    found = removal(ledger, "c0").delta.flat

    whole = removal(ledger, "c0", skew=NoSkew()).delta.flat
    np.testing.assert_allclose(found, whole, atol=1e-6)


def test_an_older_mark_is_pulled_back_more() -> None:
    history = made_up(19)
    left = []
    for own in (0, 4, 6):
        once = [
            updates
            if index == own
            else [(c, a / (1 - updates[0][1]), u) for c, a, u in updates[1:]]
            for index, updates in enumerate(history)
        ]
        ledger = in_memory(rounds_of(once))
        found = removal(ledger, "c0").delta.flat
        whole = removal(ledger, "c0", skew=NoSkew()).delta.flat
        left.append(float(found @ whole / (whole @ whole)))

    assert left == sorted(left)
    assert left[-1] > 1.2 * left[0]


@pytest.mark.parametrize("every", [1, 8], ids=["always", "once"])
@pytest.mark.parametrize("history", ["rounds", "sums"])
def test_a_huge_update_of_who_stays_does_not_decide_what_is_held_back(
    tmp_path: Path, every: int, history: str
) -> None:
    rng = np.random.default_rng(21)
    way = rng.standard_normal(LAYOUT.size)
    way /= np.linalg.norm(way)

    def pulled(length: float) -> float:
        """How strongly a difference along the way is taken to be pulled back."""
        marked = [
            [
                (c, a, (u + huge * way * (c == "c5")).astype(np.float32))
                for c, a, u in own
            ]
            for index, own in enumerate(made_up(21, equal=True))
            for huge in [length if index % every == 0 else 0.0]
        ]
        rounds = rounds_of(marked)
        with on_disk(tmp_path / f"{length}", rounds, history=history) as ledger:
            entries = ledger.rounds()
            asked = leaving(ledger, frozenset({"c0"}), entries)
            found = undamped(ledger, asked, entries, None)
            along = rows_of(found.deviations, 0, LAYOUT.size) @ way
        return float(found.scale * (along @ along))

    # The updates of others are about 1.2 long, so that three times that counts.
    counted, huge = pulled(3.6), pulled(1000.0)
    assert 0 < huge < 1.5 * counted


def test_huge_updates_to_and_fro_do_not_move_the_model_far() -> None:
    """They cancel in the model, and must not come back as marks of different ages."""
    way = np.ones(LAYOUT.size) / LAYOUT.size**0.5
    history = made_up(22, equal=True)
    for index, huge in ((-1, 1e4), (-2, -1e4)):
        history[index] = [
            (c, a, (u + huge * way * (c == "c5")).astype(np.float32))
            for c, a, u in history[index]
        ]
    ledger = in_memory(rounds_of(history))

    found = removal(ledger, "c0")

    whole = removal(ledger, "c0", skew=NoSkew())
    assert np.linalg.norm(found.delta.flat) <= np.linalg.norm(whole.delta.flat)
    assert any("nearly cancels" in text for text in found.warnings)


def test_idle_clients_do_not_make_the_others_look_long() -> None:
    lengths = [1e-9] * 5 + [1.0] * 4
    entries = [
        UpdateEntry(0, f"c{n}", 1 / 9, 1.0, True, True, length, None)
        for n, length in enumerate(lengths)
    ]
    assert longest_that_counts(entries) == 1.0
    assert longest_that_counts(entries[4:]) == 3.0
    assert longest_that_counts(entries[:5]) == pytest.approx(3e-9)
    assert longest_that_counts([]) == math.inf


def test_of_an_aggregated_sample_nobody_differs_if_all_are_alike() -> None:
    rng = np.random.default_rng(3)
    history = [
        [(c, 1 / 6, own) for c in NAMES]
        for own in (0.1 * rng.standard_normal((6, LAYOUT.size))).astype(np.float32)
    ]
    for updates in history:
        updates[0] = ("c0", 1 / 6, -updates[1][2])
    policy = Keep("uniform", 4, use="aggregate", seed=5)
    ledger = in_memory([policy(r) for r in rounds_of(history)])

    found = removal(ledger, "c0")

    whole = removal(ledger, "c0", skew=NoSkew())
    np.testing.assert_allclose(found.delta.flat, whole.delta.flat, atol=1e-6)
    assert found.standard_error is None


def test_marks_too_small_for_a_norm_are_removed_all_the_same() -> None:
    tiny = [[(c, a, np.float32(1e-24) * u) for c, a, u in own] for own in made_up(23)]
    ledger = in_memory(rounds_of(tiny))
    assert removal(ledger, "c0").delta.flat.any()
