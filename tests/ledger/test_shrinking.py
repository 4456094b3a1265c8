"""A ledger on disk that stays small: compacted, or within a budget."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    FastFedUL,
    InvalidInputError,
    Keep,
    LedgerError,
    LedgerReader,
    MemoryLedger,
    Model,
    NoSkew,
    Params,
    Round,
    Scalar,
    UnlearnRefusedError,
    UnlearnRequest,
    erase,
    forget,
    params_at,
    read_round,
    verify,
)
from fastfedul.ledger.keeping import POLICIES
from fastfedul.ledger.recoding import recoded
from fastfedul.ledger.store.entries import fields
from fastfedul.methods.fast_fedul.method import iterations
from fastfedul.methods.fast_fedul.tracing import leaving
from fastfedul.methods.fast_fedul.undamped import undamped
from fastfedul.params import Flat
from fastfedul.records import StorageDtype
from fastfedul.rng import stream

SIZE = 6_000
NAMES = ("anna", "bela", "carl", "dora")
LAYOUT = Params.of({"w": np.zeros(SIZE, np.float32)}).layout
START = Model(Params.zeros(LAYOUT), {"seen": np.arange(3)})


def round_of(index: int, names: Sequence[str] = NAMES, **changes: Any) -> Round:
    rng = stream(3, "shrinking", index)
    common = rng.normal(size=SIZE)
    deltas = {name: common + rng.normal(0, 1 + i, SIZE) for i, name in enumerate(NAMES)}
    updates = tuple(
        ClientUpdate(
            name, 1 / len(names), Params(LAYOUT, deltas[name].astype(np.float32))
        )
        for name in names
    )
    return replace(Round(index, updates), **changes)


def ledger_at(path: Path, num_rounds: int = 10, **options: Any) -> DiskLedger:
    ledger = DiskLedger.create(path, START, **options)
    for index in range(num_rounds):
        ledger.append(round_of(index))
    return ledger


def append_all(ledger: DiskLedger, rounds: Sequence[Round]) -> None:
    for round_ in rounds:
        ledger.append(round_)


def answer(ledger: LedgerReader, *names: str) -> Flat:
    """What forgetting takes if nobody reacted, from rounds or from sums."""
    rounds = ledger.rounds()
    removal = leaving(ledger, frozenset(names or ("bela",)), rounds)
    return undamped(ledger, removal, rounds, None).difference


def distance(found: Flat, expected: Flat) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def size_of(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


# Compacting.


def test_compacting_keeps_the_answer_and_loses_the_rounds(tmp_path: Path) -> None:
    with ledger_at(tmp_path / "ledger") as ledger:
        expected = answer(ledger)
        final, chain = ledger.final.params.flat.tobytes(), ledger.chain
        announced = ledger.compaction()
        assert ledger.chain == chain
        done = ledger.compact()
        assert (done.bytes_before, done.bytes_after) == (
            announced.bytes_before,
            announced.bytes_after,
        )
        assert done.bytes_after == ledger.num_array_bytes()
        assert distance(answer(ledger), expected) < 1e-5
        assert ledger.final.params.flat.tobytes() == final
        assert verify(ledger).problems == ()
        assert verify(ledger).num_strays == 0
    files = list((tmp_path / "ledger" / "arrays").iterdir())
    assert len(files) == len(NAMES) + 10 * 6 + 2, "sums, pairs, first and last model"
    with LedgerReader(tmp_path / "ledger") as reader:
        assert reader.settings.history == "sums"
        assert [event.kind for event in reader.events()] == ["compact"]
        assert distance(answer(reader), expected) < 1e-5


def test_once_it_has_all_its_pairs_its_size_does_not_grow_with_the_rounds(
    tmp_path: Path,
) -> None:
    with ledger_at(tmp_path / "ledger", 11, history="sums") as ledger:
        small = ledger.num_array_bytes()
        assert len(ledger.pairs()) == 64
        for index in range(11, 32):
            ledger.append(round_of(index))
        assert len(ledger.pairs()) == 64
        assert ledger.num_array_bytes() == small


def test_an_update_that_is_not_kept_is_never_written(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    keep = Keep("top", 2)
    with DiskLedger.create(path, START) as ledger:
        for index in range(3):
            round_ = keep(round_of(index))
            ledger.append(round_)
            stored = b"".join(p.read_bytes() for p in path.rglob("*.safetensors"))
            for update in round_.updates:
                assert update.delta is not None
                written = update.delta.flat.tobytes()[:64] in stored
                assert written == update.kept
        files = list((path / "arrays").iterdir())
        assert len(files) == 3 * (2 + 1) + 2, "updates, steps, first and last model"


@pytest.mark.parametrize("num_rounds", [1, 7, 8, 11])
def test_every_round_of_sums_survives_reopening(
    num_rounds: int, tmp_path: Path
) -> None:
    exact = MemoryLedger.create(START)
    DiskLedger.create(tmp_path / "ledger", START, history="sums").close()
    for index in range(num_rounds):
        with DiskLedger(tmp_path / "ledger") as ledger:
            ledger.append(round_of(index))
        exact.append(round_of(index))
    with (
        ledger_at(tmp_path / "other", num_rounds, history="sums") as uninterrupted,
        LedgerReader(tmp_path / "ledger") as reader,
    ):
        assert reader.pairs() == uninterrupted.pairs()
        assert reader.chain == uninterrupted.chain
        for name in NAMES:
            own = reader.own_difference(name)
            assert own.tobytes() == uninterrupted.own_difference(name).tobytes()
            assert distance(own, exact.own_difference(name)) < 1e-5


def test_fewer_bits_shrink_the_pairs_and_leave_the_sums_exact(tmp_path: Path) -> None:
    sizes, sums, answers = [], [], []
    dtypes: tuple[StorageDtype, ...] = ("float32", "float16", "int8")
    for dtype in dtypes:
        path = tmp_path / dtype
        with ledger_at(path, 10, history="sums", update_dtype=dtype) as ledger:
            sizes.append(ledger.num_array_bytes())
            sums.append(ledger.own_difference("bela").tobytes())
            request = UnlearnRequest(ledger, frozenset({"bela"}))
            answers.append(FastFedUL()(request).delta.flat)
    assert sizes[1] < 0.6 * sizes[0]
    assert sizes[2] < 0.4 * sizes[0]
    assert len(set(sums)) == 1
    assert 0 < distance(answers[1], answers[0]) < 2e-3
    assert 0 < distance(answers[2], answers[0]) < 2e-2


def test_rounds_in_which_a_client_was_alone_count_as_in_the_full_ledger(
    tmp_path: Path,
) -> None:
    rounds = [round_of(0), round_of(1, ("bela",)), round_of(2, ("bela", "carl"))]
    full = MemoryLedger.create(START)
    with DiskLedger.create(tmp_path / "ledger", START, history="sums") as ledger:
        for round_ in rounds:
            ledger.append(round_)
            full.append(round_)
        own = ledger.own_difference("bela")
        assert distance(own, full.own_difference("bela")) < 1e-5
        assert distance(answer(ledger, "bela"), own) < 1e-5
        with pytest.raises(UnlearnRefusedError, match="nobody but the clients"):
            answer(ledger, "bela", "carl")
        with pytest.raises(UnlearnRefusedError, match="'carl' would have been alone"):
            forget(ledger, ["bela"], erase=True)
        assert ledger.clients()["bela"].state == "active"


@pytest.mark.parametrize(
    ("dtype", "off"), [("float16", 1e-3), ("bfloat16", 5e-3), ("int8", 2e-2)]
)
def test_sums_of_what_was_stored_in_fewer_bits_are_as_exact_as_these(
    dtype: StorageDtype, off: float, tmp_path: Path
) -> None:
    exact = MemoryLedger.create(START)
    with ledger_at(tmp_path / "ledger", update_dtype=dtype) as ledger:
        for index in range(10):
            exact.append(round_of(index))
        assert any(dtype in note for note in ledger.compact().notes)
        for name in NAMES:
            expected = exact.own_difference(name)
            assert 0 < distance(ledger.own_difference(name), expected) < off
        ledger.append(round_of(10))
        assert verify(ledger).problems == ()


@pytest.mark.parametrize("policy", ["uniform", "top"])
def test_sums_of_a_sample_say_what_the_sample_said_and_are_covered_as_far(
    policy: Any, tmp_path: Path
) -> None:
    keep = Keep(policy, 2, seed=1)
    lenient = FastFedUL(minimum_coverage=0)
    with DiskLedger.create(tmp_path / "ledger", START) as ledger:
        for index in range(12):
            ledger.append(keep(round_of(index)))
        requests = [UnlearnRequest(ledger, frozenset({name})) for name in NAMES]
        before = [ledger.own_difference(name) for name in NAMES]
        coverages = [lenient(request).coverage for request in requests]
        assert min(coverages) < 1
        [note] = ledger.compact().notes
        assert "24 of 48 updates were not kept" in note
        for name, expected in zip(NAMES, before, strict=True):
            assert ledger.own_difference(name).tobytes() == expected.tobytes()
        assert [lenient(request).coverage for request in requests] == coverages
        ledger.append(round_of(12))
        assert all(
            lenient(request).coverage > covered or covered == 1
            for request, covered in zip(requests, coverages, strict=True)
        )
        assert verify(ledger).problems == ()


def test_an_update_that_the_server_never_had_is_in_no_sum_and_lowers_the_coverage(
    tmp_path: Path,
) -> None:
    first, *others = round_of(0).updates
    unseen = replace(first, delta=None, kept=False)
    step = Params(LAYOUT, np.ones(SIZE, np.float32))
    with DiskLedger.create(tmp_path / "ledger", START) as ledger:
        ledger.append(Round(0, (unseen, *others), step))
        ledger.append(round_of(1))
        before = ledger.own_difference("anna")
        [note] = ledger.compact().notes
        assert "1 of 8 updates were not kept" in note
        assert ledger.own_difference("anna").tobytes() == before.tobytes()
        request = UnlearnRequest(ledger, frozenset({"anna"}))
        assert FastFedUL()(request).coverage == pytest.approx(0.5)
        assert verify(ledger).problems == ()


def test_a_full_ledger_from_which_somebody_was_erased_can_be_compacted(
    tmp_path: Path,
) -> None:
    with ledger_at(tmp_path / "ledger") as ledger:
        forget(ledger, ["anna"], erase=True)
        expected = answer(ledger, "carl")
        ledger.compact()
        assert ledger.adjustments() == {}
        assert distance(answer(ledger, "carl"), expected) < 1e-4
        assert verify(ledger).problems == ()


def test_what_a_ledger_of_sums_cannot_do_is_refused_in_one_line(tmp_path: Path) -> None:
    with ledger_at(tmp_path / "ledger", history="sums") as ledger:
        request = UnlearnRequest(ledger, frozenset({"anna"}))
        for method in (FastFedUL(skew=Scalar(0.07)), FastFedUL(skew=NoSkew())):
            with pytest.raises(UnlearnRefusedError, match="skew kronecker"):
                method(request)
        with pytest.raises(UnlearnRefusedError, match="keeps sums"):
            iterations(request, Scalar(0.07))
        assert np.array_equal(params_at(ledger, 0).flat, START.params.flat)
        assert np.array_equal(params_at(ledger, 10).flat, ledger.final.params.flat)
        for refused in (
            lambda: params_at(ledger, 4),
            lambda: read_round(ledger, 4),
            ledger.compaction,
            ledger.compact,
        ):
            with pytest.raises(LedgerError, match="sums") as caught:
                refused()
            assert "\n" not in str(caught.value)
        missing = replace(round_of(10).updates[0], delta=None, kept=False)
        for wrong in (
            round_of(10, use="aggregate"),
            round_of(10, updates=(missing, *round_of(10).updates[1:])),
        ):
            with pytest.raises(InvalidInputError, match="history of sums"):
                ledger.append(wrong)
        assert ledger.num_rounds == 10
        ledger.append(round_of(10))


def test_ledgers_that_sums_cannot_stand_for_are_not_compacted(tmp_path: Path) -> None:
    median = DiskLedger.create(tmp_path / "median", START, aggregation="median")
    sample = DiskLedger.create(tmp_path / "sample", START)
    sample.append(Keep("top", 2, use="aggregate")(round_of(0)))
    for ledger, reason in (
        (median, "replayed"),
        (sample, "only the updates that were kept count"),
    ):
        before = ledger.chain
        with ledger, pytest.raises(LedgerError, match=reason) as caught:
            ledger.compact()
        assert "\n" not in str(caught.value)
        with LedgerReader(ledger.path) as reader:
            assert reader.chain == before
            assert reader.settings.history == "rounds"
    wrong: tuple[dict[str, Any], ...] = (
        {"history": "sums", "aggregation": "median"},
        {"history": "sums", "update_dtype": "int4"},
        {"history": "all"},
        {"budget": 0},
        {"budget": 10**6, "aggregation": "trimmed-mean:0.2"},
    )
    for options in wrong:
        with pytest.raises(InvalidInputError):
            DiskLedger.create(tmp_path / "wrong", START, **options)
        assert not (tmp_path / "wrong").exists()


def test_a_reader_that_was_open_before_sees_the_sums(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with ledger_at(path) as ledger, LedgerReader(path) as reader:
        before = answer(reader)
        ledger.compact()
        assert reader.settings.history == "sums"
        assert distance(answer(reader), before) < 1e-5


def test_an_erased_client_is_gone_from_a_ledger_of_sums(tmp_path: Path) -> None:
    with ledger_at(tmp_path / "ledger", 11, history="sums") as ledger:
        forget(ledger, ["bela"], erase=False)
        own = ledger.own_difference("bela")
        assert ledger.adjustments() == {}
        erase(ledger, ["bela"])
        assert verify(ledger).problems == ()
        assert verify(ledger).num_strays == 0
        assert not ledger.own_difference("bela").any()
        assert all("bela" not in (pair.client, pair.other) for pair in ledger.pairs())
        with pytest.raises(InvalidInputError, match="was forgotten"):
            ledger.append(round_of(11))
        ledger.append(round_of(11, ("anna", "carl", "dora")))
        assert answer(ledger, "carl").any()
    stored = b"".join(
        p.read_bytes() for p in (tmp_path / "ledger").rglob("*") if p.is_file()
    )
    assert own.tobytes()[:64] not in stored
    for index in range(11):
        deltas = [u.delta.flat for u in round_of(index).updates if u.delta is not None]
        assert deltas[1].tobytes()[:64] not in stored
        for other in (0, 2, 3):
            for difference in (deltas[1] - deltas[other], deltas[other] - deltas[1]):
                assert difference.tobytes()[:64] not in stored


def test_an_erased_client_gets_no_sums_again_by_the_next_erasure(
    tmp_path: Path,
) -> None:
    with ledger_at(tmp_path / "ledger", 8, history="sums") as ledger:
        for name in ("bela", "carl"):
            forget(ledger, [name], erase=True)
        rows = [fields("clients", row) for row in ledger.index.rows("clients")]
        erased = [row for row in rows if row["state"] == "erased"]
        assert len(erased) == 2
        assert all(row["difference"] is None for row in erased)
        assert all({p.client, p.other} == {"anna", "dora"} for p in ledger.pairs())
        assert verify(ledger).problems == ()


def test_sums_do_not_tell_how_the_steps_changed_so_there_is_no_bound(
    tmp_path: Path,
) -> None:
    request = frozenset({"anna"})
    with ledger_at(tmp_path / "ledger") as ledger:
        assert FastFedUL()(UnlearnRequest(ledger, request)).bound.value is not None
        ledger.compact()
        bound = FastFedUL()(UnlearnRequest(ledger, request)).bound
    assert bound.value is None
    assert bound.lipschitz is None
    assert "no Lipschitz constant" in bound.source


def test_damage_to_sums_and_to_the_row_about_them_is_found(tmp_path: Path) -> None:
    with ledger_at(tmp_path / "ledger", 8, history="sums"):
        pass
    shutil.copytree(tmp_path / "ledger", tmp_path / "other")
    index = sqlite3.connect(tmp_path / "ledger" / "index.sqlite")
    index.execute("UPDATE policy SET history = 'rounds'")
    index.commit()
    index.close()
    with pytest.raises(LedgerError, match="policy in the index was changed"):
        LedgerReader(tmp_path / "ledger")
    with LedgerReader(tmp_path / "other") as reader:
        digest = reader._known("bela")["difference"]
        file = tmp_path / "other" / "arrays" / f"{digest.hex()}.safetensors"
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
        assert len(verify(reader).problems) == 1
        with pytest.raises(LedgerError, match="client 'bela', sum"):
            answer(reader)
        assert answer(reader, "anna").any()


# Killed while compacting.


COMPACT_AND_DIE = """
import os, signal, sys
from fastfedul import DiskLedger

path, event, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
ledger = DiskLedger(path)
count = 0

def watch(name, arguments):
    global count
    if name == event:
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(watch)
ledger.compact()
print("done", flush=True)
"""


@pytest.mark.parametrize(
    ("event", "number", "compacted"),
    [
        ("os.rename", 1, False),
        ("os.rename", 9, False),
        ("os.remove", 1, True),
        ("os.remove", 30, True),
    ],
)
def test_killed_while_compacting_the_ledger_is_the_old_or_the_new_one(
    event: str, number: int, compacted: bool, tmp_path: Path
) -> None:
    """Files are renamed before the commit, and removed after it."""
    path = tmp_path / "ledger"
    with ledger_at(path) as ledger:
        expected = answer(ledger)
        chain = ledger.chain
    killed = subprocess.run(
        [sys.executable, "-c", COMPACT_AND_DIE, path, event, str(number)],
        capture_output=True,
        timeout=120,
    )
    assert killed.returncode == -9, killed.stderr.decode()
    with LedgerReader(path) as reader:
        assert verify(reader).problems == ()
        assert verify(reader).num_strays > 0 or (event, number) == ("os.rename", 1)
        assert (reader.settings.history == "sums") == compacted
        assert (reader.chain == chain) != compacted
        assert distance(answer(reader), expected) < 1e-5
    with DiskLedger(path) as reopened:
        assert verify(reopened).num_strays == 0
        if not compacted:
            reopened.compact()
        reopened.append(round_of(10))
        assert verify(reopened).problems == ()


# A budget.


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
        assert set(event.clients) <= set(NAMES)
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
        with pytest.raises(UnlearnRefusedError, match="was kept"):
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


# The same training stored in another way.


@pytest.mark.parametrize("policy", POLICIES)
def test_a_recoded_ledger_is_what_training_into_it_would_have_given(
    policy: str, tmp_path: Path
) -> None:
    keep = Keep.parse(policy if policy in ("all", "sums") else f"{policy}:2")
    with ledger_at(tmp_path / "full") as full:
        done: list[tuple[int, int]] = []
        with recoded(
            full,
            tmp_path / "new",
            "float16",
            "int8",
            keep,
            progress=lambda i, n: done.append((i, n)),
        ) as new:
            chain, final = new.chain, new.final
        assert done[-1] == (10, 10)
    with DiskLedger.create(
        tmp_path / "direct",
        START,
        update_dtype="float16",
        step_dtype="int8",
        history="sums" if policy == "sums" else "rounds",
    ) as direct:
        for index in range(10):
            direct.append(keep(round_of(index)))
        assert direct.chain == chain
        assert direct.final.params.flat.tobytes() == final.params.flat.tobytes()
        assert np.array_equal(final.buffers["seen"], np.arange(3))


def test_only_a_whole_training_can_be_recoded(tmp_path: Path) -> None:
    with ledger_at(tmp_path / "full") as full:
        with pytest.raises(InvalidInputError, match="cannot aggregate less"):
            recoded(full, tmp_path / "new", keep=Keep("top", 2, use="aggregate"))
        forget(full, ["anna"], erase=False)
        with pytest.raises(InvalidInputError, match="not whole"):
            recoded(full, tmp_path / "new")
    with DiskLedger.create(tmp_path / "part", START) as part:
        part.append(Keep("top", 2)(round_of(0)))
        with pytest.raises(InvalidInputError, match="was not kept"):
            recoded(part, tmp_path / "new")
    sums = ledger_at(tmp_path / "sums", history="sums")
    with sums, pytest.raises(LedgerError, match="sums"):
        recoded(sums, tmp_path / "other")


@pytest.mark.parametrize("options", [{"budget": 10**8}, {"history": "sums"}])
def test_the_catalogue_cannot_lose_what_is_kept_silently(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Flips around the entry of SQLite that says there is a table `policy`."""
    path = tmp_path / "ledger"
    with ledger_at(path, 2, **options) as ledger:
        settings = ledger.settings
    whole = (path / "index.sqlite").read_bytes()
    entry = whole.index(b"tablepolicypolicy")
    for place in range(entry - 8, entry + 25):
        changed = bytearray(whole)
        changed[place] ^= 0x20
        (path / "index.sqlite").write_bytes(changed)
        try:
            with LedgerReader(path) as reader:
                problems = verify(reader).problems
                assert problems or reader.settings == settings, place
        except LedgerError:
            continue
