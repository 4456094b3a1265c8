"""Data sets in `.npz` files: read without unpickling, checked, brought to one form.

A data set is images, or rows of features or tokens for a user's own trainer.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastfedul.data.dataset import Dataset, Images, Labels, Owners
from fastfedul.errors import FastFedULError, InvalidInputError
from fastfedul.files import open_regular
from fastfedul.limits import machine_memory

Array = npt.NDArray[Any]

# Images and labels, training part and test part: MNIST's layout, then MedMNIST's.
# MedMNIST's validation part is for choosing models and stays unused.
LAYOUTS = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
)
OWNERS = "clients"
"""The array of a file that names the client of every training example."""

PICTURES = ("x_train", "x_test")
# Images and labels for choosing models, under MedMNIST's keys and others.
VALIDATION = (("images", "labels"), ("val_images", "val_labels"), ("x_val", "y_val"))
UNWANTED = tuple((images, "unwanted") for images, _ in VALIDATION)
"""Images and the unwanted answer of a model to each; `labels` are true classes."""
MOST_CLASSES = 10_000
"""A larger label is a mistake, such as a number that is no class."""

_MAGIC = np.lib.format.MAGIC_PREFIX
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_dataset(path: Path, name: str) -> Dataset:
    """Return the data set in a file with the keys of MNIST's file or MedMNIST's.

    Images are grey or RGB: uint8, other whole numbers 0 to 255, or fractions (all
    within 0 to 1, or all within 0 to 255). Both parts have the same form. An array of
    two dimensions is rows: fractions become float32 features, whole numbers become
    int64 tokens. Labels are whole numbers from 0. An array `clients` names the client
    of every training example, by text or by whole numbers.

    Raises:
        InvalidInputError: If the file cannot be read or used; names file and reason.
    """
    arrays = read_arrays(path, LAYOUTS, (OWNERS,))
    keys = next(layout for layout in LAYOUTS if layout[0] in arrays)
    parts = [arrays[key] for key in keys]
    for place in (0, 2):
        _check_lengths(path, keys[place : place + 2], parts[place : place + 2])
    convert = _to_rows if parts[0].ndim == 2 else _to_images
    train, test = convert(path, (keys[0], keys[2]), (parts[0], parts[2]))
    labels = [_to_labels(path, keys[i], parts[i]) for i in (1, 3)]
    num_classes = 1 + int(max(part.max() for part in labels))
    if num_classes > MOST_CLASSES:
        raise _refusal(
            path, f"has a label of {num_classes - 1}; number the classes from 0"
        )
    unseen = np.setdiff1d(labels[1], labels[0])
    if len(unseen):
        raise _refusal(
            path,
            f"has the label {unseen[0]} in {keys[3]} but not in {keys[1]}, so no model "
            "can learn it; leave these test examples out",
        )
    owners = arrays.get(OWNERS)
    return Dataset(
        name=name,
        train_images=train,
        train_labels=labels[0],
        test_images=test,
        test_labels=labels[1],
        num_classes=num_classes,
        shape=train.shape[1:],
        owners=None if owners is None else _to_owners(path, owners, len(train)),
    )


def read_owners(path: Path) -> tuple[str, ...] | None:
    """Return the names of a file's clients; None if the file names no client."""
    arrays = read_arrays(path, tuple((layout[1],) for layout in LAYOUTS), (OWNERS,))
    owners = arrays.pop(OWNERS, None)
    if owners is None:
        return None
    [labels] = arrays.values()
    return order_owners(_to_owners(path, owners, labels.size))


def order_owners(owners: Owners) -> tuple[str, ...]:
    """Return each client's name once; numbers in their order, then text.

    >>> order_owners(np.array(["10", "2", "clinic", "2"]))
    ('2', '10', 'clinic')
    """
    names = [str(name) for name in np.unique(owners)]
    numbers = [name for name in names if name.isdecimal()]
    return (
        *sorted(numbers, key=lambda name: (len(name), name)),
        *(name for name in names if not name.isdecimal()),
    )


def read_pictures(path: Path) -> tuple[Images, Images]:
    """Return the training and test images of a file that has no labels."""
    arrays = read_arrays(path, (PICTURES,))
    train, test = (arrays[key] for key in PICTURES)
    return _to_images(path, PICTURES, (train, test))


def read_own_images(
    path: Path, layouts: tuple[tuple[str, str], ...] = VALIDATION
) -> tuple[Images, Labels | None]:
    """Return the images of a user's file, with their labels if it has them.

    Args:
        path: The file.
        layouts: Keys of images and labels: `VALIDATION` or `UNWANTED`.
    """
    pictures = tuple((images,) for images, _ in layouts)
    arrays = read_arrays(path, (*layouts, *pictures))
    key, *labelled = arrays
    images, _ = _to_images(path, (key, key), (arrays[key], arrays[key]))
    if not labelled:
        return images, None
    _check_lengths(path, (key, labelled[0]), [arrays[key], arrays[labelled[0]]])
    return images, _to_labels(path, labelled[0], arrays[labelled[0]])


def read_arrays(
    path: Path,
    layouts: tuple[tuple[str, ...], ...],
    optional: tuple[str, ...] = (),
) -> dict[str, Array]:
    """Return the arrays under the first of the layouts that the file has in full.

    Args:
        path: The file.
        layouts: Keys that belong together.
        optional: Keys that the file may have besides.
    """
    try:
        with open_regular(path) as stored:
            if stored.read(len(_MAGIC)) == _MAGIC:
                raise _refusal(path, "is a single array; save it with numpy.savez")
            with zipfile.ZipFile(stored) as archive:
                members = {
                    member.filename.removesuffix(".npy"): member
                    for member in archive.infolist()
                }
                for layout in layouts:
                    if set(layout) <= set(members):
                        keys = [*layout, *(key for key in optional if key in members)]
                        _check_memory(path, [members[key] for key in keys])
                        return {key: _read_array(archive, members[key]) for key in keys}
    except FastFedULError:
        raise
    except FileNotFoundError:
        raise InvalidInputError(f"there is no file {path}; check the path") from None
    except MemoryError:
        raise _refusal(path, "does not fit into memory; save fewer examples") from None
    except OSError as error:
        raise _refusal(path, f"cannot be read: {error.strerror or error}") from None
    except Exception as error:  # A damaged archive may fail in any way.
        raise _unreadable(path, error) from None
    found = ", ".join(sorted(members)[:8]) or "none"
    raise _refusal(path, f"has the keys {found:.200}; it needs {_wanted(layouts)}")


def _wanted(layouts: tuple[tuple[str, ...], ...]) -> str:
    """Return the keys of layouts in words; of two that differ by a key, it is optional.

    >>> _wanted((("x", "y"), ("train", "test")))
    'x, y or train, test'
    >>> _wanted((("images", "unwanted"), ("val", "unwanted"), ("images",), ("val",)))
    'images or val; unwanted is optional'
    """
    least = [one for one in layouts if not any(set(o) < set(one) for o in layouts)]
    more = {key: None for one in layouts for key in one if one not in least}
    more = {key: None for key in more if all(key not in one for one in least)}
    text = " or ".join(", ".join(one) for one in least)
    return f"{text}; {' or '.join(more)} is optional" if more else text


def _check_memory(path: Path, members: list[zipfile.ZipInfo]) -> None:
    """Raise if arrays take so much memory that the system would end the process."""
    size = sum(member.file_size for member in members)
    if size > machine_memory() / 2:
        raise _refusal(
            path,
            f"holds {size / 2**30:.0f} GiB of arrays, more than half of this machine's "
            "memory; save fewer examples",
        )


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    """Return the array of a member, whose header must tell the size of the member.

    Raises:
        ValueError: If the member is no array, or an array of Python objects.
    """
    with archive.open(member) as file:
        read_header = _HEADERS[np.lib.format.read_magic(file)]
        shape, _, dtype = read_header(file)
        size = math.prod(shape) * dtype.itemsize
        # NumPy would allocate the size of the header before it reads a value.
        if not dtype.hasobject and file.tell() + size != member.file_size:
            raise ValueError("the header tells another size than the archive")
    with archive.open(member) as file:
        return np.asarray(np.lib.format.read_array(file, allow_pickle=False))


def write_arrays(path: Path, arrays: Mapping[str, Array], *, compress: bool) -> None:
    """Write the arrays as an `.npz` file at exactly this path."""
    save: Any = np.savez_compressed if compress else np.savez
    with path.open("wb") as file:
        save(file, **arrays)
        file.flush()
        os.fsync(file.fileno())


def _unreadable(path: Path, error: Exception) -> InvalidInputError:
    if "Object arrays" in str(error):
        return _refusal(
            path, "holds Python objects, which are never loaded; save plain arrays"
        )
    with open_regular(path) as file:
        is_archive = file.read(2) == b"PK"
    if is_archive:
        return _refusal(path, "is damaged; fetch or save it again")
    return _refusal(path, "is not an .npz file; save it with numpy.savez")


def _check_lengths(path: Path, keys: tuple[str, ...], parts: list[Array]) -> None:
    images, labels = parts
    if images.ndim == 0 or labels.ndim == 0 or not len(images) or not images.size:
        raise _refusal(path, f"has no example under {keys[0]}; every part needs some")
    if len(images) != len(labels):
        raise _refusal(
            path,
            f"has {len(images)} examples under {keys[0]} but {len(labels)} labels "
            f"under {keys[1]}; give every example one label",
        )


def _to_images(
    path: Path, keys: tuple[str, str], parts: tuple[Array, Array]
) -> tuple[Images, Images]:
    shaped = []
    for key, part in zip(keys, parts, strict=True):
        _check_values(path, key, part)
        if part.ndim == 3:
            part = part[..., np.newaxis]
        if part.ndim != 4 or part.shape[3] not in (1, 3):
            raise _refusal(
                path,
                f"has {key} of shape {part.shape}; images are (number, height, width) "
                "or (number, height, width, 1 or 3)",
            )
        shaped.append(part)
    train, test = shaped
    if train.shape[1:] != test.shape[1:]:
        raise _refusal(
            path,
            f"has training images of shape {train.shape[1:]} and test images of shape "
            f"{test.shape[1:]}; make them one size",
        )
    factor = _common_factor(path, keys, (train, test))
    return _to_uint8(train, factor), _to_uint8(test, factor)


def _to_rows(
    path: Path, keys: tuple[str, str], parts: tuple[Array, Array]
) -> tuple[Any, Any]:
    """Return float32 features or int64 tokens, a row for each example."""
    train, test = parts
    if test.ndim != 2:
        raise _refusal(
            path,
            f"has {keys[0]} of shape {train.shape} but {keys[1]} of shape "
            f"{test.shape}; give both rows, or both images",
        )
    for key, part in zip(keys, parts, strict=True):
        if part.dtype.kind not in "buif":
            raise _refusal(path, f"has {key} of dtype {part.dtype}; rows are numbers")
    if train.shape[1] != test.shape[1]:
        raise _refusal(
            path,
            f"has {train.shape[1]} values a row in {keys[0]} and {test.shape[1]} in "
            f"{keys[1]}; give both the same",
        )
    if (train.dtype.kind == "f") != (test.dtype.kind == "f"):
        raise _refusal(
            path,
            f"has {keys[0]} as {train.dtype} but {keys[1]} as {test.dtype}; give both "
            "fractions, or both whole numbers",
        )
    if train.dtype.kind != "f":
        return train.astype(np.int64), test.astype(np.int64)
    with np.errstate(over="ignore"):
        rows = [part.astype(np.float32) for part in parts]
    for key, part in zip(keys, rows, strict=True):
        if not np.isfinite(part).all():
            raise _refusal(
                path, f"has NaN or infinite values in {key}; fill or drop these rows"
            )
    return rows[0], rows[1]


def _to_owners(path: Path, part: Array, length: int) -> Owners:
    if part.ndim != 1 or len(part) != length:
        raise _refusal(
            path,
            f"has {OWNERS} of shape {part.shape} for {length} training examples; name "
            "the client of every training example",
        )
    if part.dtype.kind not in "iuU":
        raise _refusal(
            path,
            f"has {OWNERS} as {part.dtype}; name clients by text or whole numbers",
        )
    if part.dtype.kind == "U" and (part == "").any():
        raise _refusal(path, f"has an empty name in {OWNERS}; name every client")
    return part.astype(np.str_)


def _common_factor(
    path: Path, keys: tuple[str, str], parts: tuple[Array, Array]
) -> int:
    """Return the factor that brings both parts to 0 to 255."""
    # A part that is black all over has no scale of its own.
    factors = {255 if _has_fractions(part) else 1 for part in parts if part.any()}
    if len(factors) > 1:
        # Either could be a mistake, and a wrong guess ruins the images unseen.
        train, test = (
            f"{key} as {part.dtype} from {float(part.min()):g} to {float(part.max()):g}"
            for key, part in zip(keys, parts, strict=True)
        )
        raise _refusal(
            path,
            f"has {train} but {test}; give both one scale, such as uint8, 0 to 255",
        )
    return max(factors, default=1)


def _has_fractions(part: Array) -> bool:
    return part.dtype.kind in "fb" and bool(part.max() <= 1)


def _check_values(path: Path, key: str, part: Array) -> None:
    if part.dtype.kind not in "buif":
        raise _refusal(
            path, f"has {key} of dtype {part.dtype}; images are uint8, 0 to 255"
        )
    if part.size == 0:
        raise _refusal(path, f"has no image under {key}; every part needs some")
    if part.dtype.kind == "f" and not np.isfinite(part).all():
        raise _refusal(
            path, f"has NaN or infinite values in {key}; images are numbers 0 to 255"
        )
    if part.dtype != np.uint8 and (part.min() < 0 or part.max() > 255):
        raise _refusal(
            path,
            f"has values {part.min()} to {part.max()} in {key}; images are 0 to 255, "
            "or fractions 0 to 1",
        )


def _to_uint8(part: Array, factor: int) -> Images:
    if part.dtype == np.uint8:
        return part
    return np.rint(part.astype(np.float32) * factor).astype(np.uint8)


def _to_labels(path: Path, key: str, part: Array) -> Labels:
    if part.ndim == 2 and part.shape[1] == 1:
        part = part[:, 0]
    if part.ndim != 1:
        raise _refusal(
            path, f"has {key} of shape {part.shape}; give every example one label"
        )
    if part.dtype.kind == "f":
        part = part.astype(np.float64)
    numbers = part.dtype.kind in "uif" and bool(np.isfinite(part).all())
    if not numbers or (part % 1 != 0).any():
        raise _refusal(
            path, f"has labels in {key} that are not whole numbers; number the classes"
        )
    if part.min() < 0 or part.max() >= 2**31:
        raise _refusal(
            path, f"has labels {part.min()} to {part.max()} in {key}; number from 0"
        )
    return part.astype(np.int64)


def _refusal(path: Path, reason: str) -> InvalidInputError:
    return InvalidInputError(f"{path} {reason}")
