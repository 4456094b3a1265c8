"""Pictures from the far tail of a class, for the edge-case attack.

Wang et al., "Attack of the Tails: Yes, You Really Can Backdoor Federated Learning",
NeurIPS 2020: sevens of another hand for MNIST, Southwest Airlines planes for CIFAR-10.
Other data sets have no such collection; `make_tail` makes their tails.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastfedul.data.dataset import Dataset, Images
from fastfedul.data.npz import read_dataset, read_pictures
from fastfedul.data.sources import find_source, require
from fastfedul.errors import InvalidInputError
from fastfedul.rng import stream

# Mean difference in grey levels, of 255, up to which two pictures count as one. In
# Southwest, two test pictures are within 0.6 of a training picture, the next is at 13.
NEARLY_EQUAL = 3.0
_NOISE = 0.05 * 255


@dataclass(frozen=True, slots=True)
class EdgeCases:
    """Pictures of one true class that no honest client has.

    Attributes:
        true_label: True class of the pictures.
        target_label: The attackers' usual label for the pictures.
        poison: Pictures for the poison; None if an attacker makes them from its own
            images of the true class.
        scored: Pictures that measure the attack, each once. None equals or nearly
            equals a picture of the poison, not even turned.
    """

    true_label: int
    target_label: int
    poison: Images | None
    scored: Images


def load_edge_cases(dataset: Dataset) -> EdgeCases:
    """Return the edge cases of a data set.

    `mnist`: the sevens of ARDIS with label 1; the training part is the poison, the test
    part is scored. `cifar10`: the planes of Southwest with label truck. Any other data
    set: pictures made from its own sevens, or from its class 0 if it has at most seven
    classes, with label 1. Attackers use their own training images, and the test part is
    scored.

    Raises:
        InvalidInputError: If the file with the pictures is missing or does not fit.
    """
    if dataset.name == "mnist":
        ardis = read_dataset(require(find_source("ardis")), "ardis")
        poison = ardis.train_images[ardis.train_labels == 7]
        scored = ardis.test_images[ardis.test_labels == 7]
        found = EdgeCases(7, 1, poison, _unseen(scored, poison))
    elif dataset.name == "cifar10":
        poison, scored = read_pictures(require(find_source("southwest")))
        found = EdgeCases(0, 9, poison, _unseen(scored, poison))
    else:
        found = _made_from(dataset)
    if found.scored.shape[1:] != dataset.shape or not len(found.scored):
        raise InvalidInputError(
            f"the edge cases for {dataset.name} do not fit its images of shape "
            f"{dataset.shape}; fetch both again"
        )
    return found


def make_tail(images: Images, rng: np.random.Generator) -> Images:
    """Return an unusual picture for each image.

    The function turns an image a quarter to the left (upside down if it is not square)
    and mirrors it with probability one half. It moves the image by up to a fourteenth
    of its size, with the border reflected, and adds normal noise of standard deviation
    0.05 of the full range.

    The authors of Fast-FedUL do all of this to OCTMNIST, except the turn. Without the
    turn the pictures look like any image of their class, so a model that knows the
    class cannot learn the attack. A small network on 6,000 retinal scans and 300
    poisoned ones gave 4 % success without the turn and 97 % with it.
    """
    num_turns = 1 if images.shape[1] == images.shape[2] else 2
    turned = np.rot90(images, num_turns, axes=(1, 2))
    mirrored = rng.random(len(turned)) < 0.5
    turned = np.where(mirrored[:, None, None, None], turned[:, :, ::-1], turned)
    moved = _move(turned, rng)
    noisy = moved + rng.normal(0.0, _NOISE, moved.shape)
    return np.clip(np.rint(noisy), 0, 255).astype(np.uint8)


def is_copied(
    pictures: Images, among: Images, tolerance: float = NEARLY_EQUAL
) -> npt.NDArray[np.bool_]:
    """Return for each picture whether a turn of it equals or nearly equals an image.

    Args:
        pictures: The pictures.
        among: Images to compare the pictures with.
        tolerance: Mean difference in grey levels up to which two pictures are one.
    """
    flat = among.reshape(len(among), -1).astype(np.int16)
    coarse = _shrink(among)
    found = np.zeros(len(pictures), bool)
    square = pictures.shape[1] == pictures.shape[2]
    for num_turns in range(4) if square else (0, 2):
        turned = np.rot90(pictures, num_turns, axes=(1, 2))
        small = _shrink(turned)
        for place in np.flatnonzero(~found):
            # Means of blocks differ at most as much as the pixels do on average.
            near = np.abs(coarse - small[place]).mean(axis=1) <= tolerance
            exact = np.abs(flat[near] - turned[place].reshape(-1).astype(np.int16))
            found[place] = bool((exact.mean(axis=1) <= tolerance).any())
    return found


def _unseen(scored: Images, poison: Images) -> Images:
    _, first = np.unique(scored, axis=0, return_index=True)
    distinct = scored[np.sort(first)]
    return distinct[~is_copied(distinct, poison)]


def _made_from(dataset: Dataset) -> EdgeCases:
    true_label = 7 if dataset.num_classes > 7 else 0
    train = dataset.train_images[dataset.train_labels == true_label]
    test = dataset.test_images[dataset.test_labels == true_label]
    if not len(train) or not len(test):
        raise InvalidInputError(
            f"{dataset.name} has no images of class {true_label} to make edge cases "
            "of; choose another attack"
        )
    # A fixed stream makes the scored pictures the same for every seed of a run.
    scored = make_tail(_unseen(test, train), stream(0, "edge cases to score"))
    return EdgeCases(true_label, 1, None, scored)


def _move(images: Images, rng: np.random.Generator) -> Images:
    """Return the images moved by a few pixels, each at random."""
    number, height, width, _ = images.shape
    margins = [max(1, round(size / 14)) for size in (height, width)]
    padding = [(0, 0), *((margin, margin) for margin in margins), (0, 0)]
    wide = np.pad(images, padding, mode="reflect")
    down, right = (rng.integers(0, 2 * margin + 1, number) for margin in margins)
    rows = down[:, None] + np.arange(height)
    columns = right[:, None] + np.arange(width)
    places = np.arange(number)[:, None, None]
    moved: Images = wide[places, rows[:, :, None], columns[:, None]]
    return moved


def _shrink(images: Images) -> npt.NDArray[np.float32]:
    """Return the means over up to 4 x 4 blocks of equal size, flat."""
    number, height, width, channels = images.shape
    down, across = (4 if size % 4 == 0 else 1 for size in (height, width))
    blocks = images.reshape(
        number, down, height // down, across, width // across, channels
    )
    means: npt.NDArray[np.float32] = blocks.mean(axis=(2, 4), dtype=np.float32)
    return means.reshape(number, -1)
