"""What a budget gives, by the estimate and in ledgers that are really written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastfedul import ClientUpdate, DiskLedger, FastFedUL, Keep, Model, Params, Round
from fastfedul.ledger.advice import MINIMUM_COVERAGE, Option, options_within
from fastfedul.ledger.changes import drop, garbage
from fastfedul.ledger.estimate import FederationSize, estimate
from fastfedul.methods.protocol import coverage_of
from fastfedul.records import StorageDtype
from fastfedul.rng import stream

SIZE = 20_000
PHONES = FederationSize(parameters=SIZE, clients=80, rounds=40, per_round=6)
START = Model(Params.of({"w": np.zeros(SIZE, np.float32)}))


def append_phones(ledger: DiskLedger, keep: Keep) -> None:
    """Rounds of phones that are all alike."""
    for index in range(PHONES.rounds):
        rng = stream(3, "advice", index)
        numbers = sorted(rng.choice(PHONES.clients, PHONES.drawn, replace=False))
        updates = tuple(
            ClientUpdate(
                f"phone-{number}",
                1 / PHONES.drawn,
                Params.of({"w": rng.normal(size=SIZE).astype(np.float32)}),
            )
            for number in numbers
        )
        ledger.append(keep(Round(index, updates)))


def measured(path: Path, option: Option, budget: int) -> tuple[float, float]:
    """Part of the clients that can be forgotten, and of the updates covered."""
    keep = Keep.parse(option.keep, seed=2)
    with DiskLedger.create(
        path,
        START,
        update_dtype=option.dtype,
        history=keep.history,
        sums_from=keep.sums_from,
        budget=budget,
    ) as ledger:
        append_phones(ledger, keep)
        own = [ledger.updates_of(name) for name in ledger.clients()]
    enough = np.mean([coverage_of(updates) >= MINIMUM_COVERAGE for updates in own])
    everything = [update for updates in own for update in updates]
    return float(enough), coverage_of(everything)


@pytest.mark.parametrize("policy", ["optimal", "sums", "sums:"])
@pytest.mark.parametrize("budget", [5_200_000, 6_000_000])
def test_about_as_many_clients_can_be_forgotten_as_was_said(
    policy: str, budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a ledger that is too large to be moved at any time.
    monkeypatch.setattr(drop, "_MOVED_AT_ANY_TIME", 0)
    monkeypatch.setattr(garbage, "SPARE_BYTES", 0)
    found = [
        option
        for option in options_within(PHONES, budget)
        if option.dtype == "int8"
        and option.keep.startswith(policy)
        and (policy != "sums" or option.keep == "sums")
    ]
    enough, covered = measured(tmp_path / "ledger", found[0], budget)
    assert 0 < found[0].forgettable < 1
    assert enough == pytest.approx(found[0].forgettable, abs=0.2)
    # Clients of more rounds contributed more, so sums cover more than their part.
    more = 0.3 if policy.startswith("sums") else 0.1
    assert found[0].coverage - 0.1 < covered < found[0].coverage + more


def test_clients_of_few_rounds_take_less_as_parts(tmp_path: Path) -> None:
    sizes = {}
    for keep in ("sums", "sums:4"):
        path = tmp_path / keep.replace(":", "-")
        policy = Keep.parse(keep)
        with DiskLedger.create(
            path,
            START,
            history="sums",
            sums_from=policy.sums_from,
            update_dtype="int8",
        ) as ledger:
            append_phones(ledger, policy)
            sizes[keep] = ledger.head.live_bytes
    federations = {
        keep: FederationSize(
            parameters=SIZE, clients=80, rounds=40, per_round=6, keep=keep
        )
        for keep in sizes
    }
    models, pairs = 2 * 4 * SIZE, 64 * SIZE
    for keep, federation in federations.items():
        expected = federation.vector_bytes("int8") + models + pairs
        assert sizes[keep] == pytest.approx(expected, rel=0.1)
    assert sizes["sums:4"] < 0.8 * sizes["sums"]


def test_the_minimum_is_the_default_of_forgetting() -> None:
    assert FastFedUL().minimum_coverage == MINIMUM_COVERAGE


def test_a_budget_for_everything_keeps_everything_in_the_widest_dtype() -> None:
    best = options_within(PHONES, 10**10)[0]
    assert (best.keep, best.dtype, best.forgettable) == ("all", "float32", 1.0)
    need = estimate(PHONES, "bfloat16").total
    best = options_within(PHONES, need)[0]
    assert (best.keep, best.dtype) == ("all", "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_no_option_takes_more_than_the_budget(dtype: StorageDtype) -> None:
    hospitals = FederationSize(parameters=10**8, clients=50, rounds=500)
    for budget in (10**9, 10**11, 5 * 10**11, 10**13):
        found = options_within(hospitals, budget)
        assert all(option.total <= budget for option in found if option.dtype == dtype)
        ranks = [round(option.forgettable, 3) for option in found]
        assert ranks == sorted(ranks, reverse=True)


def test_a_budget_below_the_models_leaves_no_option() -> None:
    assert options_within(PHONES, 10_000) == []


def test_how_often_a_client_takes_part_adds_up() -> None:
    odds = PHONES.appearances()
    assert odds.sum() == pytest.approx(1)
    mean = PHONES.rounds * PHONES.drawn / PHONES.clients
    assert odds @ np.arange(len(odds)) == pytest.approx(mean)
    whole = FederationSize(parameters=5, clients=4, rounds=3)
    assert whole.appearances().tolist() == [0, 0, 0, 1]
    many = FederationSize(parameters=5, clients=10**6, rounds=50_000, per_round=1_000)
    assert many.appearances().sum() == pytest.approx(1)
