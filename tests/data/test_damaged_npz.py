"""Damaged and hostile `.npz` files: one line that names the file, whatever is wrong."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfedul.data.npz import (
    read_dataset,
    read_own_images,
    read_owners,
    read_pictures,
)
from fastfedul.errors import InvalidInputError
from fastfedul.rng import stream

READERS: tuple[Callable[[Path], Any], ...] = (
    lambda path: read_dataset(path, "own"),
    read_owners,
    read_pictures,
    read_own_images,
)
DTYPES = (
    "|u1",
    "<i8",
    "<u8",
    "<f2",
    "<f8",
    "<c16",
    "<M8[s]",
    "|V4",
    "<U3",
    "|S3",
    "|O",
)
SHAPES = ((6, 4, 5), (6,), (6, 1), (), (0,), (-1,), (-2, -3), (2**63,), (10**6,) * 3)


def arrays() -> dict[str, Any]:
    rng = stream(0, "damaged npz")
    return {
        "x_train": rng.integers(0, 256, (6, 4, 5), dtype=np.uint8),
        "y_train": np.array([0, 1, 2, 0, 1, 2], np.uint8),
        "x_test": rng.integers(0, 256, (3, 4, 5), dtype=np.uint8),
        "y_test": np.array([0, 1, 2], np.uint8),
        "clients": np.array(list("aabbcc")),
    }


def npy(dtype: object, shape: object, body: bytes) -> bytes:
    """An array file whose header says anything."""
    header = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode()
    header += b" " * (64 - (11 + len(header)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + body


def archive(key: str, content: bytes, name: str = "{}.npy") -> bytes:
    """A good file but for one member."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as written:
        for other, array in arrays().items():
            member = io.BytesIO()
            np.save(member, array)
            body = content if other == key else member.getvalue()
            written.writestr(name.format(other), body)
    return file.getvalue()


def saved(save: Callable[..., None]) -> bytes:
    file = io.BytesIO()
    save(file, **arrays())
    return file.getvalue()


def refusals(path: Path, content: bytes) -> list[str]:
    """The refusals of a file by all readers; any other error ends the test."""
    path.write_bytes(content)
    found = []
    for read in READERS:
        try:
            read(path)
        except InvalidInputError as error:
            found.append(str(error))
    assert all(str(path) in text and "\n" not in text for text in found)
    return found


@pytest.mark.parametrize("key", ["x_train", "y_train", "clients"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_header_gives_a_result_or_one_line(
    key: str, dtype: str, tmp_path: Path
) -> None:
    for shape in SHAPES:
        for body in (b"\x7f" * 240, b"\xff" * 960):
            refusals(tmp_path / "own.npz", archive(key, npy(dtype, shape, body)))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_any_cut_or_flip_gives_a_result_or_one_line(
    save: Callable[..., None], tmp_path: Path
) -> None:
    whole, rng = saved(save), stream(1, "damaged npz")
    for cut in range(0, len(whole), 41):
        assert refusals(tmp_path / "own.npz", whole[:cut])
    for _ in range(400):
        damaged = bytearray(whole)
        for place in rng.integers(len(whole), size=int(rng.integers(1, 6))):
            damaged[place] = int(rng.integers(256))
        refusals(tmp_path / "own.npz", bytes(damaged))


def with_byte(content: bytes, offset: int, value: int) -> bytes:
    """Set a byte of the headers of all members, local and central."""
    changed = bytearray(content)
    for mark, shift in ((b"PK\x03\x04", 0), (b"PK\x01\x02", 2)):
        place = content.find(mark)
        while place >= 0:
            changed[place + offset + shift] = value
            place = content.find(mark, place + 1)
    return bytes(changed)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (saved(np.savez)[:-30], "is damaged"),
        (archive("x_train", b"", name="other/{}"), "has the keys"),
        (archive("x_train", b"no array"), "is damaged"),
        (archive("x_train", npy("|O", (6,), b"cos\nsystem\n.")), "Python objects"),
        (archive("x_train", npy("<c16", (6, 4, 5), bytes(1920))), "complex128"),
        (archive("x_train", npy("|u1", (10**12,), bytes(99))), "is damaged"),
        (archive("x_train", npy("<f8", (6, 4, 5), b"\xff" * 960)), "NaN"),
        (archive("y_train", npy("<i8", (6,), b"\xff" * 48)), "labels -1"),
        (archive("y_train", npy("<u8", (6,), b"\xff" * 48)), "number from 0"),
        (archive("y_train", npy("<M8[s]", (6,), bytes(48))), "not whole numbers"),
        (with_byte(saved(np.savez), 6, 1), "is damaged"),
        (with_byte(saved(np.savez), 8, 99), "is damaged"),
    ],
    ids=[
        *("cut", "names", "no array", "objects", "complex", "huge shape", "nan"),
        *("negative label", "large label", "dates", "encrypted", "compression"),
    ],
)
def test_each_kind_of_damage_is_named(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    (first, *_) = refusals(tmp_path / "own.npz", content)
    assert reason in first


def test_a_file_that_unpacks_to_more_than_memory_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive's list gives the size, so a small bomb is never unpacked."""
    bomb = archive("x_train", npy("|u1", (6, 1000, 1000), bytes(6_000_000)))
    assert len(bomb) < 20_000
    monkeypatch.setattr("fastfedul.data.npz.machine_memory", lambda: 8_000_000)
    (first, *_) = refusals(tmp_path / "own.npz", bomb)
    assert "more than half of this machine's memory" in first
