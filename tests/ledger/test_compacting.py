"""A ledger that was compacted to sums, and one killed on the way."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfedul import (
    DiskLedger,
    FastFedUL,
    InvalidInputError,
    Keep,
    LedgerError,
    LedgerReader,
    MemoryLedger,
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
from fastfedul.ledger.changes import garbage
from fastfedul.ledger.store.schema import ClientRow
from fastfedul.records import StorageDtype
from paper.iterations import iterations
from tests.support.damage import place_of
from tests.support.shrinking import (
    LAYOUT,
    NAMES,
    SIZE,
    START,
    answer,
    distance,
    ledger_at,
    round_of,
)


def test_compacting_keeps_the_answer_and_loses_the_rounds(tmp_path: Path) -> None:
    with ledger_at(tmp_path / "ledger") as ledger:
        expected = answer(ledger)
        final, chain = ledger.final.params.flat.tobytes(), ledger.chain
        announced = ledger.compaction()
        assert ledger.chain == chain
        done = ledger.compact()
        assert done.bytes_before == announced.bytes_before
        # Only the headers of the two new files are not announced.
        headers = done.bytes_after - announced.bytes_after
        assert 0 < headers < 100 * (len(NAMES) + 10 * 6)
        assert done.bytes_after == ledger.num_array_bytes()
        assert distance(answer(ledger), expected) < 1e-5
        assert ledger.final.params.flat.tobytes() == final
        assert verify(ledger).problems == ()
        assert verify(ledger).num_strays == 0
    files = list((tmp_path / "ledger" / "arrays").iterdir())
    assert len(files) == 4, "sums, pairs, first and last model"
    with LedgerReader(tmp_path / "ledger") as reader:
        assert reader.settings.history == "sums"
        assert [event.kind for event in reader.events()] == ["compact"]
        assert distance(answer(reader), expected) < 1e-5


def test_once_it_has_all_its_pairs_its_size_does_not_grow_with_the_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that do not count any more are never most of them, but for some spare."""
    monkeypatch.setattr(garbage, "SPARE_BYTES", 0)
    with ledger_at(tmp_path / "ledger", 11, history="sums") as ledger:
        small = ledger.head.live_bytes
        assert len(ledger.pairs()) == 64
        for index in range(11, 32):
            ledger.append(round_of(index))
            assert ledger.head.live_bytes == small
            assert small < ledger.num_array_bytes() <= 2 * small
            on_disk = sum(p.stat().st_size for p in (ledger.path / "arrays").iterdir())
            assert on_disk == ledger.num_array_bytes()
        assert len(ledger.pairs()) == 64
        assert verify(ledger).problems == ()


def test_few_bytes_that_do_not_count_are_not_worth_moving_the_others(
    tmp_path: Path,
) -> None:
    with ledger_at(tmp_path / "ledger", 11, history="sums") as ledger:
        live = ledger.head.live_bytes
        for index in range(11, 32):
            ledger.append(round_of(index))
        assert ledger.num_array_bytes() < 2 * live + garbage.SPARE_BYTES
        forget(ledger, ["bela"], erase=True)
        head = ledger.head
        # Headers are all there is between vectors.
        assert head.array_bytes - head.live_bytes < 100 * 64


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
        assert len(files) == 3, "the rounds together, first and last model"


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
        # Without bela, carl is alone in the last round, and nobody knows its step.
        done = forget(ledger, ["bela"], erase=True)
        assert any("gives up the sum" in text for text in done.warnings)
        assert "carl" in done.given_up
        assert ledger.clients()["carl"].num_summed == 0
        assert verify(ledger).problems == ()


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
        for name, expected, covered in zip(NAMES, before, coverages, strict=True):
            # Of a client none of whose updates was kept there is no vector.
            kept = expected if covered else np.zeros_like(expected)
            assert ledger.own_difference(name).tobytes() == kept.tobytes()
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
            with pytest.raises(UnlearnRefusedError, match="use the default method"):
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
        rows = ledger.index.rows(ClientRow)
        erased = [row for row in rows if row.state == "erased"]
        assert len(erased) == 2
        assert all(row.file is None and row.difference is None for row in erased)
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
        place_of(
            tmp_path / "other",
            "SELECT file, difference FROM clients WHERE name = ?",
            "bela",
        ).flip(-5)
        assert len(verify(reader).problems) == 1
        with pytest.raises(LedgerError, match="client 'bela', sum"):
            answer(reader)
        assert answer(reader, "anna").any()


COMPACT_AND_DIE = """
import os, signal, sys
from fastfedul import DiskLedger

path, event, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
ledger = DiskLedger(path)
count = 0

def kind_of(name, arguments):
    path = str(arguments[0]) if arguments else ""
    if name == "open" and path.endswith(".safetensors"):
        return "create" if arguments[2] & os.O_CREAT else "read"
    if name == "open" and path.endswith("/arrays"):
        return "sync"
    return "remove" if name == "os.remove" else name

def watch(name, arguments):
    global count
    if kind_of(name, arguments) == event:
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(watch)
ledger.compact()
print("done", flush=True)
"""


@pytest.mark.parametrize(
    ("event", "number", "compacted", "num_strays"),
    [
        ("create", 1, False, 0),
        ("create", 2, False, 1),
        ("sync", 1, False, 2),
        ("remove", 1, True, 1),
        ("sync", 2, True, 0),
    ],
)
def test_killed_while_compacting_the_ledger_is_the_old_or_the_new_one(
    event: str, number: int, compacted: bool, num_strays: int, tmp_path: Path
) -> None:
    """Files are written and synced before the commit, and removed after it."""
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
        assert verify(reader).num_strays == num_strays
        assert (reader.settings.history == "sums") == compacted
        assert (reader.chain == chain) != compacted
        assert distance(answer(reader), expected) < 1e-5
    with DiskLedger(path) as reopened:
        assert verify(reopened).num_strays == 0
        if not compacted:
            reopened.compact()
        reopened.append(round_of(10))
        assert verify(reopened).problems == ()
