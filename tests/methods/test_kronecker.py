"""Forgetting in the Kronecker basis: against the formula, and layer by layer."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fastfedul import (
    FastFedUL,
    InvalidInputError,
    Keep,
    Kronecker,
    LocalSGD,
    MemoryLedger,
    Model,
    NoSkew,
    Scalar,
    UnlearnRefusedError,
    UnlearnRequest,
    forget,
)
from fastfedul.methods.fast_fedul import (
    columns,
    eigenbases,
    kronecker,
    remainder,
    tally,
)
from fastfedul.methods.fast_fedul.deviations import Sink, StoredDeviations
from fastfedul.methods.fast_fedul.kronecker import hold_back
from fastfedul.methods.fast_fedul.marks import HeldMarks
from fastfedul.methods.fast_fedul.tracing import leaving
from fastfedul.methods.fast_fedul.undamped import undamped
from fastfedul.params import Layout, Slot
from fastfedul.records import StorageDtype
from tests.support.kronecker import (
    ALL,
    LAYOUT,
    NAMES,
    OLD,
    SHAPES,
    TRAINED,
    History,
    filled,
    gap,
    in_memory,
    made_up,
    on_disk,
    params,
    removal,
    rounds_of,
)


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """The readable formula that lies beside the repository, not in it."""
    path = Path(__file__).parents[3] / "shared" / "reference" / "skew_reference.py"
    if not path.is_file():
        if os.environ.get("CI") == "true":
            pytest.fail("needs the reference of the formula beside the repository")
        pytest.skip("needs the reference of the formula beside the repository")
    spec = importlib.util.spec_from_file_location("skew_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its module up while it is being made.
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def history_for(reference: ModuleType, history: History, local: LocalSGD | None) -> Any:
    told = None
    if local is not None:
        told = reference.Local(local.lr, local.momentum, local.batch_size, local.epochs)
    return reference.History(history, list(SHAPES.values()), told)


def by_formula(reference: ModuleType, history: Any, gone: set[str]) -> np.ndarray:
    """The reference, once for each age, with our constants."""
    terms = reference.terms(history, gone)
    marks = [mark_of(updates, gone) for updates in history.rounds]
    ages = np.arange(len(marks))[::-1] / len(marks)
    classes = [sum(bool(a > end) for end in (0, 1 / 8, 1 / 2)) for a in ages]
    within, along = remainder.WITHIN_LAYERS, remainder.ALONG_DEVIATIONS
    found = np.zeros(LAYOUT.size)
    for own in range(4):
        members = [i for i, of_round in enumerate(classes) if of_round == own]
        lengths = [float(np.linalg.norm(marks[i])) for i in members]
        if not any(lengths):
            continue
        age = float(np.average(ages[members], weights=lengths))
        mark = np.sum([marks[i] for i in members], axis=0).astype(np.float32)
        aged = reference.Terms(mark, terms.rows, terms.scale * age)
        first = reference.kronecker(aged, history.shapes, within.factor, within.power)
        found += reference.along_deviations(aged, first, along.factor, along.power)
    return found


def mark_of(updates: Sequence[tuple[str, float, np.ndarray]], gone: set[str]) -> Any:
    """What a round would have added without some clients, less what it added."""
    step = sum(a * u.astype(np.float64) for _, a, u in updates)
    left = sum(a for c, a, _ in updates if c not in gone)
    if left == 0:
        return -step
    return sum(a * u for c, a, u in updates if c not in gone) / left - step


@pytest.mark.parametrize("local", [None, TRAINED], ids=["unknown", "known"])
@pytest.mark.parametrize("per_round", [6, 3])
@pytest.mark.parametrize("gone", [{"c0"}, {"c0", "c3"}])
@pytest.mark.parametrize("seed", [0, 1])
def test_it_is_the_formula(
    reference: ModuleType,
    seed: int,
    gone: set[str],
    per_round: int,
    local: LocalSGD | None,
) -> None:
    history = made_up(seed, per_round=per_round)
    wanted = by_formula(reference, history_for(reference, history, local), gone)

    found = removal(in_memory(rounds_of(history, local)), *gone)

    assert gap(found.delta.flat, wanted) < 1e-5
    assert found.reaction is not None
    assert found.reaction.num_updates == sum(
        client not in gone
        for updates in history
        for client, _, _ in updates
        if len({c for c, _, _ in updates} - gone) > 1
    )


def test_the_ledger_on_disk_gives_the_same(
    reference: ModuleType, tmp_path: Path
) -> None:
    history = made_up(2)
    wanted = by_formula(reference, history_for(reference, history, TRAINED), {"c1"})
    with on_disk(tmp_path / "ledger", rounds_of(history)) as ledger:
        assert gap(removal(ledger, "c1").delta.flat, wanted) < 1e-5


def test_many_rows_are_added_up_in_groups(
    reference: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = made_up(3)
    monkeypatch.setattr(tally, "MAX_ROWS", 20)

    found = removal(in_memory(rounds_of(history)), "c0")

    assert found.reaction is not None
    assert found.reaction.num_directions <= 20
    exact = by_formula(reference, history_for(reference, history, TRAINED), {"c0"})
    undamped = removal(in_memory(rounds_of(history)), "c0", skew=NoSkew())
    # Groups are coarser, but far nearer than nothing held back.
    assert gap(found.delta.flat, exact) < 0.5 * gap(undamped.delta.flat, exact)


def test_a_sample_is_drawn_again_alike() -> None:
    ledger = in_memory(rounds_of(made_up(4)))

    once, again = (removal(ledger, "c2", skew=Kronecker(10)) for _ in range(2))

    assert once.reaction is not None
    assert once.reaction.num_updates == 10
    np.testing.assert_array_equal(once.delta.flat, again.delta.flat)


def test_another_history_draws_another_sample() -> None:
    rounds = rounds_of(made_up(4))
    shorter = removal(in_memory(rounds[:-1]), "c2", skew=Kronecker(10))
    whole = removal(in_memory(rounds), "c2", skew=Kronecker(10))

    assert shorter.reaction != whole.reaction


def test_local_training_may_change_from_round_to_round(
    reference: ModuleType,
) -> None:
    history = made_up(5)
    other = LocalSGD(lr=0.01, momentum=0.0, batch_size=64, epochs=1)
    mixed = [TRAINED if index % 2 else other for index in range(len(history))]

    found = removal(in_memory(rounds_of(history, mixed)), "c0")

    same = reference.terms(history_for(reference, history, TRAINED), {"c0"})
    pull = (TRAINED.pull + other.pull) / 2
    assert found.reaction is not None
    assert found.reaction.scale == pytest.approx(
        same.scale * (pull / TRAINED.pull) ** 0.5, rel=1e-5
    )


def test_unknown_local_training_is_said() -> None:
    told = [TRAINED, None, *[TRAINED] * 6]
    found = removal(in_memory(rounds_of(made_up(5), told)), "c0")

    assert found.reaction is not None
    assert found.reaction.num_unknown == 1
    assert any("in 1 of 8 rounds" in text for text in found.warnings)


@pytest.mark.parametrize("erase", [True, False])
def test_after_an_earlier_forgetting_it_is_as_if_they_had_never_been_there(
    reference: ModuleType, tmp_path: Path, erase: bool
) -> None:
    history = made_up(6, equal=True)
    without = [
        [(c, 1 / 5, u) for c, _, u in updates if c != "c0"] for updates in history
    ]
    wanted = by_formula(reference, history_for(reference, without, TRAINED), {"c4"})
    with on_disk(tmp_path / "ledger", rounds_of(history)) as ledger:
        forget(ledger, ["c0"], FastFedUL(skew=ALL), erase=erase)

        found = removal(ledger, "c4")

    assert gap(found.delta.flat, wanted) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "allowed"), [("bfloat16", 0.02), ("float16", 0.005), ("int8", 0.1)]
)
def test_fewer_bits_give_nearly_the_same(
    tmp_path: Path, dtype: StorageDtype, allowed: float
) -> None:
    rounds = rounds_of(made_up(7))
    with on_disk(tmp_path / "ledger", rounds, update_dtype=dtype) as ledger:
        found = removal(ledger, "c0")

    assert gap(found.delta.flat, removal(in_memory(rounds), "c0").delta.flat) < allowed


def test_of_a_sampled_history_what_is_kept_is_used() -> None:
    rounds = [Keep("uniform", 4, seed=3)(r) for r in rounds_of(made_up(8))]
    found = removal(in_memory(rounds), "c0", skew=ALL)

    assert found.reaction is not None
    kept = [u for r in rounds for u in r.updates if u.kept and u.client != "c0"]
    assert found.reaction.num_updates == len(kept)


def test_few_vectors_at_once_give_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = rounds_of(made_up(24))
    with on_disk(tmp_path / "ledger", rounds, update_dtype="int8") as ledger:
        together = removal(ledger, "c0").delta.flat
        monkeypatch.setattr(columns, "VALUES_AT_ONCE", 13 * LAYOUT.size)
        entries = ledger.rounds()
        asked = leaving(ledger, frozenset({"c0"}), entries)
        found = undamped(ledger, asked, entries, None).deviations
        assert isinstance(found, StoredDeviations)
        assert len(found.groups) > 1
        apart = removal(ledger, "c0").delta.flat

    np.testing.assert_allclose(apart, together, atol=1e-6)


def test_it_says_when_nobody_is_left_to_learn_from() -> None:
    ledger = in_memory(rounds_of(made_up(25)))
    for gone in (NAMES[:-1], NAMES):
        found = removal(ledger, *gone)
        assert any("nothing was held back" in text for text in found.warnings)


def test_medians_need_the_scalar() -> None:
    start = Model(params(np.zeros(LAYOUT.size)))
    ledger = MemoryLedger.create(start, aggregation="median")
    filled(ledger, rounds_of(made_up(15)))

    with pytest.raises(UnlearnRefusedError, match="use skew scalar"):
        removal(ledger, "c0")
    usual = FastFedUL()(UnlearnRequest(ledger, frozenset({"c0"})))
    assert usual.skew == Scalar()


class Rows:
    """Deviations in memory."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows.astype(np.float32)

    def __len__(self) -> int:
        return len(self.rows)

    def fill(self, rows: np.ndarray, start: int) -> None:
        rows[...] = self.rows[:, start : start + rows.shape[1]]

    def visit(self, start: int, stop: int, sinks: Sequence[Sink]) -> None:
        for number, row in enumerate(self.rows):
            sinks[number % len(sinks)](row[start:stop].copy())

    def add_to(self, flat: np.ndarray, factors: np.ndarray) -> None:
        flat += factors.astype(np.float32) @ self.rows


@pytest.mark.parametrize("shape", [(6, 240), (240, 6), (150, 160)])
def test_a_wide_layer_gets_its_leading_eigenvectors(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates are of low rank, and then nothing is lost by it."""
    rng = np.random.default_rng(1)
    left = rng.standard_normal((20, shape[0], 3))
    right = rng.standard_normal((20, 3, shape[1]))
    common = rng.standard_normal((3, shape[1]))
    rows = 0.01 * (left @ (0.1 * right + common)).reshape(20, -1)
    layout = Layout((Slot("wide", shape, "float32"),))
    difference = rng.standard_normal(layout.size).astype(np.float32)
    exact = hold_back(
        HeldMarks(difference[None]), OLD, Rows(rows), layout, 5.0, b"seed"
    )

    monkeypatch.setattr(eigenbases, "EXACT_SIDE", 100)
    found = hold_back(
        HeldMarks(difference[None]), OLD, Rows(rows), layout, 5.0, b"seed"
    )

    assert gap(found.difference, exact.difference) < 0.01


def test_layers_of_any_size_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    rows = Rows(0.05 * rng.standard_normal((12, LAYOUT.size)))
    difference = rng.standard_normal(LAYOUT.size).astype(np.float32)
    together = hold_back(HeldMarks(difference[None]), OLD, rows, LAYOUT, 5.0, b"seed")

    monkeypatch.setattr(kronecker, "_SIDE_BY_SIDE_BYTES", 4 * 12 * 7)
    monkeypatch.setattr(kronecker, "_KEPT_BYTES", 0)
    apart = hold_back(HeldMarks(difference[None]), OLD, rows, LAYOUT, 5.0, b"seed")

    assert gap(apart.difference, together.difference) < 1e-5
    assert [name for name, _ in apart.removed_by_layer] == list(SHAPES)


def test_the_part_kept_of_each_layer_is_said() -> None:
    found = removal(in_memory(rounds_of(made_up(16))), "c0")
    whole = removal(in_memory(rounds_of(made_up(16))), "c0", skew=NoSkew())

    assert found.reaction is not None
    for name, kept in found.reaction.removed_by_layer:
        own, all_of_it = found.delta[name].ravel(), whole.delta[name].ravel()
        assert kept == pytest.approx(
            float(own @ all_of_it / (all_of_it @ all_of_it)), rel=1e-4
        )


def test_the_bound_grows_by_what_is_held_back() -> None:
    ledger = in_memory(rounds_of(made_up(17)))
    found, whole = removal(ledger, "c0"), removal(ledger, "c0", skew=NoSkew())

    held = float(np.linalg.norm(whole.delta.flat - found.delta.flat))
    assert found.bound.value == pytest.approx(
        (whole.bound.value or 0.0) + held, rel=1e-5
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": 0.0},
        {"lr": 1e-300},
        {"lr": "0.1"},
        {"momentum": 1.0},
        {"momentum": float("nan")},
        {"batch_size": 2.5},
        {"batch_size": 2**70},
        {"epochs": float("inf")},
    ],
)
def test_local_training_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    usual = {"lr": 0.1, "momentum": 0.0, "batch_size": 8, "epochs": 1}
    with pytest.raises(InvalidInputError, match=r"the .* is .*; choose"):
        LocalSGD(**{**usual, **wrong})
