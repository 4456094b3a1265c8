"""Forgetting in the Kronecker basis: against the formula, and in every odd case."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    FastFedUL,
    InvalidInputError,
    Keep,
    Kronecker,
    LocalSGD,
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
from fastfedul.ledger.protocol import Ledger, WritableLedger
from fastfedul.methods.fast_fedul import deviations, kronecker
from fastfedul.methods.fast_fedul.deviations import (
    RoundDeviations,
    Sink,
    longest_that_counts,
)
from fastfedul.methods.fast_fedul.kronecker import hold_back, left_of
from fastfedul.methods.fast_fedul.marks import HeldMarks, rows_of
from fastfedul.methods.fast_fedul.tracing import leaving
from fastfedul.methods.fast_fedul.undamped import undamped
from fastfedul.params import Layout, Slot
from fastfedul.records import StorageDtype, UpdateEntry

SHAPES: dict[str, tuple[int, ...]] = {
    "conv": (4, 3, 2, 2),
    "bias": (4,),
    "scale": (),
    "dense": (6, 5),
    "embedding": (9, 2),
}
LAYOUT = Layout(tuple(Slot(n, shape, "float32") for n, shape in SHAPES.items()))
NAMES = tuple(f"c{number}" for number in range(6))
TRAINED = LocalSGD(lr=0.1, momentum=0.5, batch_size=16, epochs=2)
ALL = Kronecker("all")
OLD = [[(1.0, 1.0)]]
"""One mark, of the time before the training."""
History = list[list[tuple[str, float, np.ndarray]]]


def params(flat: np.ndarray) -> Params:
    return Params(LAYOUT, flat.astype(np.float32))


def made_up(
    seed: int, *, per_round: int = 6, equal: bool = False, num_rounds: int = 8
) -> History:
    """Rounds with a common course, clients that differ, and any shares."""
    rng = np.random.default_rng(seed)
    own = {name: 0.03 * rng.standard_normal(LAYOUT.size) for name in NAMES}
    rounds: History = []
    for _ in range(num_rounds):
        names = sorted(rng.choice(NAMES, per_round, replace=False).tolist())
        weights = np.ones(per_round) if equal else rng.uniform(0.3, 1.0, per_round)
        course = 0.1 * rng.standard_normal(LAYOUT.size)
        rounds.append(
            [
                (
                    name,
                    float(weight / weights.sum()),
                    (
                        course + own[name] + 0.05 * rng.standard_normal(LAYOUT.size)
                    ).astype(np.float32),
                )
                for name, weight in zip(names, weights, strict=True)
            ]
        )
    return rounds


def rounds_of(
    history: History, local: Sequence[LocalSGD | None] | LocalSGD | None = TRAINED
) -> list[Round]:
    told = local if isinstance(local, Sequence) else [local] * len(history)
    return [
        Round(
            index,
            tuple(ClientUpdate(c, share, params(u)) for c, share, u in updates),
            local=told[index],
        )
        for index, updates in enumerate(history)
    ]


def filled(ledger: WritableLedger, rounds: Sequence[Round]) -> Any:
    for round_ in rounds:
        ledger.append(round_)
    return ledger


def in_memory(rounds: Sequence[Round]) -> MemoryLedger:
    start = Model(params(np.ones(LAYOUT.size)))
    found: MemoryLedger = filled(MemoryLedger.create(start), rounds)
    return found


def on_disk(path: Path, rounds: Sequence[Round], **options: Any) -> DiskLedger:
    start = Model(params(np.ones(LAYOUT.size)))
    found: DiskLedger = filled(DiskLedger.create(path, start, **options), rounds)
    return found


def removal(ledger: Ledger, *clients: str, skew: Any = ALL) -> Removal:
    return FastFedUL(skew=skew)(UnlearnRequest(ledger, frozenset(clients)))


def gap(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


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
    within, along = kronecker.WITHIN_LAYERS, kronecker.ALONG_DEVIATIONS
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
    monkeypatch.setattr(kronecker, "MAX_ROWS", 20)

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
    kept = left_of(variance, kronecker.WITHIN_LAYERS, 30.0, [(0.5, 1.0)])
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


def test_few_vectors_at_once_give_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = rounds_of(made_up(24))
    with on_disk(tmp_path / "ledger", rounds, update_dtype="int8") as ledger:
        together = removal(ledger, "c0").delta.flat
        monkeypatch.setattr(deviations, "VECTORS_AT_ONCE", 13)
        entries = ledger.rounds()
        asked = leaving(ledger, frozenset({"c0"}), entries)
        found = undamped(ledger, asked, entries, None).deviations
        assert isinstance(found, RoundDeviations)
        assert len(found.batches) > 1
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

    monkeypatch.setattr(kronecker, "EXACT_SIDE", 100)
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
    with pytest.raises(InvalidInputError, match="leave local training unknown"):
        LocalSGD(**{**usual, **wrong})
