"""A ledger that stays within a budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastfedul import (
    DiskLedger,
    FastFedUL,
    Keep,
    LedgerError,
    LedgerReader,
    MemoryLedger,
    UnlearnRefusedError,
    UnlearnRequest,
    verify,
)
from fastfedul.records import StorageDtype
from tests.support.shrinking import NAMES, START, append_all, round_of, size_of


def test_a_budget_is_kept_after_every_round(tmp_path: Path) -> None:
    path, budget = tmp_path / "ledger", 1_300_000
    with DiskLedger.create(path, START, budget=budget) as ledger:
        for index in range(30):
            ledger.append(round_of(index))
            assert size_of(path) <= budget
            assert verify(ledger).problems == ()
        kept = [len([u for u in ledger.updates_in(i) if u.kept]) for i in range(30)]
        assert kept[0] == 0
        assert kept[-1] == len(NAMES)
        assert kept == sorted(kept), "the oldest go first"
        [event] = ledger.events()
        assert event.kind == "drop"
        assert event.details["updates"] == 30 * len(NAMES) - sum(kept)
        assert event.details["first_round"] == 0
        assert event.clients == ()
        for name, entry in ledger.clients().items():
            assert entry.num_dropped == 30 - entry.num_kept, name
    with LedgerReader(path) as reader:
        assert reader.settings.budget == budget
        exact = MemoryLedger.create(START)
        for index in range(30):
            exact.append(round_of(index))
        assert reader.final.params.flat.tobytes() == exact.final.params.flat.tobytes()


def test_what_the_budget_dropped_is_absent_and_not_at_random(tmp_path: Path) -> None:
    with DiskLedger.create(tmp_path / "ledger", START, budget=1_300_000) as ledger:
        for index in range(24):
            ledger.append(round_of(index))
        found = FastFedUL(minimum_coverage=0)(
            UnlearnRequest(ledger, frozenset({"anna"}))
        )
        assert 0 < found.coverage < 1
        assert found.standard_error is None
        assert found.bound.value is None
        dropped = [u for u in ledger.updates_of("anna") if not u.kept]
        assert all(u.keep_probability == 0 and u.entered for u in dropped)
        [warning] = [text for text in found.warnings if "was kept" in text]
        assert f"gave up {len(dropped)} of its updates, for the budget" in warning
        with pytest.raises(UnlearnRefusedError, match="of its updates, for the budget"):
            FastFedUL(minimum_coverage=0.9)(UnlearnRequest(ledger, frozenset({"anna"})))


def test_in_a_round_the_smallest_contributions_go_first(tmp_path: Path) -> None:
    with DiskLedger.create(tmp_path / "ledger", START, budget=1_300_000) as ledger:
        partly = 0
        for index in range(30):
            ledger.append(round_of(index))
            for earlier in range(index):
                entries = ledger.updates_in(earlier)
                kept = [u.share * u.norm for u in entries if u.kept]
                gone = [u.share * u.norm for u in entries if not u.kept]
                if kept and gone:
                    partly += 1
                    assert max(gone) <= min(kept)
        assert partly


def test_when_nothing_more_can_be_dropped_the_round_is_refused_and_nothing_changes(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger"
    with DiskLedger.create(path, START, budget=520_000) as ledger:
        with pytest.raises(LedgerError, match="no room for another round") as caught:
            append_all(ledger, [round_of(index) for index in range(40)])
        recorded = ledger.num_rounds
        assert "\n" not in str(caught.value)
        assert "ledger compact" in str(caught.value)
        assert 0 < recorded < 40
        assert verify(ledger).problems == ()
        assert verify(ledger).num_strays == 0
        assert size_of(path) <= 520_000
        ledger.set_budget(10**7)
        ledger.append(round_of(recorded))
        ledger.set_budget(None)
        ledger.append(round_of(recorded + 1))


@pytest.mark.parametrize(("budget", "num_pairs"), [(2_000_000, 64), (520_000, None)])
def test_compacting_makes_room(
    budget: int, num_pairs: int | None, tmp_path: Path
) -> None:
    """Whether or not there is room for all the pairs that a ledger of sums may keep."""
    path = tmp_path / "ledger"
    with DiskLedger.create(path, START, budget=budget) as ledger:
        for index in range(90):
            try:
                ledger.append(round_of(index))
            except LedgerError:
                ledger.compact()
                ledger.append(round_of(index))
            assert size_of(path) <= budget
        assert ledger.settings.history == "sums"
        assert ledger.settings.budget == budget
        assert num_pairs in (None, len(ledger.pairs()))


def test_updates_dropped_for_a_budget_stay_uncovered_when_compacted(
    tmp_path: Path,
) -> None:
    lenient = FastFedUL(minimum_coverage=0)
    with DiskLedger.create(tmp_path / "ledger", START, budget=1_300_000) as ledger:
        for index in range(24):
            ledger.append(round_of(index))
        request = UnlearnRequest(ledger, frozenset({"anna"}))
        covered, own = lenient(request).coverage, ledger.own_difference("anna")
        assert 0 < covered < 1
        ledger.set_budget(None)
        [note] = ledger.compact().notes
        assert "were not kept" in note
        assert ledger.own_difference("anna").tobytes() == own.tobytes()
        found = lenient(request)
        assert found.coverage == pytest.approx(covered)
        assert found.standard_error is None
        with pytest.raises(UnlearnRefusedError, match="was kept"):
            FastFedUL(minimum_coverage=0.9)(request)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_a_budget_works_with_every_dtype(dtype: StorageDtype, tmp_path: Path) -> None:
    path, budget = tmp_path / "ledger", 1_200_000
    with DiskLedger.create(path, START, budget=budget, update_dtype=dtype) as ledger:
        for index in range(30):
            ledger.append(round_of(index))
            assert size_of(path) <= budget
        assert verify(ledger).problems == ()


def test_rounds_that_aggregated_a_sample_are_never_dropped(tmp_path: Path) -> None:
    keep = Keep("top", 2, use="aggregate")
    with DiskLedger.create(tmp_path / "ledger", START, budget=1_300_000) as ledger:
        with pytest.raises(LedgerError, match="no room"):
            append_all(ledger, [keep(round_of(index)) for index in range(60)])
        for index in range(ledger.num_rounds):
            assert sum(update.kept for update in ledger.updates_in(index)) == 2
        assert ledger.events() == ()
