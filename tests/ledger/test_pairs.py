"""Differences of two clients that a ledger of sums keeps."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    FastFedUL,
    LocalSGD,
    Model,
    Params,
    Round,
    UnlearnRequest,
    forget,
    verify,
)
from fastfedul.ledger.pairs import RESERVOIR, offered_pairs
from fastfedul.ledger.participation import participation
from fastfedul.methods.fast_fedul.columns import rows_of
from fastfedul.methods.fast_fedul.deviations import paired_deviations
from fastfedul.records import VectorRef
from tests.support.damage import images_of, live_vectors

SIZE = 5
LAYOUT = Params.of({"w": np.zeros(SIZE, np.float32)}).layout
NAMES = tuple(f"c{number}" for number in range(7))
CHAIN = bytes(range(32))


def rounds_of(num_rounds: int, seed: int = 0, *, num_clients: int = 7) -> list[Round]:
    rng = np.random.default_rng(seed)
    found = []
    for index in range(num_rounds):
        weights = rng.uniform(1, 4, num_clients)
        updates = tuple(
            ClientUpdate(
                name,
                float(weight / weights.sum()),
                Params(LAYOUT, rng.standard_normal(SIZE).astype(np.float32)),
            )
            for name, weight in zip(NAMES[:num_clients], weights, strict=True)
        )
        local = LocalSGD(lr=0.1, momentum=0, batch_size=8, epochs=1)
        found.append(Round(index, updates, local=local))
    return found


def of_sums(path: Path, rounds: list[Round]) -> DiskLedger:
    ledger = DiskLedger.create(path, Model(Params.zeros(LAYOUT)), history="sums")
    for round_ in rounds:
        ledger.append(round_)
    return ledger


def covariance(rounds: list[Round], gone: frozenset[str]) -> np.ndarray:
    """The weighted covariance of the stayers' updates around their own mean."""
    found, total = np.zeros((SIZE, SIZE)), 0.0
    for round_ in rounds:
        own = [u for u in round_.updates if u.client not in gone]
        shares = np.array([u.share for u in own])
        vectors = np.stack([u.delta.flat for u in own if u.delta is not None])
        away = vectors - (shares / shares.sum()) @ vectors
        found += (shares[:, None] * away).T @ away
        total += shares.sum()
    return found / total


def test_a_round_offers_every_pair_at_most_once() -> None:
    pairs = offered_pairs(CHAIN, 3, 7)
    assert len(pairs) == 21
    assert len({(p.left, p.right) for p in pairs}) == 21
    assert all(0 <= p.left < p.right < 7 for p in pairs)
    assert all(p.odds == 1 for p in pairs)


def test_a_large_round_offers_no_more_than_are_kept() -> None:
    pairs = offered_pairs(CHAIN, 0, 5_000)
    assert len(pairs) == RESERVOIR
    assert all(0 <= p.left < p.right < 5_000 for p in pairs)
    assert pairs[0].odds == 5_000 * 4_999 / 2 / RESERVOIR


def test_who_is_alone_offers_nothing() -> None:
    assert offered_pairs(CHAIN, 0, 1) == []


def test_no_more_pairs_are_kept_than_there_is_room_for(tmp_path: Path) -> None:
    with of_sums(tmp_path / "ledger", rounds_of(12)) as ledger:
        pairs = ledger.pairs()

    assert len(pairs) == RESERVOIR
    assert len({pair.round for pair in pairs}) > 6


def test_a_pair_is_the_difference_of_two_updates(tmp_path: Path) -> None:
    rounds = rounds_of(4)
    with of_sums(tmp_path / "ledger", rounds) as ledger:
        for pair in ledger.pairs():
            ref = VectorRef(pair.round, pair.client, pair.other)
            found = ledger.combine([ref], [[1.0]]).sums[0]
            own = {u.client: u.delta for u in rounds[pair.round].updates}
            left, right = own[pair.client], own[pair.other]
            assert left is not None
            assert right is not None
            np.testing.assert_array_equal(found, left.flat - right.flat)


@pytest.mark.slow
@pytest.mark.parametrize("gone", [frozenset(), frozenset({"c1", "c4"})])
def test_pairs_scatter_as_the_updates_do(tmp_path: Path, gone: frozenset[str]) -> None:
    """Over many ledgers the mean of what the pairs say is what the updates say."""
    found, wanted = np.zeros((SIZE, SIZE)), np.zeros((SIZE, SIZE))
    for seed in range(30):
        rounds = rounds_of(6, seed)
        with of_sums(tmp_path / str(seed), rounds) as ledger:
            pairs = paired_deviations(ledger, participation(ledger), gone)
            rows = rows_of(pairs, 0, SIZE)
        found += rows.T @ rows / 30
        wanted += covariance(rounds, gone) / 30

    assert np.abs(found - wanted).max() < 0.06 * np.trace(wanted)
    assert np.trace(found) == pytest.approx(np.trace(wanted), rel=0.05)


def test_a_leaver_is_in_no_pair_that_is_used(tmp_path: Path) -> None:
    with of_sums(tmp_path / "ledger", rounds_of(8)) as ledger:
        without = [p for p in ledger.pairs() if "c2" not in (p.client, p.other)]
        found = paired_deviations(ledger, participation(ledger), frozenset({"c2"}))
        rows = rows_of(found, 0, SIZE)
        refs = [VectorRef(p.round, p.client, p.other) for p in without]
        stored = ledger.stack(refs).read(0, SIZE)

    assert 0 < len(rows) == len(stored) < RESERVOIR
    # A row is its pair times a number.
    factors = rows[:, :1] / stored[:, :1]
    np.testing.assert_allclose(rows, factors * stored, rtol=1e-4, atol=1e-7)


def test_erasing_a_client_removes_its_pairs_and_their_files(tmp_path: Path) -> None:
    with of_sums(tmp_path / "ledger", rounds_of(8)) as ledger:
        before = len(ledger.pairs())
        done = forget(ledger, ["c2"], erase=True)
        left = ledger.pairs()

        assert 0 < len(left) < before
        assert all("c2" not in (pair.client, pair.other) for pair in left)
        files = live_vectors(ledger.path)
        # Beside the vectors there are the model and another first model.
        models = set((ledger.path / "arrays").iterdir()) - {*files}
        assert {*files} < set((ledger.path / "arrays").iterdir())
        assert ledger.model_path in models
        assert ledger.path / "arrays" / "00000001.safetensors" not in models
        assert len(models) == 2
        # Nothing lies in a file but what counts: pairs, and the sums of the other six
        # that the erasure could correct.
        sums = 6 - len(done.given_up)
        assert sum(len(vectors) for vectors in files.values()) == len(left) + sums
        for file, vectors in files.items():
            [image] = images_of(file.read_bytes())
            assert vectors[0][0] == image.data
            assert vectors[-1][1] == image.stop
            assert all(a[1] == b[0] for a, b in itertools.pairwise(vectors))
        assert verify(ledger).problems == ()


class Offers:
    """Every pair that a ledger of sums was ever offered, with its priority."""

    def __init__(self) -> None:
        self.priorities: dict[tuple[int, str, str], float] = {}

    def append(self, ledger: DiskLedger, round_: Round) -> None:
        names = [update.client for update in round_.updates]
        for pair in offered_pairs(ledger.chain, round_.index, len(names)):
            place = round_.index, names[pair.left], names[pair.right]
            self.priorities[place] = pair.priority
        ledger.append(round_)

    def below(self, limit: float, *, gone: str = "") -> set[tuple[int, str, str]]:
        """Places of the pairs below a limit, without those of a client."""
        return {
            p for p, own in self.priorities.items() if own < limit and gone not in p
        }


def kept_in(ledger: DiskLedger) -> set[tuple[int, str, str]]:
    return {(pair.round, pair.client, pair.other) for pair in ledger.pairs()}


def without(client: str, rounds: list[Round]) -> list[Round]:
    """The rounds as they are when a client does not take part any more."""
    found = []
    for round_ in rounds:
        own = [update for update in round_.updates if update.client != client]
        total = sum(update.share for update in own)
        updates = tuple(replace(u, share=u.share / total) for u in own)
        found.append(replace(round_, updates=updates))
    return found


def test_pairs_of_later_rounds_do_not_take_the_places_of_an_erased_client(
    tmp_path: Path,
) -> None:
    rounds, offers = rounds_of(40), Offers()
    with of_sums(tmp_path / "ledger", []) as ledger:
        for round_ in rounds[:8]:
            offers.append(ledger, round_)
        # The first pair that had no place; all before it are kept.
        limit = sorted(offers.priorities.values())[RESERVOIR]
        assert kept_in(ledger) == offers.below(limit)

        forget(ledger, ["c2"], erase=True)
        assert kept_in(ledger) == offers.below(limit, gone="c2")
        assert len(kept_in(ledger)) < RESERVOIR
        later = without("c2", rounds[8:])
        offers.append(ledger, later[0])
        assert kept_in(ledger) == offers.below(limit, gone="c2")

        for round_ in later[1:]:
            offers.append(ledger, round_)
        staying = {p: own for p, own in offers.priorities.items() if "c2" not in p}
        limit = sorted(staying.values())[RESERVOIR]
        assert kept_in(ledger) == offers.below(limit, gone="c2")
        assert verify(ledger).problems == ()


def test_a_compacted_ledger_goes_on_with_the_limit_of_its_pairs(tmp_path: Path) -> None:
    rounds, offers = rounds_of(9), Offers()
    with DiskLedger.create(tmp_path / "ledger", Model(Params.zeros(LAYOUT))) as ledger:
        for round_ in rounds[:8]:
            ledger.append(round_)
        chain = ledger.chain
        ledger.compact()
        drawn = [p for i in range(8) for p in offered_pairs(chain, i, len(NAMES))]
        limit = sorted(pair.priority for pair in drawn)[RESERVOIR]
        forget(ledger, ["c2"], erase=True)
        left = kept_in(ledger)
        [last] = without("c2", rounds[8:])
        offers.append(ledger, last)

        assert len(left) < RESERVOIR
        assert kept_in(ledger) == left | offers.below(limit)
        assert len(offers.below(limit)) < len(offers.priorities)


def test_a_budget_that_drops_pairs_lowers_their_limit(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    wide = Params.of({"w": np.zeros(4_000, np.float32)}).layout
    rounds, offers = [], Offers()
    for round_ in rounds_of(7):
        updates = tuple(
            replace(u, delta=Params(wide, rng.standard_normal(4_000).astype("f4")))
            for u in round_.updates
        )
        rounds.append(replace(round_, updates=updates))
    start = Model(Params.zeros(wide))
    with DiskLedger.create(tmp_path / "ledger", start, history="sums") as ledger:
        for round_ in rounds[:5]:
            offers.append(ledger, round_)
        size = ledger.head.live_bytes + ledger.index.num_bytes()
        ledger.set_budget(size * 3 // 4)
        offers.append(ledger, rounds[5])
        num_kept = len(ledger.pairs())
        assert 0 < num_kept < RESERVOIR
        limit = sorted(offers.priorities.values())[num_kept]
        assert kept_in(ledger) == offers.below(limit)

        ledger.set_budget(None)
        offers.append(ledger, rounds[6])
        assert kept_in(ledger) == offers.below(limit)


def test_compacting_keeps_as_many_pairs(tmp_path: Path) -> None:
    ledger = DiskLedger.create(tmp_path / "ledger", Model(Params.zeros(LAYOUT)))
    rounds = rounds_of(8)
    with ledger:
        for round_ in rounds:
            ledger.append(round_)
        ledger.compact()
        assert len(ledger.pairs()) == RESERVOIR
        again = FastFedUL()(UnlearnRequest(ledger, frozenset({"c0"})))
        assert verify(ledger).problems == ()

    # The pairs are drawn anew, so that they differ, but not what they stand for.
    with of_sums(tmp_path / "sums", rounds) as ledger:
        recorded = FastFedUL()(UnlearnRequest(ledger, frozenset({"c0"})))
    gap = np.linalg.norm(again.delta.flat - recorded.delta.flat)
    assert gap < 0.3 * np.linalg.norm(recorded.delta.flat)


def test_pairs_may_be_kept_in_few_bits(tmp_path: Path) -> None:
    rounds = rounds_of(6)
    start = Model(Params.zeros(LAYOUT))
    with DiskLedger.create(
        tmp_path / "ledger", start, history="sums", update_dtype="int8"
    ) as ledger:
        for round_ in rounds:
            ledger.append(round_)
        rough = FastFedUL()(UnlearnRequest(ledger, frozenset({"c0"})))
    with of_sums(tmp_path / "exact", rounds) as ledger:
        exact = FastFedUL()(UnlearnRequest(ledger, frozenset({"c0"})))

    assert rough.reaction is not None
    assert rough.reaction.num_updates > 0
    assert exact.reaction is not None
    assert rough.delta.flat.shape == exact.delta.flat.shape
