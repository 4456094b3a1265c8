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
    Params,
    Round,
    UnlearnRefusedError,
    UnlearnRequest,
    erase,
    forget,
    params_at,
    read_round,
    verify,
)
from fastfedul.history.entries import fields
from fastfedul.history.recoding import recoded
from fastfedul.history.sampling import POLICIES
from fastfedul.params import Flat
from fastfedul.records import StorageDtype
from fastfedul.rng import stream

SIZE = 6_000
NAMES = ("anna", "bela", "carl", "dora")
LAYOUT = Params.of({"w": np.zeros(SIZE, np.float32)}).layout
START = Model(Params.zeros(LAYOUT), {"seen": np.arange(3)})
COORDINATE = FastFedUL(skew="coordinate")


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
    request = UnlearnRequest(ledger, frozenset(names or ("bela",)))
    return COORDINATE(request).delta.flat


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
    assert len(files) == 2 * len(NAMES) + 1 + 2, "sums, scatter, first and last model"
    with LedgerReader(tmp_path / "ledger") as reader:
        assert reader.settings.history == "sums"
        assert [event.kind for event in reader.events()] == ["compact"]
        assert distance(answer(reader), expected) < 1e-5


def test_its_size_does_not_grow_with_the_rounds(tmp_path: Path) -> None:
    with ledger_at(tmp_path / "ledger", 8, history="sums") as ledger:
        small = ledger.num_array_bytes()
        for index in range(8, 32):
            ledger.append(round_of(index))
        assert ledger.num_array_bytes() == small


@pytest.mark.parametrize("num_rounds", [1, 7, 8, 11])
def test_every_round_of_sums_survives_reopening(
    num_rounds: int, tmp_path: Path
) -> None:
    expected = MemoryLedger.create(START)
    DiskLedger.create(tmp_path / "ledger", START, history="sums").close()
    for index in range(num_rounds):
        with DiskLedger(tmp_path / "ledger") as ledger:
            ledger.append(round_of(index))
        expected.append(round_of(index))
    with LedgerReader(tmp_path / "ledger") as reader:
        for name in NAMES:
            found, sums = reader.own_sums(name), expected.own_sums(name)
            assert found.difference.tobytes() == sums.difference.tobytes()
            assert found.scatter.tobytes() == sums.scatter.tobytes()
        assert reader.scatter().tobytes() == expected.scatter().tobytes()


def test_half_precision_halves_the_sums_and_hardly_changes_the_answer(
    tmp_path: Path,
) -> None:
    sizes, answers = [], []
    dtypes: tuple[StorageDtype, ...] = ("float32", "float16")
    for dtype in dtypes:
        path = tmp_path / dtype
        with ledger_at(path, 16, history="sums", update_dtype=dtype) as ledger:
            model = ledger.model_path.stat().st_size
            sizes.append(ledger.num_array_bytes() - 2 * model)
            answers.append(answer(ledger))
    assert sizes[1] < 0.6 * sizes[0]
    assert 0 < distance(answers[1], answers[0]) < 2e-3


def test_rounds_in_which_a_client_was_alone_count_as_in_the_full_ledger(
    tmp_path: Path,
) -> None:
    rounds = [round_of(0), round_of(1, ("bela",)), round_of(2, ("bela", "carl"))]
    full = MemoryLedger.create(START)
    with DiskLedger.create(tmp_path / "ledger", START, history="sums") as ledger:
        for round_ in rounds:
            ledger.append(round_)
            full.append(round_)
        plain = FastFedUL(skew="coordinate", persistence=0)
        request = frozenset({"bela"})
        found = plain(UnlearnRequest(ledger, request)).delta.flat
        expected = plain(UnlearnRequest(full, request)).delta.flat
        assert distance(found, expected) < 1e-5
        with pytest.raises(UnlearnRefusedError, match="nobody but the clients"):
            answer(ledger, "bela", "carl")
        with pytest.raises(UnlearnRefusedError, match="'carl' would have been alone"):
            forget(ledger, ["bela"], COORDINATE, erase=True)
        assert ledger.clients()["bela"].state == "active"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_what_was_stored_in_fewer_bits_is_corrected_by_the_running_sums(
    dtype: StorageDtype, tmp_path: Path
) -> None:
    exact = MemoryLedger.create(START)
    with ledger_at(tmp_path / "ledger", update_dtype=dtype) as ledger:
        for index in range(10):
            exact.append(round_of(index))
        assert any(dtype in note for note in ledger.compact().notes)
        for name in NAMES:
            found, expected = ledger.own_sums(name), exact.own_sums(name)
            assert distance(found.difference, expected.difference) < 2e-3
            assert distance(found.scatter, expected.scatter) < 0.02
        assert distance(ledger.scatter(), exact.scatter()) < 1e-3
        ledger.append(round_of(10))
        assert verify(ledger).problems == ()


def test_updates_that_were_dropped_come_from_the_running_sums(tmp_path: Path) -> None:
    keep = Keep("uniform", 2, seed=1)
    exact = MemoryLedger.create(START)
    with DiskLedger.create(tmp_path / "ledger", START) as ledger:
        for index in range(12):
            ledger.append(keep(round_of(index)))
            exact.append(round_of(index))
        [note] = ledger.compact().notes
        assert "24 of 48 updates were not kept" in note
        for name in NAMES:
            found, expected = ledger.own_sums(name), exact.own_sums(name)
            assert distance(found.difference, expected.difference) < 1e-4
            assert distance(found.scatter, expected.scatter) < 0.5
        assert distance(ledger.scatter(), exact.scatter()) < 1e-4


def test_a_full_ledger_from_which_somebody_was_erased_can_be_compacted(
    tmp_path: Path,
) -> None:
    with ledger_at(tmp_path / "ledger") as ledger:
        forget(ledger, ["anna"], FastFedUL(), erase=True)
        expected = answer(ledger, "carl")
        ledger.compact()
        assert ledger.adjustments() == {}
        assert distance(answer(ledger, "carl"), expected) < 1e-4
        assert verify(ledger).problems == ()


def test_what_a_ledger_of_sums_cannot_do_is_refused_in_one_line(tmp_path: Path) -> None:
    with ledger_at(tmp_path / "ledger", history="sums") as ledger:
        request = UnlearnRequest(ledger, frozenset({"anna"}))
        for method in (FastFedUL(damping=0.07), FastFedUL(skew="none")):
            with pytest.raises(UnlearnRefusedError, match="skew coordinate"):
                method(request)
        with pytest.raises(UnlearnRefusedError, match="keeps sums"):
            FastFedUL(damping=0.07).iterations(request)
        assert np.array_equal(params_at(ledger, 0).flat, START.params.flat)
        assert np.array_equal(params_at(ledger, 10).flat, ledger.final.params.flat)
        for refused in (
            lambda: params_at(ledger, 4),
            lambda: read_round(ledger, 4),
            lambda: ledger.running_sums("anna"),
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
    unseen = DiskLedger.create(tmp_path / "unseen", START)
    first, *others = round_of(0).updates
    unseen.append(
        Round(
            0,
            (replace(first, delta=None, kept=False), *others),
            Params(LAYOUT, np.ones(SIZE, np.float32)),
        )
    )
    for ledger, reason in (
        (median, "replayed"),
        (sample, "only the updates that were kept count"),
        (unseen, "never had 1"),
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
        {"history": "sums", "update_dtype": "int8"},
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
        forget(ledger, ["bela"], COORDINATE)
        sums = ledger.own_sums("bela")
        assert ledger.adjustments() == {}
        erase(ledger, ["bela"])
        assert verify(ledger).problems == ()
        assert verify(ledger).num_strays == 0
        assert not ledger.own_sums("bela").difference.any()
        with pytest.raises(InvalidInputError, match="was forgotten"):
            ledger.append(round_of(11))
        ledger.append(round_of(11, ("anna", "carl", "dora")))
        assert answer(ledger, "carl").any()
    stored = b"".join(
        p.read_bytes() for p in (tmp_path / "ledger").rglob("*") if p.is_file()
    )
    for vector in (sums.difference, sums.scatter, round_of(3).updates[1].delta):
        flat = vector if isinstance(vector, np.ndarray) else vector.flat  # type: ignore[union-attr]
        assert flat.tobytes()[:64] not in stored


def test_an_erased_client_gets_no_sums_again_by_the_next_erasure(
    tmp_path: Path,
) -> None:
    with ledger_at(tmp_path / "ledger", 8, history="sums") as ledger:
        for name in ("bela", "carl"):
            forget(ledger, [name], COORDINATE, erase=True)
        rows = [fields("clients", row) for row in ledger.index.rows("clients")]
        erased = [row for row in rows if row["state"] == "erased"]
        assert len(erased) == 2
        assert all(row["weighted"] is row["squared"] is None for row in erased)
        assert verify(ledger).problems == ()


def test_sums_do_not_tell_how_the_steps_changed_so_there_is_no_bound(
    tmp_path: Path,
) -> None:
    request = frozenset({"anna"})
    with ledger_at(tmp_path / "ledger") as ledger:
        assert COORDINATE(UnlearnRequest(ledger, request)).bound.value is not None
        ledger.compact()
        bound = COORDINATE(UnlearnRequest(ledger, request)).bound
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
        digest = reader._policy()["scatter"]
        file = tmp_path / "other" / "arrays" / f"{digest.hex()}.safetensors"
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
        assert len(verify(reader).problems) == 1
        with pytest.raises(LedgerError, match="damaged"):
            answer(reader)


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
        for name in NAMES:
            found, expected = reader.running_sums(name), exact.running_sums(name)
            np.testing.assert_allclose(
                found.weighted, expected.weighted, rtol=1e-4, atol=1e-4
            )
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


def test_compacting_makes_room(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with DiskLedger.create(path, START, budget=520_000) as ledger:
        for index in range(40):
            try:
                ledger.append(round_of(index))
            except LedgerError:
                ledger.compact()
                ledger.append(round_of(index))
            assert size_of(path) <= 520_000
        assert ledger.settings.history == "sums"
        assert ledger.settings.budget == 520_000


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
        forget(full, ["anna"])
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
