"""Laws that forgetting obeys, whatever the history."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    FastFedUL,
    MemoryLedger,
    Model,
    NoSkew,
    Params,
    Round,
    Scalar,
    UnlearnRequest,
    forget,
)
from fastfedul.ledger.protocol import WritableLedger
from fastfedul.ledger.store.codec import STORAGE_DTYPES
from fastfedul.records import StorageDtype
from tests.support.stored_vectors import error_bound

SIZE = 7
NAMES = ("ann", "bob", "cyd", "dan", "eve")
LAYOUT = Params.of({"w": np.zeros(SIZE, np.float32)}).layout


@dataclass(frozen=True)
class History:
    """Rounds that can be replayed onto any ledger."""

    initial: np.ndarray
    rounds: tuple[Round, ...]

    def onto(self, ledger: WritableLedger) -> WritableLedger:
        for round_ in self.rounds:
            ledger.append(round_)
        return ledger

    def in_memory(self) -> WritableLedger:
        return self.onto(MemoryLedger.create(Model(Params(LAYOUT, self.initial))))


@st.composite
def histories(
    draw: st.DrawFn, partial: bool = True, equal: bool = False, magnitude: float = 1.0
) -> History:
    """Draw rounds with any participants and shares; values come from a seed."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_rounds = draw(st.integers(1, 6))
    rounds = []
    for index in range(num_rounds):
        size = draw(st.integers(1 if partial else 5, 5))
        names = sorted(rng.permutation(NAMES)[:size].tolist())
        weights = np.ones(size) if equal else rng.uniform(0.2, 1, size)
        shares = weights / weights.sum()
        updates = tuple(
            ClientUpdate(name, float(share), vector(rng, magnitude))
            for name, share in zip(names, shares, strict=True)
        )
        rounds.append(Round(index, updates))
    return History(rng.standard_normal(SIZE).astype(np.float32), tuple(rounds))


def vector(rng: np.random.Generator, magnitude: float = 1.0) -> Params:
    values = (magnitude * rng.standard_normal(SIZE)).astype(np.float32)
    return Params(LAYOUT, values)


def delta(ledger: WritableLedger, *clients: str, damping: float = 0.07) -> np.ndarray:
    method = FastFedUL(skew=Scalar(damping))
    return method(UnlearnRequest(ledger, frozenset(clients))).delta.flat


dampings = st.floats(0, 1)


@given(history=histories(), damping=dampings)
def test_forgetting_a_stranger_changes_nothing(
    history: History, damping: float
) -> None:
    ledger = history.in_memory()
    result = FastFedUL(skew=Scalar(damping))(
        UnlearnRequest(ledger, frozenset({"stranger"}))
    )
    np.testing.assert_array_equal(result.params.flat, ledger.final.params.flat)
    assert result.coverage == 1
    assert result.rounds == 0


@given(history=histories(), damping=dampings, seed=st.integers(0, 99))
def test_the_order_of_clients_is_irrelevant(
    history: History, damping: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    shuffled = History(
        history.initial,
        tuple(
            Round(r.index, tuple(r.updates[i] for i in rng.permutation(len(r.updates))))
            for r in history.rounds
        ),
    )
    np.testing.assert_array_equal(
        delta(history.in_memory(), "ann", "bob", damping=damping),
        delta(shuffled.in_memory(), "bob", "ann", damping=damping),
    )


def u_then_v(history: History, damping: float, erase: bool) -> np.ndarray:
    ledger = history.in_memory()
    method = FastFedUL(skew=Scalar(damping), minimum_coverage=0)
    known = [name for name in ("ann", "bob") if name in ledger.clients()]
    for name in known:
        forget(ledger, [name], method, erase=erase)
    return ledger.final.params.flat


def both_at_once(history: History, damping: float) -> np.ndarray:
    ledger = history.in_memory()
    moved = delta(ledger, "ann", "bob", damping=damping)
    cleaned: np.ndarray = ledger.final.params.flat + moved
    return cleaned


@given(history=histories(), damping=dampings)
def test_one_after_the_other_equals_both_at_once_with_the_history_erased(
    history: History, damping: float
) -> None:
    np.testing.assert_allclose(
        u_then_v(history, damping, erase=True),
        both_at_once(history, damping),
        rtol=1e-4,
        atol=2e-4,
    )


@given(history=histories(), damping=dampings)
def test_one_after_the_other_equals_both_at_once_with_the_history_kept(
    history: History, damping: float
) -> None:
    np.testing.assert_allclose(
        u_then_v(history, damping, erase=False),
        both_at_once(history, damping),
        rtol=1e-4,
        atol=2e-4,
    )


@given(history=histories())
def test_forgetting_everybody_undamped_returns_the_initial_model(
    history: History,
) -> None:
    ledger = history.in_memory()
    forget(ledger, ledger.clients(), FastFedUL(skew=NoSkew()), erase=False)
    np.testing.assert_allclose(
        ledger.final.params.flat, history.initial, rtol=1e-5, atol=1e-5
    )


@given(history=histories())
def test_full_damping_leaves_only_the_last_round(history: History) -> None:
    ledger = history.in_memory()
    result = FastFedUL(skew=Scalar(1.0))(UnlearnRequest(ledger, frozenset({"ann"})))
    last = History(history.initial, (Round(0, history.rounds[-1].updates),))
    np.testing.assert_allclose(
        result.delta.flat, delta(last.in_memory(), "ann"), rtol=1e-5, atol=1e-6
    )


@given(history=histories(), damping=dampings, factor=st.floats(0.01, 100))
def test_the_difference_is_linear_in_the_recorded_vectors(
    history: History, damping: float, factor: float
) -> None:
    scaled = History(
        history.initial,
        tuple(
            Round(
                r.index,
                tuple(
                    ClientUpdate(
                        u.client,
                        u.share,
                        Params(LAYOUT, u.delta.flat * np.float32(factor)),
                    )
                    for u in r.updates
                    if u.delta is not None
                ),
            )
            for r in history.rounds
        ),
    )
    once = delta(history.in_memory(), "ann", "cyd", damping=damping)
    many = delta(scaled.in_memory(), "ann", "cyd", damping=damping)
    np.testing.assert_allclose(many, once * factor, rtol=1e-4, atol=1e-4 * factor)


@given(history=histories(), seed=st.integers(0, 999))
def test_a_damping_per_round_follows_the_recursion(history: History, seed: int) -> None:
    rng = np.random.default_rng(seed)
    per_round = tuple(rng.uniform(0, 1, len(history.rounds)).tolist())
    ledger = history.in_memory()
    method = FastFedUL(skew=Scalar(per_round))
    result = method(UnlearnRequest(ledger, frozenset({"bob"})))
    expected = np.zeros(SIZE)
    for damping, gamma in zip(per_round, gammas(history, "bob"), strict=True):
        expected = (1 - damping) * expected + gamma
    np.testing.assert_allclose(result.delta.flat, expected, rtol=1e-4, atol=1e-5)
    norms = [float(np.linalg.norm(gamma)) for gamma in gammas(history, "bob")]
    np.testing.assert_allclose(result.gamma_norms, norms, rtol=1e-4, atol=1e-4)


def gammas(history: History, client: str) -> list[np.ndarray]:
    """Return what each round would have added without a client, minus what it did."""
    found = []
    for round_ in history.rounds:
        step, clean, total = np.zeros(SIZE), np.zeros(SIZE), 0.0
        for update in round_.updates:
            assert update.delta is not None
            step += update.share * update.delta.flat
            if update.client != client:
                clean += update.share * update.delta.flat
                total += update.share
        found.append((clean / total if total else clean) - step)
    return found


@settings(max_examples=15, deadline=None)
@given(history=histories(), damping=dampings)
def test_disk_equals_memory(history: History, damping: float) -> None:
    with on_disk(history) as ledger:
        np.testing.assert_allclose(
            delta(ledger, "ann", "eve", damping=damping),
            delta(history.in_memory(), "ann", "eve", damping=damping),
            rtol=1e-6,
            atol=1e-6,
        )


@settings(max_examples=15, deadline=None)
@given(history=histories())
def test_disk_equals_memory_also_by_the_usual_skew(history: History) -> None:
    request = frozenset({"ann", "eve"})
    with on_disk(history) as ledger:
        found = FastFedUL()(UnlearnRequest(ledger, request)).delta.flat
        expected = FastFedUL()(UnlearnRequest(history.in_memory(), request)).delta.flat
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(
    history=histories(partial=False),
    damping=dampings,
    dtype=st.sampled_from(STORAGE_DTYPES),
)
def test_a_smaller_ledger_gives_the_same_answer_within_its_bound(
    history: History, damping: float, dtype: StorageDtype
) -> None:
    with on_disk(history, dtype) as ledger:
        found = delta(ledger, "ann", damping=damping)
    allowed = np.full(SIZE, 1e-5)
    for round_ in history.rounds:
        update = next(u for u in round_.updates if u.client == "ann")
        assert update.delta is not None
        left = 1 - update.share
        assume(left > 0)
        allowed += update.share / left * error_bound(update.delta.flat, dtype)
    exact = delta(history.in_memory(), "ann", damping=damping)
    assert (np.abs(found - exact) <= allowed).all()


class on_disk:  # noqa: N801 (reads as a function)
    """A history on disk for the time of a `with` block."""

    def __init__(self, history: History, dtype: StorageDtype = "float32") -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._ledger = DiskLedger.create(
            Path(self._folder.name) / "ledger",
            Model(Params(LAYOUT, history.initial)),
            update_dtype=dtype,
        )
        history.onto(self._ledger)

    def __enter__(self) -> DiskLedger:
        return self._ledger

    def __exit__(self, *exception: object) -> None:
        self._ledger.close()
        self._folder.cleanup()


@given(history=histories(partial=False, equal=True), damping=dampings)
def test_it_equals_algorithm_2_of_the_paper(history: History, damping: float) -> None:
    np.testing.assert_allclose(
        delta(history.in_memory(), "cyd", damping=damping),
        algorithm_2(history, "cyd", alpha=-damping),
        rtol=1e-4,
        atol=1e-5,
    )


def algorithm_2(history: History, target: str, *, alpha: float) -> np.ndarray:
    """The paper's Algorithm 2 as printed, but for the sign that alpha is given."""
    difference = np.zeros(SIZE)
    for round_ in history.rounds:
        size = len(round_.updates)
        others = np.zeros(SIZE)
        own = np.zeros(SIZE)
        for update in round_.updates:
            assert update.delta is not None
            if update.client == target:
                own += update.delta.flat
            else:
                others += update.delta.flat
        difference = (1 + alpha) * difference
        difference = difference + others / (size * (size - 1)) - own / size
    return difference
