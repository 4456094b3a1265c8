"""Examples before and after the split among clients, and the input of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastfedul.errors import InvalidInputError
from fastfedul.records import ClientId
from fastfedul.rng import stream

Images = npt.NDArray[np.uint8]
"""Values 0 to 255, shaped (number, height, width, channels).

Data for a user's own trainer may also be rows, shaped (number, values): float32
features or int64 tokens. The fields called `images` then hold rows.
"""

Labels = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int64]
Owners = npt.NDArray[np.str_]
ModelInput = npt.NDArray[Any]
"""The input of a model for some examples: float32, or int64 for tokens."""


class Examples(NamedTuple):
    """Images with one label each.

    Attributes:
        images: The images, or the rows of data that are no images.
        labels: Class numbers from 0.
    """

    images: Images
    labels: Labels


@dataclass(frozen=True, slots=True)
class Dataset:
    """A data set before the split among clients.

    Attributes:
        name: Name in reports; for a user's own file, the file name.
        train_images: Training examples.
        train_labels: Class numbers from 0, one for each training example.
        test_images: Test examples, in the shape of the training examples.
        test_labels: Class numbers from 0, one for each test example.
        num_classes: One more than the largest label.
        shape: Shape of one example: height, width and channels of an image, or the
            number of values of a row.
        owners: Name of each training example's client; None if the data set names no
            client.
    """

    name: str
    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels
    num_classes: int
    shape: tuple[int, ...]
    owners: Owners | None = None

    @property
    def is_images(self) -> bool:
        """Whether the examples are images, not rows of features or tokens."""
        return len(self.shape) == 3

    @property
    def train(self) -> Examples:
        """The training examples with their labels."""
        return Examples(self.train_images, self.train_labels)

    @property
    def test(self) -> Examples:
        """The test examples with their labels."""
        return Examples(self.test_images, self.test_labels)


@dataclass(frozen=True, slots=True)
class ClientData:
    """The examples of one client.

    Attributes:
        client: Stable name of the data owner.
        images: Images or rows of the client; may be a view of a shared array.
        labels: Labels of the client, one for each example.
    """

    client: ClientId
    images: Images
    labels: Labels

    @property
    def num_examples(self) -> int:
        """Number of examples, poisoned ones included."""
        return len(self.labels)


def to_model_input(images: Images) -> ModelInput:
    """Return the input of a model: float32 from -1 to 1, channels before height.

    Clean and poisoned images of every data set pass this function. It maps 0 to 255
    onto -1 to 1. Rows of features or tokens come back unchanged.

    Args:
        images: Values 0 to 255 as uint8, shaped (number, height, width, channels); or
            rows, shaped (number, values), as float32 or int64.

    >>> to_model_input(np.array([[[[0], [255]]]], np.uint8)).tolist()
    [[[[-1.0, 1.0]]]]
    """
    if images.ndim == 2 and images.dtype in (np.float32, np.int64):
        return images
    if images.dtype != np.uint8 or images.ndim != 4:
        raise InvalidInputError(
            "a model's images are uint8 of shape (number, height, width, channels), "
            f"not {images.dtype} of shape {images.shape}"
        )
    scaled = np.ascontiguousarray(images.transpose(0, 3, 1, 2), np.float32)
    scaled /= np.float32(127.5)
    scaled -= np.float32(1)
    return scaled


def subset(dataset: Dataset, train_size: int, seed: int) -> Dataset:
    """Return the data set with fewer training examples, the classes in proportion.

    The test examples and the order of the examples stay the same.

    Raises:
        InvalidInputError: If the size is below 1 or above the data set's own.
    """
    size = len(dataset.train_labels)
    if not 1 <= train_size <= size:
        raise InvalidInputError(
            f"cannot take {train_size} training examples: {dataset.name} has {size}; "
            f"ask for 1 to {size}"
        )
    rng = stream(seed, "data subset")
    return _keep_train(dataset, choose(dataset.train_labels, train_size, rng))


def set_aside(dataset: Dataset, count: int, seed: int) -> tuple[Examples, Dataset]:
    """Return the server's own clean training examples, and the data set without them.

    The classes are in proportion. The split among clients comes afterwards, so no
    client has these examples.

    Raises:
        InvalidInputError: If no training example would be left for the clients.
    """
    size = len(dataset.train_labels)
    if not 0 <= count < size:
        raise InvalidInputError(
            f"cannot set {count} examples aside: {dataset.name} has {size} to train on "
            f"and the clients need some; ask for 0 to {size - 1}"
        )
    chosen = choose(dataset.train_labels, count, stream(seed, "data set aside"))
    rest = np.setdiff1d(np.arange(size), chosen)
    return _take(dataset.train, chosen), _keep_train(dataset, rest)


def choose(labels: Labels, count: int, rng: np.random.Generator) -> Indices:
    """Return the places of a random choice, ascending, with classes in proportion.

    Each class gives its share, rounded down; the largest remainders give one more.
    """
    classes, sizes = np.unique(labels, return_counts=True)
    exact = sizes * count / max(1, len(labels))
    quota = np.floor(exact).astype(np.int64)
    rest = count - int(quota.sum())
    quota[np.argsort(quota - exact, kind="stable")[:rest]] += 1
    chosen = [
        rng.permutation(np.flatnonzero(labels == label))[:number]
        for label, number in zip(classes, quota, strict=True)
    ]
    return np.sort(np.concatenate(chosen))


def _take(examples: Examples, places: Indices) -> Examples:
    return Examples(examples.images[places], examples.labels[places])


def _keep_train(dataset: Dataset, places: Indices) -> Dataset:
    images, labels = _take(dataset.train, places)
    owners = None if dataset.owners is None else dataset.owners[places]
    return replace(dataset, train_images=images, train_labels=labels, owners=owners)
