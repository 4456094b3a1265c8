"""Skew per direction: against the formula in full, and against a known retraining."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    FastFedUL,
    InvalidInputError,
    Keep,
    LedgerReader,
    MemoryLedger,
    Model,
    Params,
    Round,
    UnlearnRefusedError,
    UnlearnRequest,
    forget,
)
from fastfedul.history.views import KeptView
from fastfedul.unlearn.directions import HELD, directed_difference
from fastfedul.unlearn.tracing import leaving

SIZE = 150
NAMES = ("a", "b", "c", "d", "e", "f")
LAYOUT = Params.of({"w": np.zeros(SIZE, np.float32)}).layout
DIRECTION = FastFedUL(skew="direction")


def rounds_of(seed: int, *, everybody: bool = True, without: str = "") -> list[Round]:
    """Return rounds in which clients differ mostly in a few directions."""
    rng = np.random.default_rng(seed)
    shared = rng.normal(0, 1, (4, SIZE))
    rounds: list[Round] = []
    for index in range(8):
        here = [n for n in NAMES if everybody or rng.random() < 0.7]
        sizes = rng.integers(1, 9, len(here)).tolist()
        deltas = {
            n: rng.normal(0, 1, 4) @ shared + rng.normal(0, 0.3, SIZE) for n in here
        }
        kept = [(n, s) for n, s in zip(here, sizes, strict=True) if n not in without]
        total = sum(size for _, size in kept)
        updates = tuple(
            ClientUpdate(n, size / total, Params(LAYOUT, deltas[n].astype(np.float32)))
            for n, size in kept
        )
        assert len(updates) > 2, "this seed gives a round with too few participants"
        rounds.append(Round(index, updates))
    return rounds


def memory(rounds: list[Round]) -> MemoryLedger:
    ledger = MemoryLedger.create(Model(Params.zeros(LAYOUT)))
    for round_ in rounds:
        ledger.append(round_)
    return ledger


def flat(update: ClientUpdate) -> np.ndarray:
    assert update.delta is not None
    return update.delta.flat.astype(float)


def deviations(rounds: list[Round], gone: set[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return V, a row for each update of those who stay, and D0."""
    rows, removed = [], np.zeros(SIZE)
    for round_ in rounds:
        stay = [u for u in round_.updates if u.client not in gone]
        left = sum(u.share for u in stay)
        step = np.sum([u.share * flat(u) for u in round_.updates], axis=0)
        cleaned = np.sum([u.share / left * flat(u) for u in stay], axis=0)
        removed += cleaned - step
        rows += [np.sqrt(u.share) * (flat(u) - cleaned) for u in stay]
    return np.array(rows), removed


@pytest.mark.parametrize("everybody", [True, False])
@pytest.mark.parametrize("gone", [{"a"}, {"b", "e"}])
@pytest.mark.parametrize("spread", [0.0, 0.4])
def test_it_is_the_formula_by_the_whole_scatter(
    everybody: bool, gone: set[str], spread: float
) -> None:
    """The scatter is a matrix here, parameters by parameters, and decomposed."""
    rounds = rounds_of(5, everybody=everybody)
    rows, removed = deviations(rounds, gone)
    values, vectors = np.linalg.eigh(rows.T @ rows)
    some = values > 1e-6 * values.max()
    held = HELD / np.sqrt(1 + values[some] / values[some].mean())
    along = vectors[:, some].T @ removed
    expected = removed - vectors[:, some] @ ((1 - held) * along)
    lefts = [sum(u.share for u in r.updates if u.client not in gone) for r in rounds]
    spreads = np.square(rows).sum(0) / sum(lefts)
    expected *= np.exp(-spread * np.sqrt(spreads / spreads.mean()))
    method = FastFedUL(skew="direction", spread=spread)
    found = method(UnlearnRequest(memory(rounds), frozenset(gone)))
    assert found.skew == "direction"
    np.testing.assert_allclose(found.delta.flat, expected, rtol=2e-3, atol=2e-4)


def test_across_the_directions_nothing_is_held_back() -> None:
    rounds = rounds_of(3)
    rows, removed = deviations(rounds, {"c"})
    request = UnlearnRequest(memory(rounds), frozenset({"c"}))
    found = FastFedUL(skew="direction", spread=0.0)(request).delta.flat
    basis = np.linalg.svd(rows, full_matrices=True)[2]
    rank = np.linalg.matrix_rank(rows, tol=1e-4 * np.linalg.norm(rows, 2))
    assert 0 < rank < SIZE
    across, along = basis[rank:], basis[:rank]
    np.testing.assert_allclose(across @ found, across @ removed, rtol=1e-3, atol=1e-4)
    part = np.linalg.norm(along @ found) / np.linalg.norm(along @ removed)
    assert 0 < part <= HELD


def test_a_ledger_on_disk_gives_the_same_in_any_dtype(tmp_path: Path) -> None:
    rounds = rounds_of(4, everybody=False)
    exact = DIRECTION(UnlearnRequest(memory(rounds), frozenset({"a"}))).delta.flat
    for dtype, worst in (("float32", 1e-4), ("float16", 0.02), ("int8", 0.2)):
        with DiskLedger.create(
            tmp_path / dtype,
            Model(Params.zeros(LAYOUT)),
            update_dtype=dtype,  # type: ignore[arg-type]
        ) as disk:
            for round_ in rounds:
                disk.append(round_)
        with LedgerReader(tmp_path / dtype) as ledger:
            found = DIRECTION(UnlearnRequest(ledger, frozenset({"a"}))).delta.flat
        distance = np.linalg.norm(found - exact) / np.linalg.norm(exact)
        assert distance < worst, dtype


@pytest.mark.parametrize("erase", [True, False])
def test_after_another_left_it_is_as_if_that_one_had_never_been_there(
    erase: bool,
) -> None:
    ledger = memory(rounds_of(11))
    forget(ledger, ["b"], FastFedUL(damping=0), erase=erase)
    request = UnlearnRequest(ledger, frozenset({"d"}))
    found = FastFedUL(skew="direction", spread=0.0)(request).delta.flat
    never = UnlearnRequest(memory(rounds_of(11, without="b")), frozenset({"d"}))
    expected = FastFedUL(skew="direction", spread=0.0)(never).delta.flat
    # Weights stay those of the original shares, so the directions count differently.
    distance = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert distance < 0.05


def test_more_updates_than_rows_are_added_up_and_keep_what_matters() -> None:
    rounds = rounds_of(6)
    ledger = memory(rounds)
    removal = leaving(ledger, frozenset({"a"}), ledger.rounds())
    rows, removed = deviations(rounds, {"a"})
    flat = removed.astype(np.float32)
    full = directed_difference(ledger, removal, ledger.rounds(), flat)
    few = directed_difference(ledger, removal, ledger.rounds(), flat, max_rows=12)
    again = directed_difference(ledger, removal, ledger.rounds(), flat, max_rows=12)
    assert (full.num_updates, few.num_updates) == (len(rows), len(rows))
    assert few.num_directions == 12 < full.num_directions
    assert np.array_equal(few.difference, again.difference)
    # Clients differ in four directions mostly, which twelve sums of rows still show.
    strong = np.linalg.svd(rows)[2][:4]
    for found in (full, few):
        part = np.linalg.norm(strong @ found.difference) / np.linalg.norm(strong @ flat)
        assert part < HELD


@pytest.mark.parametrize("seed", range(4))
def test_it_comes_nearest_to_retraining_where_steep_directions_cross_coordinates(
    seed: int,
) -> None:
    """Least squares: retraining is computed, and steep directions are pulled back."""
    rng = np.random.default_rng(seed)
    steep = np.linalg.qr(rng.normal(0, 1, (SIZE, 6)))[0].T
    truth, problems = rng.normal(0, 1, SIZE), {}
    for name in NAMES:
        data = np.vstack(
            [rng.normal(0, 1, (30, 6)) @ steep, 0.2 * rng.normal(0, 1, (30, SIZE))]
        )
        problems[name] = (data, data @ (truth + rng.normal(0, 1, SIZE)))

    def train(names: tuple[str, ...]) -> MemoryLedger:
        ledger = MemoryLedger.create(Model(Params.zeros(LAYOUT)))
        for index in range(12):
            at = ledger.final.params.flat.astype(float)
            updates = []
            for name in names:
                data, goal = problems[name]
                way = (0.02 * data.T @ (goal - data @ at)).astype(np.float32)
                updates.append(ClientUpdate(name, 1 / len(names), Params(LAYOUT, way)))
            ledger.append(Round(index, tuple(updates)))
        return ledger

    retrained = train(NAMES[1:]).final.params.flat
    request = UnlearnRequest(train(NAMES), frozenset({"a"}))

    def distance(method: FastFedUL) -> float:
        return float(np.linalg.norm(method(request).params.flat - retrained))

    others = [FastFedUL(damping=d) for d in (0, 0.05, 0.07, 0.1, 0.2)]
    others += [FastFedUL(skew="coordinate")]
    assert distance(DIRECTION) < 0.75 * min(distance(method) for method in others)


def test_a_history_of_many_updates_says_that_sums_stand_in() -> None:
    rounds = rounds_of(6)
    few = UnlearnRequest(memory(rounds), frozenset({"a"}))
    assert DIRECTION(few).warnings == ()
    many = [Round(n, rounds[n % len(rounds)].updates) for n in range(105)]
    found = DIRECTION(UnlearnRequest(memory(many), frozenset({"a"})))
    [said] = found.warnings
    assert said.startswith("512 sums stand in for the directions of 525 updates")
    assert np.isfinite(found.delta.flat).all()


def test_where_nobody_differs_and_where_nobody_else_is_nothing_breaks() -> None:
    same = Params(LAYOUT, np.ones(SIZE, np.float32))
    alike = tuple(ClientUpdate(n, 0.25, same) for n in "abcd")
    ledger = memory([Round(0, alike), Round(1, alike)])
    assert not DIRECTION(UnlearnRequest(ledger, frozenset({"a"}))).delta.flat.any()
    alone = memory([Round(0, (ClientUpdate("a", 1.0, same),)), Round(1, alike)])
    found = DIRECTION(UnlearnRequest(alone, frozenset({"a"}))).delta.flat
    np.testing.assert_allclose(found, -1, rtol=1e-6)


def test_only_kept_updates_are_read() -> None:
    view = KeptView(memory(rounds_of(1)), Keep("uniform", 3, seed=4))
    method = FastFedUL(skew="direction", minimum_coverage=0)
    found = method(UnlearnRequest(view, frozenset({"e"})))
    assert 0 < found.coverage < 1
    assert np.isfinite(found.delta.flat).all()


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="persistence and recursion belong to"):
        FastFedUL(skew="direction", persistence=2)
    with pytest.raises(InvalidInputError, match="give the ones or the others"):
        FastFedUL(skew="direction", damping=0.1)
    median = MemoryLedger.create(Model(Params.zeros(LAYOUT)), aggregation="median")
    median.append(rounds_of(1)[0])
    with pytest.raises(UnlearnRefusedError, match="needs weighted means"):
        DIRECTION(UnlearnRequest(median, frozenset({"a"})))


def test_sums_have_no_directions(tmp_path: Path) -> None:
    with DiskLedger.create(
        tmp_path / "sums", Model(Params.zeros(LAYOUT)), history="sums"
    ) as ledger:
        ledger.append(rounds_of(1)[0])
        with pytest.raises(
            UnlearnRefusedError, match="skew direction needs the rounds"
        ):
            DIRECTION(UnlearnRequest(ledger, frozenset({"a"})))
