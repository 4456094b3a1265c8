"""Named data sets: descriptions, files and loading."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import platformdirs

from fastfedul.data.dataset import Dataset, Labels, choose
from fastfedul.data.npz import LAYOUTS, PICTURES, read_dataset
from fastfedul.errors import InvalidInputError
from fastfedul.rng import stream

DEFAULT = "digits"
FOLDER_VARIABLE = "FASTFEDUL_DATA"
INSTALL_DIGITS = "pip install scikit-learn"
"""The command that installs the data set digits."""

_NUM_DIGITS_TEST = 360


@dataclass(frozen=True, slots=True)
class Source:
    """Description of a named data set, known without opening it.

    Attributes:
        name: Name that the user types.
        about: Description of one line.
        file: Name of the file; None for a data set of scikit-learn.
        use: `train`: models train on it. `attack`: pictures for the edge-case attack
            on another data set.
        class_names: Names of the classes; empty if the numbers are the names.
        keys: Names of the arrays in the file.
        fetchable: Whether a public source has the file.
    """

    name: str
    about: str
    file: str | None
    use: Literal["train", "attack"] = "train"
    class_names: tuple[str, ...] = ()
    keys: tuple[str, ...] = LAYOUTS[0]
    fetchable: bool = True


_CIFAR10_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_OCT_CLASSES = (
    *("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
)
_ALL = (
    Source(
        "digits",
        "Handwritten digits, 8x8 grey, comes with scikit-learn",
        None,
        fetchable=False,
    ),
    Source("mnist", "Handwritten digits, 28x28 grey", "mnist.npz"),
    Source(
        "cifar10",
        "Small photographs of ten things, 32x32 RGB",
        "cifar10.npz",
        class_names=_CIFAR10_CLASSES,
    ),
    Source(
        "octmnist",
        "Retinal scans of MedMNIST, 28x28 grey",
        "octmnist.npz",
        class_names=_OCT_CLASSES,
        keys=LAYOUTS[1],
    ),
    Source(
        "oct-retina-subset",
        "Other retinal scans split by patient, 28x28 grey; not MedMNIST's file",
        "oct_retina_subset.npz",
        class_names=_OCT_CLASSES,
        keys=LAYOUTS[1],
        fetchable=False,
    ),
    Source(
        "ardis",
        "Digits from Swedish church books, 28x28 grey; edge cases for mnist",
        "ardis.npz",
        "attack",
    ),
    Source(
        "southwest",
        "Southwest Airlines planes, 32x32 RGB, no labels; edge cases for cifar10",
        "southwest.npz",
        "attack",
        keys=PICTURES,
    ),
)
SOURCES = {source.name: source for source in _ALL}


def data_folders() -> tuple[Path, ...]:
    """Return the folders that hold data files; fetched files go to the first.

    `$FASTFEDUL_DATA` if it is set, then the platform's cache folder of the user.
    """
    cache = platformdirs.user_cache_path("fastfedul", appauthor=False)
    chosen = os.environ.get(FOLDER_VARIABLE)
    return (Path(chosen).expanduser(), cache) if chosen else (cache,)


def find_source(name: str) -> Source:
    """Return the named data set.

    Raises:
        InvalidInputError: If no data set has this name.
    """
    if name not in SOURCES:
        raise InvalidInputError(
            f"there is no data set {name!r}; choose {', '.join(SOURCES)}, "
            "or give the path of an .npz file of your own"
        )
    return SOURCES[name]


def locate(source: Source) -> Path | None:
    """Return the file of a named data set, or None if it is not on this machine."""
    if source.file is None:
        return None
    candidates = (folder / source.file for folder in data_folders())
    return next((path for path in candidates if path.is_file()), None)


def is_here(source: Source) -> bool:
    """Return whether a named data set can be loaded on this machine."""
    if source.file is None:
        return find_spec("sklearn") is not None
    return locate(source) is not None


def require(source: Source) -> Path:
    """Return the file of a named data set.

    Raises:
        InvalidInputError: If it is missing; the message says how to get the file.
    """
    path = locate(source)
    if path is None:
        fetch = f"run `fastfedul data fetch {source.name}`, or "
        raise InvalidInputError(
            f"{source.name} is not on this machine; "
            f"{fetch if source.fetchable else ''}{placing(source)}"
        )
    return path


def placing(source: Source, folder: Path | None = None) -> str:
    """Return a request to put the file into a folder, for a message."""
    arrays = ", ".join(source.keys)
    where = folder or data_folders()[0]
    return f"put {source.file} with the arrays {arrays} into {where}"


def is_path(data: str) -> bool:
    """Return whether a text is the path of a file, not the name of a data set."""
    return data.endswith(".npz") or "/" in data


def load(data: str | Path) -> Dataset:
    """Return a data set by name, or from an `.npz` file of the user's own.

    A text that ends in `.npz` or contains a slash is a path. The data set then has the
    name of the file, so nobody mistakes it for a named one.

    Raises:
        InvalidInputError: If no data set has this name, or its file cannot be used.
    """
    if isinstance(data, Path) or is_path(data):
        path = Path(data).expanduser()
        return read_dataset(path, path.name)
    source = find_source(data)
    if source.file is None:
        return _load_digits()
    if source.name == "southwest":
        raise InvalidInputError(
            "southwest has pictures but no labels, so no model can be trained on it; "
            "it serves the edge-case attack on cifar10"
        )
    return read_dataset(require(source), source.name)


def _load_digits() -> Dataset:
    """Return scikit-learn's digits, 1,437 to train and 360 to test.

    scikit-learn has no official test part. This part is a fixed draw with the classes
    in proportion. The 17 grey levels 0 to 16 become 0 to 255.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InvalidInputError(
            "the data set digits comes with scikit-learn, which is not installed; "
            f"run `{INSTALL_DIGITS}`"
        ) from None
    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]
    labels: Labels = bunch.target.astype(np.int64)
    test = choose(labels, _NUM_DIGITS_TEST, stream(0, "digits test part"))
    train = np.setdiff1d(np.arange(len(labels)), test)
    return Dataset(
        name="digits",
        train_images=images[train],
        train_labels=labels[train],
        test_images=images[test],
        test_labels=labels[test],
        num_classes=10,
        shape=(8, 8, 1),
    )
