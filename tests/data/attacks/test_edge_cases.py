from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastfedul.data.attacks.edge_cases import is_copied, load_edge_cases, make_tail
from fastfedul.data.dataset import Dataset, Images
from fastfedul.data.npz import read_dataset, read_pictures
from fastfedul.data.sources import load
from fastfedul.errors import InvalidInputError
from fastfedul.rng import stream


def turns(picture: Images) -> set[bytes]:
    return {np.rot90(picture, number).tobytes() for number in range(4)}


def noise(number: int, size: int = 8) -> Images:
    shape = (number, size, size, 3)
    return np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)


def test_a_picture_is_found_in_every_turn() -> None:
    among = noise(5)
    turned = np.stack([np.rot90(among[place], place) for place in range(4)])
    assert is_copied(turned, among).all()
    assert not is_copied(noise(4), among).any()


def test_a_picture_is_found_after_slight_changes() -> None:
    among = noise(5, 32) // 2
    assert is_copied(among + 2, among).all()
    assert not is_copied(among + 4, among).any()
    assert is_copied(among + 4, among, tolerance=5).all()


def test_looking_for_copies_agrees_with_comparing_everything() -> None:
    among = noise(30, 4) // 64
    pictures = noise(40, 4) // 64
    slow = [
        any(
            np.abs(np.rot90(picture, turn).astype(int) - other).mean() <= 0.9
            for turn in range(4)
            for other in among
        )
        for picture in pictures
    ]
    assert 0 < sum(slow) < len(slow)
    assert is_copied(pictures, among, tolerance=0.9).tolist() == slow


def test_southwest_scores_no_plane_that_poisons(
    data_file: Callable[[str], Path],
) -> None:
    train, test = read_pictures(data_file("southwest.npz"))
    cases = load_edge_cases(load("cifar10"))
    assert cases.poison is not None
    np.testing.assert_array_equal(cases.poison, train)
    poison = set().union(*(turns(picture) for picture in cases.poison))
    assert not poison & {picture.tobytes() for picture in cases.scored}
    # One picture of 49 is in both parts, one differs in a few pixels; four turns each.
    assert len(test) - len(cases.scored) == 8
    flat = cases.poison.reshape(len(train), -1).astype(np.int16)
    for picture in cases.scored[::4]:
        difference = np.abs(flat - picture.reshape(-1).astype(np.int16))
        assert difference.mean(axis=1).min() > 10
    assert (cases.true_label, cases.target_label) == (0, 9)


def test_ardis_poisons_with_training_sevens_and_scores_test_sevens(
    data_file: Callable[[str], Path],
) -> None:
    ardis = read_dataset(data_file("ardis.npz"), "ardis")
    cases = load_edge_cases(load("mnist"))
    assert cases.poison is not None
    assert len(cases.poison) == 660
    labels = {
        image.tobytes(): int(label) for image, label in zip(*ardis.test, strict=True)
    }
    assert {labels[picture.tobytes()] for picture in cases.scored} == {7}
    poison = set().union(*(turns(picture) for picture in cases.poison))
    assert not poison & {picture.tobytes() for picture in cases.scored}
    # Of the 100 test sevens, 24 repeat another one; each is scored once.
    assert len(cases.scored) == len(np.unique(cases.scored, axis=0)) == 76
    assert (cases.true_label, cases.target_label) == (7, 1)


def test_digits_have_turned_sevens_of_the_test_part(digits: Dataset) -> None:
    cases = load_edge_cases(digits)
    assert (cases.true_label, cases.target_label) == (7, 1)
    assert cases.poison is None
    assert cases.scored.shape == (36, 8, 8, 1)
    np.testing.assert_array_equal(cases.scored, load_edge_cases(digits).scored)


def test_retinal_scans_have_turned_scans_of_class_zero(
    data_file: Callable[[str], Path],
) -> None:
    data_file("oct_retina_subset.npz")
    cases = load_edge_cases(load("oct-retina-subset"))
    assert (cases.true_label, cases.target_label) == (0, 1)
    assert cases.scored.shape == (250, 28, 28, 1)


def test_a_test_image_that_is_also_a_training_image_is_not_scored(
    digits: Dataset,
) -> None:
    sevens = digits.test_images[digits.test_labels == 7]
    leaked = np.rot90(sevens[:5], 1, axes=(1, 2))
    leaky = replace(
        digits,
        train_images=np.concatenate([digits.train_images, leaked]),
        train_labels=np.concatenate([digits.train_labels, [7] * 5]),
    )
    assert len(load_edge_cases(leaky).scored) == len(sevens) - 5


def test_a_made_tail_is_the_image_turned_left_and_little_more() -> None:
    images = np.zeros((200, 28, 28, 1), np.uint8)
    images[:, 4:24, 18:24] = 255  # a vertical bar on the right
    tail = make_tail(images, stream(0, "test")).astype(int)
    bar = tail[:, :, :, 0] > 128
    rows, columns = bar.sum(axis=2).max(axis=1), bar.sum(axis=1).max(axis=1)
    assert (rows == 20).all()  # lies on its side now
    assert (columns == 6).all()
    assert bar[:, :14].any(axis=(1, 2)).all()  # what was right is on top
    assert not bar[:, 14:].any()
    top = bar.any(axis=2).argmax(axis=1)
    assert set(top.tolist()) == {2, 3, 4, 5, 6}  # moved by up to two pixels


def test_a_made_tail_is_a_function_of_the_stream() -> None:
    images = noise(10)
    first = make_tail(images, stream(1, "test"))
    np.testing.assert_array_equal(first, make_tail(images, stream(1, "test")))
    assert (first != make_tail(images, stream(2, "test"))).any()
    assert first.dtype == np.uint8


def test_a_made_tail_of_oblong_images_keeps_their_shape() -> None:
    images = np.zeros((6, 8, 12, 3), np.uint8)
    assert make_tail(images, stream(0, "test")).shape == images.shape


def test_a_data_set_without_the_class_has_no_edge_cases(digits: Dataset) -> None:
    others = digits.test_labels != 7
    without = replace(
        digits,
        test_images=digits.test_images[others],
        test_labels=digits.test_labels[others],
    )
    with pytest.raises(InvalidInputError, match="no images of class 7"):
        load_edge_cases(without)


def test_missing_pictures_name_their_file(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTFEDUL_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(InvalidInputError, match=r"put ardis\.npz"):
        load_edge_cases(replace(digits, name="mnist"))
    with pytest.raises(InvalidInputError, match=r"put southwest\.npz"):
        load_edge_cases(replace(digits, name="cifar10"))
