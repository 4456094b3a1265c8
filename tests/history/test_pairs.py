"""Differences of two clients that a ledger of sums keeps."""

from __future__ import annotations

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
from fastfedul.history.pairs import RESERVOIR, offered_pairs
from fastfedul.history.participation import participation
from fastfedul.records import VectorRef
from fastfedul.unlearn.deviations import paired_deviations

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


@pytest.mark.parametrize("gone", [frozenset(), frozenset({"c1", "c4"})])
def test_pairs_scatter_as_the_updates_do(tmp_path: Path, gone: frozenset[str]) -> None:
    """Over many ledgers the mean of what the pairs say is what the updates say."""
    found, wanted = np.zeros((SIZE, SIZE)), np.zeros((SIZE, SIZE))
    for seed in range(30):
        rounds = rounds_of(6, seed)
        with of_sums(tmp_path / str(seed), rounds) as ledger:
            rows = paired_deviations(ledger, participation(ledger), gone).read(0, SIZE)
        found += rows.T @ rows / 30
        wanted += covariance(rounds, gone) / 30

    assert np.abs(found - wanted).max() < 0.06 * np.trace(wanted)
    assert np.trace(found) == pytest.approx(np.trace(wanted), rel=0.05)


def test_a_leaver_is_in_no_pair_that_is_used(tmp_path: Path) -> None:
    with of_sums(tmp_path / "ledger", rounds_of(8)) as ledger:
        rows = paired_deviations(ledger, participation(ledger), frozenset({"c2"}))
        assert all("c2" not in (ref.client, ref.other) for ref in rows.refs)


def test_erasing_a_client_removes_its_pairs_and_their_files(tmp_path: Path) -> None:
    with of_sums(tmp_path / "ledger", rounds_of(8)) as ledger:
        before = len(ledger.pairs())
        forget(ledger, ["c2"], erase=True)
        left = ledger.pairs()

        assert 0 < len(left) < before
        assert all("c2" not in (pair.client, pair.other) for pair in left)
        files = {path.name for path in (ledger.path / "arrays").iterdir()}
        assert len(files) == len(left) + 6 + 2  # pairs, sums, two models
        assert verify(ledger).problems == ()


def test_compacting_keeps_as_many_pairs(tmp_path: Path) -> None:
    ledger = DiskLedger.create(tmp_path / "ledger", Model(Params.zeros(LAYOUT)))
    rounds = rounds_of(8)
    with ledger:
        for round_ in rounds:
            ledger.append(round_)
        whole = FastFedUL()(UnlearnRequest(ledger, frozenset({"c0"})))
        ledger.compact()
        assert len(ledger.pairs()) == RESERVOIR
        again = FastFedUL()(UnlearnRequest(ledger, frozenset({"c0"})))
        assert verify(ledger).problems == ()

    # One axis only: the same formula from pairs in place of deviations.
    gap = np.linalg.norm(again.delta.flat - whole.delta.flat)
    assert gap < 0.5 * np.linalg.norm(whole.delta.flat)


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
