"""Rounds of small models share files; what was not committed never counts."""

from __future__ import annotations

import shutil
import signal
import subprocess
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from fastfedul import DiskLedger, LedgerReader, verify
from fastfedul.ledger.store import transaction
from fastfedul.ledger.store.array_files import ArrayFiles
from fastfedul.ledger.store.arrays import PAGE, Source, new_part, write_image
from fastfedul.ledger.store.schema import FileRow
from fastfedul.ledger.store.streaming import read_vector
from fastfedul.records import History
from tests.support.damage import NOT_OF_SUMS, READINGS, images_of, live_vectors
from tests.support.disk_ledgers import initial_model, record, round_of, snapshot_of
from tests.support.ledger_programs import ROOT, command


def answers(path: Path) -> dict[str, object]:
    """Everything that can be read from a ledger."""
    with LedgerReader(path) as reader:
        of_sums = reader.settings.history == "sums"
        return {
            name: read(reader)
            for name, read in READINGS.items()
            if not (of_sums and name in NOT_OF_SUMS)
        }


def files_of(path: Path) -> list[Path]:
    return sorted((path / "arrays").iterdir())


def test_300_rounds_of_a_tiny_model_are_three_files(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with DiskLedger.create(path, initial_model()) as ledger:
        for index in range(300):
            ledger.append(round_of(index))
        assert verify(ledger).problems == ()
    assert len(files_of(path)) == 3, "the rounds, the first and the last model"
    [shared] = live_vectors(path)
    images = list(images_of(shared.read_bytes()))
    assert [image.start for image in images] == [PAGE * index for index in range(300)]


def test_rounds_share_a_file_until_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "SHARED_BYTES", 16 * PAGE)
    path = tmp_path / "ledger"
    with DiskLedger.create(path, initial_model()) as ledger:
        for index in range(50):
            ledger.append(round_of(index))
        assert verify(ledger).problems == ()
    files = live_vectors(path)
    images = [len(list(images_of(file.read_bytes()))) for file in files]
    assert images == [16, 16, 16, 2]
    assert all(file.stat().st_size <= 16 * PAGE for file in files)
    assert len(files_of(path)) == len(files) + 2


def test_a_ledger_that_is_opened_for_every_round_shares_its_files_too(
    tmp_path: Path,
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    with DiskLedger.create(one, initial_model()) as ledger:
        for index in range(5):
            ledger.append(round_of(index))
    DiskLedger.create(other, initial_model()).close()
    for index in range(5):
        with DiskLedger(other) as ledger:
            ledger.append(round_of(index))
    arrays = [snapshot_of(path / "arrays") for path in (one, other)]
    assert arrays[0] == arrays[1]
    assert answers(one) == answers(other)


TAILS = {
    "zeros": bytes(5000),
    "garbage": bytes(range(256)) * 40,
    "one byte": b"\x5a",
    "a header that lies": (2**40).to_bytes(8, "little") + b"{" * 100,
}


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
def test_what_lies_behind_the_end_of_a_file_is_never_seen_and_swept(
    tail: bytes, path: Path
) -> None:
    [shared] = live_vectors(path)
    sound, right = shared.read_bytes(), answers(path)
    with shared.open("ab") as file:
        file.write(tail)
    assert answers(path) == right
    with LedgerReader(path) as reader:
        assert verify(reader).problems == ()
    assert shared.read_bytes() == sound + tail, "a reader removes nothing"
    with DiskLedger(path) as ledger:
        assert shared.read_bytes() == sound
        ledger.append(round_of(3))
        assert verify(ledger).problems == ()
    images = list(images_of(shared.read_bytes()))
    assert len(images) == 4
    assert all(not any(gap) for gap in gaps_of(shared.read_bytes()))


def gaps_of(content: bytes) -> list[bytes]:
    """The bytes between the images of a file."""
    return [content[a.stop : b.start] for a, b in pairwise(images_of(content))]


def test_an_uncommitted_round_that_was_cut_anywhere_is_swept(
    path: Path, tmp_path: Path
) -> None:
    """A writer that lost its power may have written any part of an image."""
    shutil.copytree(path, tmp_path / "next")
    with DiskLedger(tmp_path / "next") as ledger:
        ledger.append(round_of(3))
    [shared] = live_vectors(path)
    [longer] = live_vectors(tmp_path / "next")
    sound, whole = shared.read_bytes(), longer.read_bytes()
    assert whole.startswith(sound)
    [*_, last] = images_of(whole)
    right, before = answers(path), snapshot_of(path)
    cuts = [len(sound) + 1, last.start, last.start + 1, last.start + 8]
    cuts += [(last.start + last.data) // 2, last.data, last.data + 3, len(whole) - 1]
    for cut in [*cuts, len(whole)]:
        shared.write_bytes(whole[:cut])
        assert answers(path) == right, cut
        with LedgerReader(path) as reader:
            assert verify(reader).problems == ()
        DiskLedger(path).close()
        assert snapshot_of(path) == before, cut
    # Appended again, the round is the same to the byte.
    with DiskLedger(path) as ledger:
        ledger.append(round_of(3))
    assert shared.read_bytes() == whole


@pytest.mark.parametrize("kind", ["rounds", "sums"])
def test_a_crash_between_the_arrays_and_the_commit_leaves_the_ledger_as_it_was(
    kind: History, tmp_path: Path
) -> None:
    path = record(tmp_path / "ledger", 3, history=kind)
    right, before = answers(path), snapshot_of(path)
    died = subprocess.run(
        command("die-before-commit", path, 3),
        cwd=ROOT,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    left = snapshot_of(path)
    written = {name for name, data in left.items() if before.get(name) != data}
    written -= {"index.sqlite-journal"}
    assert all(name.startswith("arrays/") for name in written)
    # Everything was there already: the model, and the round or its sums and pairs.
    assert len(written) == (2 if kind == "rounds" else 3)
    assert answers(path) == right
    with LedgerReader(path) as reader:
        found = verify(reader)
        assert found.problems == ()
        assert found.num_strays == (1 if kind == "rounds" else 3)
    with DiskLedger(path) as ledger:
        assert verify(ledger).num_strays == 0
    after = snapshot_of(path)
    after.pop("index.sqlite-journal", None)
    assert after == before
    with DiskLedger(path) as ledger:
        ledger.append(round_of(3))
        assert verify(ledger).problems == ()


def test_a_failed_append_leaves_no_byte_behind(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot_of(path)

    def fail(change: transaction.Transaction) -> None:
        raise OSError(5, "Input/output error")

    with DiskLedger(path) as ledger:
        with monkeypatch.context() as patch:
            patch.setattr(transaction.Transaction, "finish", fail)
            with pytest.raises(Exception, match="round 3 was not recorded"):
                ledger.append(round_of(3))
        assert snapshot_of(path / "arrays") == {
            name.removeprefix("arrays/"): data
            for name, data in before.items()
            if name.startswith("arrays/")
        }
        ledger.append(round_of(3))
        assert verify(ledger).problems == ()


def test_the_index_knows_how_many_bytes_count(path: Path) -> None:
    with LedgerReader(path) as reader, reader.snapshot():
        rows = reader.index.rows(FileRow)
        head = reader.head
    sizes = {file.name: file.stat().st_size for file in files_of(path)}
    assert sizes == {f"{row.file:08d}.safetensors": row.num_bytes for row in rows}
    assert head.array_bytes == sum(sizes.values())
    vectors = sum(b - a for spans in live_vectors(path).values() for a, b in spans)
    [shared] = live_vectors(path)
    models = sum(size for name, size in sizes.items() if name != shared.name)
    assert head.live_bytes == vectors + models


def test_a_change_can_read_a_small_file_before_it_is_synced(tmp_path: Path) -> None:
    files = ArrayFiles(tmp_path)
    vector = np.arange(40, dtype=np.float32)
    work = write_image(files, 1, [new_part("step", vector, "float32")])
    _, [stored] = next(work)
    source = Source(1, stored, "float32", vector.size, "step")
    np.testing.assert_array_equal(read_vector(files, source), vector)
    assert list(work) == []
