import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fastfedul.data.dataset import Dataset
from fastfedul.data.sources import SOURCES, data_folders, find_source, load, locate
from fastfedul.errors import InvalidInputError


@pytest.fixture
def empty_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Both folders that are searched, with nothing in them."""
    monkeypatch.setenv("FASTFEDUL_DATA", str(tmp_path / "chosen"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_digits_are_split_once_and_for_all(digits: Dataset) -> None:
    assert digits.train_images.shape == (1437, 8, 8, 1)
    assert digits.test_images.shape == (360, 8, 8, 1)
    assert (digits.num_classes, digits.shape) == (10, (8, 8, 1))
    assert digits.test_labels[:12].tolist() == load("digits").test_labels[:12].tolist()
    assert set(np.bincount(digits.test_labels)) <= {35, 36, 37}


def test_digits_use_the_full_range_of_grey(digits: Dataset) -> None:
    levels = np.unique(digits.train_images)
    assert digits.train_images.dtype == np.uint8
    assert (levels.min(), levels.max(), len(levels)) == (0, 255, 17)


def test_no_digit_is_in_both_parts(digits: Dataset) -> None:
    train = {image.tobytes() for image in digits.train_images}
    assert not train & {image.tobytes() for image in digits.test_images}
    assert len(train) == 1437


def test_digits_without_scikit_learn_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InvalidInputError, match="pip install scikit-learn"):
        load("digits")


def test_the_chosen_folder_comes_before_the_cache(empty_folders: Path) -> None:
    chosen, cache = empty_folders / "chosen", empty_folders / "cache" / "fastfedul"
    assert data_folders() == (chosen, cache)
    cache.mkdir(parents=True)
    (cache / "mnist.npz").touch()
    assert locate(SOURCES["mnist"]) == cache / "mnist.npz"
    chosen.mkdir()
    (chosen / "mnist.npz").touch()
    assert locate(SOURCES["mnist"]) == chosen / "mnist.npz"


def test_without_a_chosen_folder_the_cache_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FASTFEDUL_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert data_folders() == (Path("/home/somebody/.cache/fastfedul"),)


@pytest.mark.parametrize("name", sorted(set(SOURCES) - {"digits", "southwest"}))
def test_a_missing_file_says_what_to_put_where(empty_folders: Path, name: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        load(name)
    text = str(caught.value)
    assert f"put {SOURCES[name].file} with the arrays" in text
    assert str(empty_folders / "chosen") in text
    assert ("data fetch" in text) == SOURCES[name].fetchable


def test_pictures_without_labels_are_no_data_set() -> None:
    with pytest.raises(InvalidInputError, match="no labels"):
        load("southwest")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match="digits, mnist, cifar10"):
        find_source("imagenet")


def test_a_file_of_the_users_own_is_never_taken_for_a_named_set(
    tmp_path: Path,
) -> None:
    images = np.zeros((4, 8, 8), np.uint8)
    path = tmp_path / "mnist.npz"
    np.savez(path, x_train=images, y_train=np.arange(4), x_test=images, y_test=[0] * 4)
    assert load(str(path)).name == "mnist.npz"
    assert load(path).num_classes == 4


def test_mnist_is_mnist(data_file: Callable[[str], Path]) -> None:
    data_file("mnist.npz")
    dataset = load("mnist")
    assert dataset.train_images.shape == (60_000, 28, 28, 1)
    assert dataset.train_labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert round(float(dataset.train_images.mean()) / 255, 5) == 0.13066


def test_cifar10_is_cifar10(data_file: Callable[[str], Path]) -> None:
    data_file("cifar10.npz")
    dataset = load("cifar10")
    assert dataset.shape == (32, 32, 3)
    assert dataset.train_images[0, 0, 0].tolist() == [59, 62, 63]
    assert dataset.train_labels[:5].tolist() == [6, 9, 9, 4, 1]


def test_the_retina_subset_leaves_its_validation_part_out(
    data_file: Callable[[str], Path],
) -> None:
    data_file("oct_retina_subset.npz")
    dataset = load("oct-retina-subset")
    counts = np.bincount(dataset.train_labels).tolist()
    assert counts == [9859, 2961, 2151, 6747]
    assert np.bincount(dataset.test_labels).tolist() == [250] * 4
    assert dataset.train_labels.ndim == 1
