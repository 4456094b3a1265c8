"""Damage to files of arrays is found and named, and never becomes an answer."""

from __future__ import annotations

import itertools
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from fastfedul import DiskLedger, LedgerDamagedError, LedgerReader, verify
from fastfedul.ledger.store import codec
from fastfedul.ledger.store.array_files import file_name
from fastfedul.ledger.store.arrays import PAGE
from fastfedul.params import Layout
from fastfedul.records import History, StorageDtype
from tests.support.damage import (
    BOTH_KINDS,
    READINGS,
    Image,
    array_files,
    array_of,
    assert_no_wrong_answer,
    flip,
    images_of,
    live_vectors,
    place_of,
)
from tests.support.disk_ledgers import (
    LAYOUT,
    answer,
    assert_one_line,
    initial_model,
    problems_of,
    round_of,
    snapshot_of,
)


@pytest.mark.slow
@BOTH_KINDS
def test_a_changed_byte_of_any_array_file_is_found_and_never_believed(
    template: Path, damaged: Path, truth: dict[str, object], kind: History
) -> None:
    vectors = live_vectors(damaged)
    for file in array_files(damaged):
        sound = file.read_bytes()
        positions = []
        for number, (start, stop) in enumerate(vectors.get(file, ())):
            three = [start, start + (number * 37) % (stop - start), stop - 1]
            # Of sums there are many pairs, so one byte has to do for each.
            positions += three if kind == "rounds" else [three[number % 3]]
        if file in models(damaged):
            [image] = images_of(sound)
            positions += [*header_positions(image), image.data, image.stop - 1]
        elif b'.step"' in sound:
            images = list(images_of(sound))
            positions += [at for image in images for at in header_positions(image)]
            for image, following in itertools.pairwise(images):
                positions += [image.stop, following.start - 1]
        assert positions
        for number, position in enumerate(positions):
            flip(file, position, bit=(number + position) % 8)
            problems = problems_of(damaged)
            assert any(file.name in problem for problem in problems), position
            assert_no_wrong_answer(damaged, truth)
            file.write_bytes(sound)
    assert problems_of(damaged) == ()
    assert snapshot_of(damaged) == snapshot_of(template)


@pytest.mark.parametrize("kind", ["sums"])
def test_a_vector_that_no_row_refers_to_counts_no_more(
    damaged: Path, truth: dict[str, object]
) -> None:
    num_bytes = 4 * LAYOUT.size
    dead = 0
    for file, spans in live_vectors(damaged).items():
        sound = file.read_bytes()
        [image] = images_of(sound)
        live = {position for span in spans for position in range(*span)}
        rest = [at for at in range(image.data, image.stop) if at not in live]
        dead += len(rest)
        if rest:
            flip(file, rest[0])
            assert problems_of(damaged) == ()
            with LedgerReader(damaged) as reader:
                for name, right in truth.items():
                    assert READINGS[name](reader) == right, name
            file.write_bytes(sound)
    assert dead >= num_bytes


@BOTH_KINDS
def test_a_changed_header_of_sums_pairs_and_adjustments_is_found(
    damaged: Path, truth: dict[str, object]
) -> None:
    found = 0
    for file in set(array_files(damaged)) - models(damaged):
        sound = file.read_bytes()
        image = next(images_of(sound))
        if b'.step"' in sound[image.start : image.data]:
            continue
        for position in header_positions(image):
            flip(file, position)
            problems = problems_of(damaged)
            assert any(file.name in problem for problem in problems), position
            assert_no_wrong_answer(damaged, truth)
            file.write_bytes(sound)
            found += 1
    assert found
    assert problems_of(damaged) == ()


def header_positions(image: Image) -> list[int]:
    """Both ends of the length field and of the header."""
    return [image.start, image.start + 7, image.start + 9, image.data - 1]


def models(path: Path) -> set[Path]:
    """The files of the initial and of the current model."""
    index = sqlite3.connect(path / "index.sqlite")
    [(initial,)] = index.execute("SELECT file FROM ledger")
    index.close()
    with LedgerReader(path) as reader:
        return {reader.model_path, path / "arrays" / file_name(initial)}


def test_rounds_share_a_file_with_gaps_between_them(template: Path) -> None:
    """The test above says something of gaps only if there are any."""
    images = [list(images_of(file.read_bytes())) for file in array_files(template)]
    longest = max(images, key=len)
    assert len(longest) == 6
    assert all(image.start % PAGE == 0 for image in longest)
    assert all(a.stop < b.start for a, b in itertools.pairwise(longest))


@pytest.mark.parametrize("kind", ["sums"])
def test_every_byte_of_a_pair_counts(damaged: Path) -> None:
    index = sqlite3.connect(damaged / "index.sqlite")
    [(priority, round_)] = index.execute(
        "SELECT priority, round FROM pairs ORDER BY priority LIMIT 1"
    ).fetchall()
    index.close()
    pair = place_of(
        damaged, "SELECT file, array FROM pairs WHERE priority = ?", priority
    )
    sound = pair.read()
    assert len(sound) == codec.encoded_bytes("float16", LAYOUT.size)
    for position in range(len(sound)):
        pair.flip(position, bit=(position * 5) % 8)
        with LedgerReader(damaged) as reader:
            if position % 16 == 0:
                [problem] = verify(reader).problems
                assert f"round {round_}" in problem
            with pytest.raises(LedgerDamagedError) as caught:
                READINGS["pairs"](reader)
            assert_one_line(caught, f"round {round_}, pair")
        pair.write(sound)


def test_every_byte_of_an_update_counts(damaged: Path) -> None:
    update = array_of(damaged, round_=4, client="b")
    sound = update.read()
    assert len(sound) == codec.encoded_bytes("float16", LAYOUT.size)
    for position in range(len(sound)):
        update.flip(position, bit=(position * 5) % 8)
        with LedgerReader(damaged) as reader:
            [problem] = verify(reader).problems
            assert "round 4, client 'b'" in problem
            with pytest.raises(LedgerDamagedError) as caught:
                answer(reader, "b")
            assert_one_line(caught, "round 4, client 'b'")
        update.write(sound)


@pytest.mark.slow
def test_every_byte_of_a_rounds_header_counts(damaged: Path) -> None:
    """Nothing is read by it, so that no answer is wrong; yet `verify` finds it."""
    update = array_of(damaged, round_=4, client="b")
    sound = update.file.read_bytes()
    [image] = [i for i in images_of(sound) if i.start < update.start < i.stop]
    for position in range(image.start, image.data):
        flip(update.file, position, bit=(position * 5) % 8)
        [problem] = problems_of(damaged)
        assert "a header, or a gap" in problem
        assert update.file.name in problem
        update.file.write_bytes(sound)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "kind"),
    [(0, "rounds"), (-1, "rounds"), (0.5, "rounds"), (-1, "sums"), (0.5, "sums")],
)
def test_an_array_file_that_was_cut_is_found_and_never_believed(
    damaged: Path, truth: dict[str, object], length: float
) -> None:
    for file in array_files(damaged):
        sound = file.read_bytes()
        cut = sound[: len(sound) // 2 if length == 0.5 else int(length)]
        file.write_bytes(cut)
        assert any(file.name in problem for problem in problems_of(damaged))
        assert_no_wrong_answer(damaged, truth)
        file.write_bytes(sound)


@BOTH_KINDS
def test_bytes_behind_the_end_of_an_array_file_are_no_part_of_it(
    template: Path, damaged: Path, truth: dict[str, object]
) -> None:
    """A killed writer leaves such bytes; a model, however, is a file of its own."""
    whole_files = models(damaged)
    for file in array_files(damaged):
        sound = file.read_bytes()
        file.write_bytes(sound + b"\x5a" * 1000)
        found = any(file.name in problem for problem in problems_of(damaged))
        assert found == (file in whole_files)
        assert_no_wrong_answer(damaged, truth)
        if file not in whole_files:
            with LedgerReader(damaged) as reader:
                for name, right in truth.items():
                    assert READINGS[name](reader) == right, name
        DiskLedger(damaged).close()
        assert file.read_bytes() == sound
    assert snapshot_of(damaged) == snapshot_of(template)


@pytest.mark.parametrize("size", [70_000, 131_073, 200_000])
@pytest.mark.parametrize("dtype", codec.STORAGE_DTYPES)
def test_damage_in_the_last_block_of_a_large_model_is_found(
    dtype: StorageDtype, size: int, tmp_path: Path
) -> None:
    layout = Layout.of({"w": np.zeros(size)})
    path = tmp_path / "ledger"
    with DiskLedger.create(path, initial_model(layout), update_dtype=dtype) as ledger:
        ledger.append(round_of(0, layout=layout, clients=("a", "b")))
    array_of(path, round_=0, client="b").flip(-1)
    with LedgerReader(path) as reader:
        assert answer(reader, "a")
        with pytest.raises(LedgerDamagedError) as caught:
            answer(reader, "b")
        assert_one_line(caught, "round 0, client 'b'")
        [problem] = verify(reader).problems
        assert "round 0, client 'b'" in problem


def test_two_updates_that_changed_places_are_found(damaged: Path) -> None:
    one = array_of(damaged, round_=4, client="b")
    other = array_of(damaged, round_=4, client="c")
    one_data, other_data = one.read(), other.read()
    assert len(one_data) == len(other_data)
    one.write(other_data)
    other.write(one_data)
    with LedgerReader(damaged) as reader:
        assert len(verify(reader).problems) == 2
        with pytest.raises(LedgerDamagedError):
            answer(reader, "b")


def test_two_files_that_changed_places_are_found(damaged: Path) -> None:
    one, other = models(damaged)
    aside = damaged / "aside"
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    with LedgerReader(damaged) as reader:
        assert len(verify(reader).problems) == 2
        for name in ("initial", "final"):
            with pytest.raises(LedgerDamagedError):
                READINGS[name](reader)
