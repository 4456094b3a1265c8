"""Skew per coordinate against the formula written out over all updates."""

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
from fastfedul.unlearn.fast_fedul import Skew

SIZE = 40
NAMES = ("a", "b", "c", "d", "e", "f")
LAYOUT = Params.of({"w": np.zeros(SIZE, np.float32)}).layout
COORDINATE = FastFedUL(skew="coordinate", spread=0.3)


def rounds_of(
    seed: int, *, everybody: bool = False, equal: bool = False, without: str = ""
) -> list[Round]:
    """Return rounds with unequal shares; a client left out changes nobody's update."""
    rng = np.random.default_rng(seed)
    rounds: list[Round] = []
    for index in range(9):
        here = [n for n in NAMES if everybody or rng.random() < 0.7]
        sizes = [1] * len(here) if equal else rng.integers(1, 9, len(here)).tolist()
        common = rng.normal(0, 1, SIZE)
        deltas = {n: common + rng.normal(0, 0.1 + i, SIZE) for i, n in enumerate(here)}
        kept = [(n, s) for n, s in zip(here, sizes, strict=True) if n not in without]
        total = sum(size for _, size in kept)
        updates = tuple(
            ClientUpdate(n, size / total, Params(LAYOUT, deltas[n].astype(np.float32)))
            for n, size in kept
        )
        assert len(updates) > 1, "this seed gives a round with too few participants"
        rounds.append(Round(index, updates))
    return rounds


def memory(rounds: list[Round]) -> MemoryLedger:
    ledger = MemoryLedger.create(Model(Params.zeros(LAYOUT)))
    for round_ in rounds:
        ledger.append(round_)
    return ledger


def by_formula(
    rounds: list[Round], gone: set[str], spread: float, persistence: float
) -> np.ndarray:
    """Return the difference, straight from the definitions and every update."""
    removed = np.zeros(SIZE)
    weighted_variance, total = np.zeros(SIZE), 0.0
    deviations: dict[str, np.ndarray] = {}
    for round_ in rounds:
        vectors = {
            u.client: (u.share, u.delta.flat.astype(np.float64))
            for u in round_.updates
            if u.delta is not None
        }
        step = sum(share * vector for share, vector in vectors.values())
        rest = {n: both for n, both in vectors.items() if n not in gone}
        left = sum(share for share, _ in rest.values())
        if not rest:
            removed -= step
            continue
        mean = sum(share * vector for share, vector in rest.values()) / left
        removed += mean - step
        for name, (share, vector) in rest.items():
            weighted_variance += share * (vector - mean) ** 2
            own = deviations.setdefault(name, np.zeros(SIZE))
            own += share * (vector - mean)
        total += left
    stayers = {u.client for r in rounds for u in r.updates} - gone
    f = weighted_variance / total
    p = sum(deviations[name] ** 2 for name in stayers) / len(stayers)
    ratio = removed**2 / (removed**2 + persistence * p)
    found: np.ndarray = np.exp(-spread * f / f.mean()) * ratio * removed
    return found


@pytest.mark.parametrize("everybody", [True, False])
@pytest.mark.parametrize("gone", [{"a"}, {"c"}, {"b", "e"}])
@pytest.mark.parametrize(("spread", "persistence"), [(0.3, 1.0), (0, 2.0), (1.5, 0)])
def test_it_is_the_formula_for_any_shares_and_participation(
    everybody: bool, gone: set[str], spread: float, persistence: float
) -> None:
    rounds = rounds_of(5, everybody=everybody)
    method = FastFedUL(skew="coordinate", spread=spread, persistence=persistence)
    found = method(UnlearnRequest(memory(rounds), frozenset(gone)))
    expected = by_formula(rounds, gone, spread, persistence)
    np.testing.assert_allclose(found.delta.flat, expected, rtol=2e-3, atol=2e-5)


def test_without_spread_and_persistence_nothing_is_damped() -> None:
    ledger = memory(rounds_of(3))
    request = UnlearnRequest(ledger, frozenset({"d"}))
    plain = FastFedUL(skew="none")(request)
    bare = FastFedUL(skew="coordinate", spread=0, persistence=0)(request)
    np.testing.assert_allclose(bare.delta.flat, plain.delta.flat, rtol=1e-6)
    undamped = FastFedUL(damping=0)(request)
    assert np.array_equal(plain.delta.flat, undamped.delta.flat)


def test_every_coordinate_moves_at_most_as_far_as_undamped_and_the_same_way() -> None:
    request = UnlearnRequest(memory(rounds_of(8)), frozenset({"b"}))
    plain = FastFedUL(skew="none")(request).delta.flat
    damped = COORDINATE(request).delta.flat
    assert (np.abs(damped) <= np.abs(plain) + 1e-7).all()
    assert (damped * plain >= 0).all()
    assert np.linalg.norm(damped) < 0.95 * np.linalg.norm(plain)


def test_a_ledger_on_disk_gives_the_same(tmp_path: Path) -> None:
    rounds = rounds_of(4)
    with DiskLedger.create(
        tmp_path / "ledger", Model(Params.zeros(LAYOUT)), sums_every=4
    ) as disk:
        for round_ in rounds:
            disk.append(round_)
    request = UnlearnRequest(memory(rounds), frozenset({"a", "f"}))
    expected = COORDINATE(request).delta.flat
    with LedgerReader(tmp_path / "ledger") as ledger:
        found = COORDINATE(UnlearnRequest(ledger, frozenset({"a", "f"})))
    np.testing.assert_allclose(found.delta.flat, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_a_quantised_ledger_gives_nearly_the_same(tmp_path: Path, dtype: str) -> None:
    rounds = rounds_of(6)
    exact = COORDINATE(UnlearnRequest(memory(rounds), frozenset({"c"}))).delta.flat
    with DiskLedger.create(
        tmp_path / "ledger",
        Model(Params.zeros(LAYOUT)),
        update_dtype=dtype,  # type: ignore[arg-type]
    ) as disk:
        for round_ in rounds:
            disk.append(round_)
        found = COORDINATE(UnlearnRequest(disk, frozenset({"c"}))).delta.flat
    distance = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert 0 < distance < 0.05


@pytest.mark.parametrize(
    ("everybody", "equal", "tolerance"),
    [(True, True, 1e-4), (True, False, 0.05), (False, False, 0.15)],
)
def test_after_an_erasure_it_is_as_if_the_client_had_never_been_there(
    tmp_path: Path, everybody: bool, equal: bool, tolerance: float
) -> None:
    """Exact where the erased client had one share; its removal is undamped here."""
    with DiskLedger.create(tmp_path / "with", Model(Params.zeros(LAYOUT))) as disk:
        for round_ in rounds_of(11, everybody=everybody, equal=equal):
            disk.append(round_)
        forget(disk, ["b"], FastFedUL(damping=0), erase=True)
        found = COORDINATE(UnlearnRequest(disk, frozenset({"d"}))).delta.flat
    never = memory(rounds_of(11, everybody=everybody, equal=equal, without="b"))
    expected = COORDINATE(UnlearnRequest(never, frozenset({"d"}))).delta.flat
    distance = np.linalg.norm(found - expected)
    assert distance < tolerance * np.linalg.norm(expected)


def test_a_client_forgotten_before_is_not_removed_twice() -> None:
    """Forgotten with its history kept, or erased: the next answer is the same."""
    answers = []
    for erase in (False, True):
        ledger = memory(rounds_of(11))
        forget(ledger, ["a"], FastFedUL(damping=0), erase=erase)
        answers.append(COORDINATE(UnlearnRequest(ledger, frozenset({"c"}))).delta.flat)
    np.testing.assert_allclose(answers[0], answers[1], rtol=1e-3, atol=1e-5)


def test_dropped_updates_are_weighted_and_the_result_says_so() -> None:
    view = KeptView(memory(rounds_of(1, everybody=True)), Keep("uniform", 3, seed=4))
    found = FastFedUL(skew="coordinate", minimum_coverage=0)(
        UnlearnRequest(view, frozenset({"e"}))
    )
    assert 0 < found.coverage < 1
    assert any("was kept" in text for text in found.warnings)
    assert np.isfinite(found.delta.flat).all()


def test_where_nothing_differs_nothing_is_removed_and_nothing_divided_by_zero() -> None:
    same = Params(LAYOUT, np.ones(SIZE, np.float32))
    updates = tuple(ClientUpdate(n, 0.25, same) for n in "abcd")
    ledger = memory([Round(0, updates), Round(1, updates)])
    found = COORDINATE(UnlearnRequest(ledger, frozenset({"a"})))
    assert not found.delta.flat.any()


def test_a_sweep_gives_what_single_calls_give() -> None:
    request = UnlearnRequest(memory(rounds_of(9)), frozenset({"a"}))
    spreads = [0.1, None, 0.5]
    swept = FastFedUL(persistence=3).sweep_spreads(request, spreads)
    for result, spread in zip(swept, spreads, strict=True):
        single = FastFedUL(spread=spread, persistence=3)(request)
        assert np.array_equal(result.delta.flat, single.delta.flat)
        assert (result.choice is None) == (spread is not None)


def test_a_recursion_that_chooses_uses_what_it_says_it_chose() -> None:
    request = UnlearnRequest(memory(rounds_of(9)), frozenset({"a"}))
    method = FastFedUL(spread=0.5, recursion=True)
    [found] = method.sweep_spreads(request, [None])
    [same] = method.sweep_spreads(request, [found.spread])
    assert found.choice is not None
    assert np.array_equal(found.delta.flat, same.delta.flat)


def test_what_it_cannot_do_is_refused() -> None:
    ledger = MemoryLedger.create(Model(Params.zeros(LAYOUT)), aggregation="median")
    for round_ in rounds_of(1, everybody=True)[:1]:
        ledger.append(round_)
    with pytest.raises(UnlearnRefusedError, match="needs weighted means"):
        COORDINATE(UnlearnRequest(ledger, frozenset({"a"})))
    with pytest.raises(InvalidInputError, match="skew is scalar, coordinate, direct"):
        FastFedUL(skew="curved")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="spread is from 0 to"):
        FastFedUL(skew="coordinate", spread=-1)


def test_a_recursion_sees_the_history_of_the_moment_it_was_called(
    tmp_path: Path,
) -> None:
    method = FastFedUL(spread=0.5, recursion=True)
    with DiskLedger.create(tmp_path / "ledger", Model(Params.zeros(LAYOUT))) as ledger:
        for round_ in rounds_of(1, everybody=True):
            ledger.append(round_)
        with LedgerReader(tmp_path / "ledger") as reader:
            request = UnlearnRequest(reader, frozenset({"a"}))
            expected = method(request).delta.flat
            answers = method.sweep_spreads(request, [0.5])
            forget(ledger, ["b"], erase=True)
            np.testing.assert_array_equal(next(answers).delta.flat, expected)


def on_disk(path: Path, rounds: list[Round]) -> Path:
    with DiskLedger.create(path, Model(Params.zeros(LAYOUT))) as ledger:
        for round_ in rounds:
            ledger.append(round_)
    return path


def alone_with(target: str, others: tuple[str, ...]) -> list[Round]:
    """Return rounds in which those who stay all send the same."""
    rng = np.random.default_rng(17)
    rounds = []
    for index in range(10):
        own, same = rng.normal(0, 0.1, (2, SIZE)).astype(np.float32)
        names = (target, *others)
        updates = tuple(
            ClientUpdate(
                name, 1 / len(names), Params(LAYOUT, own if name == target else same)
            )
            for name in names
        )
        rounds.append(Round(index, updates))
    return rounds


@pytest.mark.parametrize("skew", ["coordinate", "direction"])
@pytest.mark.parametrize("others", [("b",), ("b", "c", "d")])
def test_where_those_who_stay_do_not_differ_all_of_it_goes(
    tmp_path: Path, skew: Skew, others: tuple[str, ...]
) -> None:
    rounds = alone_with("a", others)
    kept = on_disk(tmp_path / "rounds", rounds)
    for ledger in (memory(rounds), LedgerReader(kept)):
        request = UnlearnRequest(ledger, frozenset({"a"}))
        undamped = FastFedUL(skew="none")(request).delta.flat
        found = FastFedUL(skew=skew)(request).delta.flat
        np.testing.assert_allclose(found, undamped, rtol=1e-5, atol=1e-7)


def test_rounding_is_no_spread_in_a_ledger_of_sums_either(tmp_path: Path) -> None:
    rounds = alone_with("a", ("b",))
    path = on_disk(tmp_path / "rounds", rounds)
    request = UnlearnRequest(memory(rounds), frozenset({"a"}))
    undamped = FastFedUL(skew="none")(request).delta.flat
    with DiskLedger(path) as ledger:
        ledger.compact()
        found = FastFedUL()(UnlearnRequest(ledger, frozenset({"a"}))).delta.flat
    np.testing.assert_allclose(found, undamped, rtol=1e-4, atol=1e-6)
