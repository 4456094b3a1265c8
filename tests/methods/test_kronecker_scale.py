"""Forgetting in the Kronecker basis from large models and from long histories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    FastFedUL,
    Kronecker,
    LedgerError,
    LocalSGD,
    MemoryLedger,
    Model,
    Params,
    Removal,
    Round,
    UnlearnRequest,
    forget,
)
from fastfedul.ledger.protocol import Ledger, Stack
from fastfedul.ledger.store.arrays import BLOCK_VALUES
from fastfedul.ledger.views import LedgerView
from fastfedul.methods.fast_fedul import eigenbases, kronecker, undamped
from fastfedul.methods.fast_fedul.columns import Forward, rows_of
from fastfedul.methods.fast_fedul.deviations import Sink
from fastfedul.methods.fast_fedul.marks import HeldMarks
from fastfedul.methods.fast_fedul.tracing import leaving
from fastfedul.params import Array, Flat, Layout, Slot
from fastfedul.records import (
    Combination,
    RoundEntry,
    UpdateEntry,
    VectorRef,
)

LOCAL = LocalSGD(lr=0.1, momentum=0.5, batch_size=16, epochs=2)
NAMES = tuple(f"c{number}" for number in range(6))
SMALL = Layout((Slot("dense", (6, 5), "float32"), Slot("bias", (7,), "float32")))
BLOCKS = Layout(
    (
        Slot("square", (256, 256), "float32"),
        Slot("wide", (32, 4096), "float32"),
        Slot("bias", (BLOCK_VALUES,), "float32"),
        Slot("head", (10, 30), "float32"),
    )
)


def rounds_of(
    layout: Layout, num_rounds: int, *, per_round: int = 6, seed: int = 0
) -> list[Round]:
    rng = np.random.default_rng(seed)
    rounds = []
    for index in range(num_rounds):
        names = sorted(rng.choice(NAMES, per_round, replace=False).tolist())
        course = 0.1 * rng.standard_normal(layout.size)
        updates = tuple(
            ClientUpdate(
                name,
                1 / per_round,
                Params(
                    layout,
                    (course + 0.05 * rng.standard_normal(layout.size)).astype("f4"),
                ),
            )
            for name in names
        )
        rounds.append(Round(index, updates, local=LOCAL))
    return rounds


def in_memory(layout: Layout, rounds: Sequence[Round]) -> MemoryLedger:
    ledger = MemoryLedger.create(Model(Params.zeros(layout)))
    for round_ in rounds:
        ledger.append(round_)
    return ledger


def on_disk(path: Path, layout: Layout, rounds: Sequence[Round]) -> DiskLedger:
    ledger = DiskLedger.create(path, Model(Params.zeros(layout)))
    for round_ in rounds:
        ledger.append(round_)
    return ledger


def removal(ledger: Ledger, *clients: str, updates: int | None = None) -> Removal:
    skew = Kronecker(updates or "all")
    return FastFedUL(skew=skew)(UnlearnRequest(ledger, frozenset(clients)))


def gap(found: Flat, wanted: Flat) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Every model is as large as one whose rows never fit into memory."""
    for name in ("_KEPT_BYTES", "_LAYER_BYTES", "_SIDE_BY_SIDE_BYTES"):
        monkeypatch.setattr(kronecker, name, 0)
    monkeypatch.setattr(undamped, "_HELD_BYTES", 0)
    return monkeypatch


@pytest.mark.parametrize("gone", [["c0"], ["c0", "c3"]])
@pytest.mark.parametrize("per_round", [6, 3])
@pytest.mark.parametrize("layout", [SMALL, BLOCKS], ids=["small", "blocks"])
def test_a_large_model_gets_the_answer_of_a_small_one(
    layout: Layout,
    per_round: int,
    gone: list[str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(eigenbases, "EXACT_SIDE", 10**6 if layout is SMALL else 300)
    rounds = rounds_of(layout, 3, per_round=per_round)
    with on_disk(tmp_path / "ledger", layout, rounds) as ledger:
        wanted = removal(ledger, *gone)
        request.getfixturevalue("large")
        found, again = removal(ledger, *gone), removal(ledger, *gone)

    # A wide side has its vectors from one look in place of two.
    allowed = 1e-5 if layout is SMALL else 0.02
    assert gap(found.delta.flat, wanted.delta.flat) < allowed
    assert found.bound.value == pytest.approx(wanted.bound.value, rel=1e-3)
    np.testing.assert_array_equal(found.delta.flat, again.delta.flat)
    np.testing.assert_allclose(found.gamma_norms, wanted.gamma_norms, rtol=1e-5)
    assert found.reaction is not None
    assert wanted.reaction is not None
    for one, other in zip(
        found.reaction.removed_by_layer, wanted.reaction.removed_by_layer, strict=True
    ):
        assert one[0] == other[0]
        assert one[1] == pytest.approx(other[1], abs=0.02)


@dataclass(slots=True)
class Watched(LedgerView):
    """A ledger that counts how often each block of a stored vector is read."""

    reads: Counter[tuple[VectorRef, int]] = field(default_factory=Counter)

    def stack(self, vectors: Sequence[VectorRef]) -> Stack:
        return WatchedStack(self, tuple(vectors), self.ledger.stack(vectors))

    def combine(
        self,
        vectors: Sequence[VectorRef],
        coefficients: object,
        pairs: Sequence[tuple[int, int]] = (),
    ) -> Combination:
        raise AssertionError("a whole vector must not be made")


@dataclass(slots=True)
class WatchedStack:
    watched: Watched
    refs: tuple[VectorRef, ...]
    inner: Stack

    def __getitem__(self, places: slice) -> WatchedStack:
        return WatchedStack(self.watched, self.refs[places], self.inner[places])

    def read(self, start: int, stop: int, out: Array | None = None) -> Array:
        for block in range(start // BLOCK_VALUES, -(-stop // BLOCK_VALUES)):
            self.watched.reads.update((ref, block) for ref in self.refs)
        return self.inner.read(start, stop, out)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    ("drawn", "bases"), [(None, 2), (5, 4)], ids=["whole rounds", "some of a round"]
)
def test_no_block_of_the_sample_is_read_more_than_three_times(
    drawn: int | None, bases: int
) -> None:
    ledger = Watched(in_memory(BLOCKS, rounds_of(BLOCKS, 3)))

    removal(ledger, "c0", updates=drawn)

    most: dict[str | None, int] = {}
    for (ref, _), count in ledger.reads.items():
        most[ref.client] = max(count, most.get(ref.client, 0))
    # The step and the leaver's update make the marks, once. They also make the step
    # without the leaver, for rows one by one; and for columns, unless all updates of
    # the round are there to make it.
    assert most.pop(None) == bases
    assert most.pop("c0") == bases
    assert set(most.values()) == {3}
    assert len(most) == 5 if drawn is None else 1 <= len(most) <= drawn


def test_rows_in_memory_are_read_once_and_the_marks_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(undamped, "_HELD_BYTES", 0)
    ledger = Watched(in_memory(BLOCKS, rounds_of(BLOCKS, 3)))

    removal(ledger, "c0")

    assert set(ledger.reads.values()) == {1}


@pytest.mark.parametrize("per_round", [6, 3], ids=["many of a round", "few"])
def test_rows_one_by_one_are_the_rows_by_columns(per_round: int) -> None:
    ledger = in_memory(BLOCKS, rounds_of(BLOCKS, 4, per_round=per_round))
    rounds = ledger.rounds()
    asked = leaving(ledger, frozenset({"c0"}), rounds)
    deviations = undamped.undamped(ledger, asked, rounds, None).deviations
    start, stop = 1000, BLOCK_VALUES + 3000
    lanes: list[list[Flat]] = [[], [], [], []]

    def sink_of(lane: list[Flat]) -> Sink:
        return lambda row: lane.append(row.copy())

    deviations.visit(start, stop, [sink_of(lane) for lane in lanes])

    found = np.array([row for lane in lanes for row in lane])
    wanted = rows_of(deviations, start, stop)
    assert found.shape == wanted.shape
    assert len(found) > 4
    distances = np.linalg.norm(found[:, None] - wanted, axis=2)
    nearest = distances.argmin(axis=1)
    assert sorted(nearest.tolist()) == list(range(len(wanted)))
    np.testing.assert_allclose(found, wanted[nearest], atol=1e-6)
    assert min(len(lane) for lane in lanes) > 0


def test_columns_from_left_to_right_are_the_columns() -> None:
    size = 3 * BLOCK_VALUES + 100
    rows = np.arange(2 * size, dtype=np.float32).reshape(2, size)
    forward = Forward(HeldMarks(rows), size)
    for start, stop in (
        (0, 5),
        (5, 5),
        (5, 70_000),
        (70_000, 131_072),
        (131_072, size),
    ):
        np.testing.assert_array_equal(forward.read(start, stop), rows[:, start:stop])


@dataclass(slots=True)
class Counting(LedgerView):
    """A ledger that counts kept updates, as it may say, and looks at participants.

    Attributes:
        more: What it says too much of each round.
        looked: Rounds whose participants were looked up.
    """

    more: int = 0
    looked: list[int] = field(default_factory=list)

    def rounds(self) -> Sequence[RoundEntry]:
        return tuple(
            replace(r, num_kept=r.num_updates + self.more) for r in self.ledger.rounds()
        )

    def updates_in(self, index: int) -> Sequence[UpdateEntry]:
        self.looked.append(index)
        return self.ledger.updates_in(index)


@pytest.mark.parametrize("before", [(), ("c1",)], ids=["nobody", "one before"])
def test_only_the_participants_of_drawn_rounds_are_looked_up(
    before: tuple[str, ...],
) -> None:
    plain = in_memory(SMALL, rounds_of(SMALL, 200, per_round=3))
    if before:
        forget(plain, before, erase=False)
    counting = Counting(plain)

    found = removal(counting, "c0", updates=10)

    assert len(set(counting.looked)) == len(counting.looked) <= 10
    wanted = removal(plain, "c0", updates=10)
    np.testing.assert_array_equal(found.delta.flat, wanted.delta.flat)


def test_a_wrong_number_of_kept_updates_is_noticed() -> None:
    ledger = Counting(in_memory(SMALL, rounds_of(SMALL, 20, per_round=3)), more=1)
    with pytest.raises(LedgerError, match="verify the ledger"):
        removal(ledger, "c0", updates=10)


def test_a_huge_update_of_a_round_that_was_not_drawn_does_not_decide_the_scale() -> (
    None
):
    rounds = rounds_of(SMALL, 60)
    plain = in_memory(SMALL, rounds)
    huge = [
        replace(
            round_,
            updates=tuple(
                replace(u, delta=Params(SMALL, u.delta.flat * np.float32(1e4)))
                if u.client == "c5" and u.delta is not None and round_.index % 10 == 5
                else u
                for u in round_.updates
            ),
        )
        for round_ in rounds
    ]
    usual, found = (
        removal(ledger, "c0", updates=5).reaction
        for ledger in (plain, in_memory(SMALL, huge))
    )
    assert usual is not None
    assert found is not None
    assert usual.scale / 3 < found.scale < 3 * usual.scale


def test_several_who_left_before_are_out_of_the_steps_of_all_rounds() -> None:
    """Their products with each other are stored nowhere, and have to be read."""
    rounds = rounds_of(SMALL, 12, per_round=4)
    ledger = in_memory(SMALL, rounds)
    forget(ledger, ["c0", "c1"], erase=False)

    found = removal(ledger, "c4").reaction

    left, squares = [], []
    for round_ in rounds:
        stay = [
            u.delta.flat
            for u in round_.updates
            if u.client not in ("c0", "c1", "c4") and u.delta is not None
        ]
        left.append(len(stay) / 4)
        squares.append(float(np.square(np.mean(stay, axis=0)).sum()))
    together = [{"c0", "c1"} <= {u.client for u in r.updates} for r in rounds]
    without = ["c4" not in {u.client for u in r.updates} for r in rounds]
    assert any(a and b for a, b in zip(together, without, strict=True))
    mean = np.average(squares, weights=left)
    assert found is not None
    assert found.scale == pytest.approx((12 * LOCAL.pull / mean) ** 0.5, rel=1e-4)
