"""A ledger of sums that gives up vectors to stay within a budget."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    FastFedUL,
    LedgerError,
    Model,
    Params,
    Round,
    UnlearnRefusedError,
    UnlearnRequest,
    forget,
    preview,
    verify,
)
from fastfedul.ledger.changes import drop, garbage
from fastfedul.ledger.changes.drop import FEWEST_PAIRS, dropped_by
from fastfedul.records import StorageDtype
from fastfedul.rng import stream
from tests.ledger.test_query_plans import scanned
from tests.support.shrinking import size_of

SIZE = 3_000
LAYOUT = Params.of({"w": np.zeros(SIZE, np.float32)}).layout
START = Model(Params.zeros(LAYOUT))
PHONES, DRAWN = 60, 6
MODELS = 2 * 4 * SIZE
INDEX = 400_000
"""More than the index of these ledgers takes."""


def round_of(index: int) -> Round:
    """Phones of a round, drawn anew; one of a high number sends longer updates."""
    rng = stream(7, "phones", index)
    numbers = sorted(rng.choice(PHONES, DRAWN, replace=False).tolist())
    updates = tuple(
        ClientUpdate(
            f"phone-{number:02d}",
            1 / DRAWN,
            Params(LAYOUT, rng.normal(0, 1 + number, SIZE).astype(np.float32)),
        )
        for number in numbers
    )
    return Round(index, updates)


def assert_consistent(ledger: DiskLedger) -> None:
    """What the rows of a client say, and what forgetting it says, agree."""
    assert verify(ledger).problems == ()
    for name, entry in ledger.clients().items():
        summed = sum(update.summed for update in ledger.updates_of(name))
        assert entry.num_summed == summed
        assert bool(ledger.own_difference(name).any()) == bool(summed)
    lost = sum(entry.num_dropped for entry in ledger.clients().values())
    assert dropped_by(ledger).updates == lost


@pytest.mark.parametrize(
    ("dtype", "sums_from"), [("float32", 1), ("float32", 3), ("int8", 3)]
)
def test_the_budget_is_kept_and_every_round_is_recorded(
    dtype: StorageDtype, sums_from: int, tmp_path: Path
) -> None:
    path, budget = tmp_path / "ledger", MODELS + INDEX + 40 * 4 * SIZE
    with DiskLedger.create(
        path,
        START,
        history="sums",
        sums_from=sums_from,
        update_dtype=dtype,
        budget=budget,
    ) as ledger:
        for index in range(60):
            ledger.append(round_of(index))
            assert size_of(path) <= budget
        assert_consistent(ledger)
        [event] = ledger.events()
        assert event.kind == "drop"
        assert event.clients == ()
        assert event.details["budget"] == budget
        entries = ledger.clients().values()
        assert any(entry.num_dropped for entry in entries)
        assert any(entry.num_summed == entry.num_updates for entry in entries)


def test_pairs_go_first_and_then_the_clients_that_contributed_least(
    tmp_path: Path,
) -> None:
    with DiskLedger.create(tmp_path / "ledger", START, history="sums") as ledger:
        for index in range(40):
            ledger.append(round_of(index))
        assert len(ledger.pairs()) == 64
        seen = set()
        for index in range(40, 70):
            # Each round has less room than the one before.
            full = ledger.num_array_bytes() + ledger.index.num_bytes()
            ledger.set_budget(full - 4 * 4 * SIZE)
            before = {name: contribution(ledger, name) for name in ledger.clients()}
            ledger.append(round_of(index))
            for update in round_of(index).updates:
                assert update.delta is not None
                length = float(np.linalg.norm(update.delta.flat))
                before[update.client] = before.get(update.client, 0) + length / DRAWN
            after = {name: contribution(ledger, name) for name in ledger.clients()}
            gone = [c for name, c in before.items() if c and not after[name]]
            left = [c for c in after.values() if c]
            if gone:
                assert len(ledger.pairs()) <= FEWEST_PAIRS
                assert max(gone) <= min(left, default=np.inf)
            seen.add((len(ledger.pairs()) < 64, bool(gone)))
        assert_consistent(ledger)
        assert {(True, False), (True, True)} <= seen


def contribution(ledger: DiskLedger, name: str) -> float:
    row = ledger.index.client(name)
    return row.contribution if row else 0.0


def test_a_client_that_was_given_up_is_refused_with_the_reason_and_comes_back(
    tmp_path: Path,
) -> None:
    budget = MODELS + INDEX + 30 * 4 * SIZE
    with DiskLedger.create(
        tmp_path / "ledger", START, history="sums", sums_from=2, budget=budget
    ) as ledger:
        for index in range(40):
            ledger.append(round_of(index))
        known = ledger.clients()
        lost = [n for n, e in known.items() if e.num_summed == 0 and e.num_dropped]
        kept = [n for n, e in known.items() if e.num_summed == e.num_updates > 2]
        model = ledger.final.params.flat.tobytes()
        with pytest.raises(
            UnlearnRefusedError, match="of its updates, for the budget"
        ) as told:
            forget(ledger, [lost[0]])
        assert "only 0%" in str(told.value)
        assert "\n" not in str(told.value)
        assert ledger.final.params.flat.tobytes() == model
        assert preview(ledger, [kept[0]]).coverage == 1
        # Its next rounds begin new parts, and what they are is known.
        ledger.set_budget(None)
        index = 40
        while ledger.clients()[lost[0]].num_summed < 3:
            ledger.append(round_of(index))
            index += 1
        entry = ledger.clients()[lost[0]]
        assert entry.num_summed + entry.num_dropped == entry.num_updates
        found = FastFedUL(minimum_coverage=0)(
            UnlearnRequest(ledger, frozenset({lost[0]}))
        )
        assert found.coverage == pytest.approx(entry.num_summed / entry.num_updates)
        expected = np.zeros(SIZE, np.float32)
        for update in ledger.updates_of(lost[0]):
            if update.summed:
                expected += part_by_hand(round_of(update.round), lost[0])
        np.testing.assert_allclose(
            ledger.own_difference(lost[0]), expected, rtol=1e-4, atol=1e-4
        )
        forget(ledger, [lost[0]], FastFedUL(minimum_coverage=0), erase=True)
        assert verify(ledger).problems == ()


def part_by_hand(
    round_: Round, name: str
) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    vectors = {u.client: u.delta.flat for u in round_.updates if u.delta is not None}
    step = np.mean(list(vectors.values()), axis=0)
    found: np.ndarray[tuple[int], np.dtype[np.float32]] = (
        (step - vectors[name]) / (DRAWN - 1)
    ).astype(np.float32)
    return found


def test_forgotten_clients_keep_their_vectors_until_they_are_erased(
    tmp_path: Path,
) -> None:
    """A later forgetting needs them."""
    with DiskLedger.create(tmp_path / "ledger", START, history="sums") as ledger:
        for index in range(20):
            ledger.append(round_of(index))
        smallest = min((contribution(ledger, name), name) for name in ledger.clients())[
            1
        ]
        forget(ledger, [smallest], erase=False)
        own = ledger.own_difference(smallest)
        ledger.set_budget(MODELS + INDEX)
        index = 20
        for number in range(20, 200):
            round_ = round_of(number)
            if smallest not in {update.client for update in round_.updates}:
                updates = round_.updates
                ledger.append(Round(index, updates))
                index += 1
        assert any(entry.num_dropped for entry in ledger.clients().values())
        assert ledger.clients()[smallest].num_dropped == 0
        np.testing.assert_array_equal(ledger.own_difference(smallest), own)


def test_only_where_the_models_do_not_fit_the_round_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with DiskLedger.create(path, START, history="sums") as ledger:
        for index in range(10):
            ledger.append(round_of(index))
        index_bytes = ledger.index.num_bytes()
        ledger.set_budget(index_bytes + 2 * (4 * SIZE + 500) + 60_000)
        ledger.append(round_of(10))
        assert not any(entry.num_summed for entry in ledger.clients().values())
        assert len(ledger.pairs()) < FEWEST_PAIRS
        ledger.set_budget(index_bytes)
        chain = ledger.chain
        with pytest.raises(LedgerError, match="no room for another round"):
            ledger.append(round_of(11))
        assert ledger.chain == chain
        assert verify(ledger).problems == ()


def test_an_append_within_a_budget_reads_no_table_and_moves_few_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drop, "_MOVED_AT_ANY_TIME", 0)
    monkeypatch.setattr(garbage, "SPARE_BYTES", 0)
    path, moved = tmp_path / "ledger", []
    with DiskLedger.create(
        path, START, history="sums", sums_from=2, update_dtype="int8"
    ) as ledger:
        for index in range(30):
            ledger.append(round_of(index))
        ledger.set_budget(ledger.num_array_bytes() // 2 + ledger.index.num_bytes())
        for index in range(30, 60):
            traced: list[str] = []
            ledger.index._connection.set_trace_callback(traced.append)
            ledger.append(round_of(index))
            ledger.index._connection.set_trace_callback(None)
            assert scanned(path, traced) <= {"pairs"}
            moved.append(sum(s.startswith("REPLACE INTO clients") for s in traced))
        assert dropped_by(ledger).clients > 0
        assert_consistent(ledger)
    # The first one makes room for the new budget. Each later one writes its own
    # participants twice, those given up, and some that shared a file.
    assert max(moved[1:]) < PHONES


def test_the_log_has_one_entry_however_many_clients_were_given_up(
    tmp_path: Path,
) -> None:
    path, budget = tmp_path / "ledger", MODELS + INDEX + 30 * 4 * SIZE
    with DiskLedger.create(path, START, history="sums", budget=budget) as ledger:
        for index in range(60):
            ledger.append(round_of(index))
        found = dropped_by(ledger)
        assert found.clients > 10
        assert found.pairs >= 64 - FEWEST_PAIRS
    rows = sqlite3.connect(path / "index.sqlite")
    [(clients, details)] = rows.execute("SELECT clients, details FROM events")
    rows.close()
    assert clients == "[]"
    assert json.loads(details)["updates"] == found.updates
    assert "phone" not in details
