import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastfedul.data.dataset import to_model_input
from fastfedul.data.npz import (
    UNWANTED,
    read_dataset,
    read_own_images,
    read_owners,
    read_pictures,
    write_arrays,
)
from fastfedul.data.partition import split_by_owner
from fastfedul.errors import InvalidInputError

law = settings(max_examples=100, deadline=None)

MEDMNIST = {
    "x_train": "train_images",
    "y_train": "train_labels",
    "x_test": "test_images",
    "y_test": "test_labels",
}


def good() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "x_train": rng.integers(0, 256, (6, 4, 5), dtype=np.uint8),
        "y_train": np.array([0, 1, 2, 0, 1, 2], np.uint8),
        "x_test": rng.integers(0, 256, (3, 4, 5), dtype=np.uint8),
        "y_test": np.array([0, 1, 2], np.uint8),
    }


def saved(folder: Path, **changes: Any) -> Path:
    """A good file but for the changes; None leaves the array out."""
    arrays = good() | changes
    path = folder / "own.npz"
    np.savez(path, **{key: v for key, v in arrays.items() if v is not None})
    return path


def refusal(path: Path) -> str:
    """The one line with which a file is refused."""
    with pytest.raises(InvalidInputError) as caught:
        read_dataset(path, "own")
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text
    return text


def test_mnists_keys_are_read(tmp_path: Path) -> None:
    dataset = read_dataset(saved(tmp_path), "own")
    assert (dataset.name, dataset.num_classes) == ("own", 3)
    assert dataset.shape == (4, 5, 1)
    np.testing.assert_array_equal(dataset.train_images[..., 0], good()["x_train"])
    assert dataset.train_labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert dataset.test_labels.dtype == np.int64


def test_medmnists_keys_and_label_columns_are_read(tmp_path: Path) -> None:
    arrays = {MEDMNIST[key]: value for key, value in good().items()}
    arrays["val_images"] = np.zeros((2, 4, 5), np.uint8)
    arrays["val_labels"] = np.zeros((2, 1), np.uint8)
    arrays["train_labels"] = arrays["train_labels"][:, None]
    np.savez_compressed(tmp_path / "med.npz", **arrays)
    dataset = read_dataset(tmp_path / "med.npz", "own")
    assert dataset.train_labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert len(dataset.train_images) == 6


def test_colours_are_kept(tmp_path: Path) -> None:
    colours = np.arange(6 * 4 * 5 * 3).reshape(6, 4, 5, 3).astype(np.uint8)
    path = saved(tmp_path, x_train=colours, x_test=colours[:3])
    dataset = read_dataset(path, "own")
    assert dataset.shape == (4, 5, 3)
    np.testing.assert_array_equal(dataset.train_images, colours)


def test_fractions_become_grey_levels(tmp_path: Path) -> None:
    whole = good()
    path = saved(tmp_path, x_train=whole["x_train"] / 255, x_test=whole["x_test"] / 255)
    dataset = read_dataset(path, "own")
    np.testing.assert_array_equal(dataset.train_images[..., 0], whole["x_train"])
    np.testing.assert_array_equal(dataset.test_images[..., 0], whole["x_test"])


def test_dark_whole_numbers_are_not_taken_for_fractions(tmp_path: Path) -> None:
    dark = good()["x_train"] // 128
    path = saved(tmp_path, x_train=dark.astype(np.int64))
    np.testing.assert_array_equal(read_dataset(path, "own").train_images[..., 0], dark)


MIXED: dict[str, tuple[Any, Any]] = {
    "x_train as float64 from 0 to 1 but x_test as uint8 from 0 to 255": (
        np.linspace(0, 1, 120),
        np.linspace(0, 255, 60).astype(np.uint8),
    ),
    "x_train as bool from 0 to 1 but x_test as uint8": (
        np.arange(120) % 2 == 1,
        np.linspace(0, 255, 60).astype(np.uint8),
    ),
    "x_train as uint8 from 0 to 255 but x_test as float32 from 0 to 1": (
        np.linspace(0, 255, 120).astype(np.uint8),
        np.linspace(0, 1, 60, dtype=np.float32),
    ),
    "x_train as float64 from 0 to 255 but x_test as float64 from 0 to 0.5": (
        np.linspace(0, 255, 120),
        np.linspace(0, 0.5, 60),
    ),
}


@pytest.mark.parametrize("reason", MIXED)
def test_parts_of_different_scales_are_refused(tmp_path: Path, reason: str) -> None:
    train, test = MIXED[reason]
    path = saved(tmp_path, x_train=train.reshape(6, 4, 5), x_test=test.reshape(3, 4, 5))
    text = refusal(path)
    assert reason in text
    assert "one scale, such as uint8, 0 to 255" in text


@pytest.mark.parametrize("brightest", [1, 255])
def test_a_black_part_goes_with_any_scale(tmp_path: Path, brightest: int) -> None:
    bright = np.linspace(0, brightest, 120).reshape(6, 4, 5)
    path = saved(tmp_path, x_train=bright, x_test=np.zeros((3, 4, 5)))
    dataset = read_dataset(path, "own")
    assert dataset.train_images.max() == 255
    assert dataset.test_images.max() == 0


def test_whole_labels_stored_as_fractions_are_accepted(tmp_path: Path) -> None:
    path = saved(tmp_path, y_test=np.array([0.0, 1.0, 2.0]))
    assert read_dataset(path, "own").test_labels.tolist() == [0, 1, 2]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "no file" in refusal(tmp_path / "nowhere.npz")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x80\x04N.", bytes(5000)])
def test_what_is_no_zip_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "own.npz"
    path.write_bytes(content)
    assert "not an .npz file" in refusal(path)


def test_a_single_array_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    assert "single array" in refusal(path)


@law
@given(keep=st.floats(0.02, 0.98))
def test_a_truncated_file_is_refused(
    tmp_path_factory: pytest.TempPathFactory, keep: float
) -> None:
    path = saved(tmp_path_factory.mktemp("cut"))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    assert "damaged" in refusal(path)


def test_a_flipped_byte_in_an_image_is_found(tmp_path: Path) -> None:
    path = saved(tmp_path)
    content = bytearray(path.read_bytes())
    content[content.index(good()["x_train"].tobytes()) + 7] ^= 1
    path.write_bytes(content)
    assert "damaged" in refusal(path)


def test_objects_are_never_loaded(tmp_path: Path) -> None:
    path = saved(tmp_path, y_train=np.array([{}, 1, 2, 3, 4, 5], object))
    assert "Python objects" in refusal(path)


def test_other_keys_are_refused_with_what_was_found(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    np.savez(path, images=np.zeros(2), labels=np.zeros(2))
    text = refusal(path)
    assert "images, labels" in text
    assert "x_train, y_train, x_test, y_test or train_images" in text


def test_optional_keys_are_told_apart_from_needed_ones(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    np.savez(path, pictures=np.zeros(2))
    with pytest.raises(InvalidInputError, match=r"x_val; unwanted is optional$"):
        read_own_images(path, UNWANTED)
    with pytest.raises(InvalidInputError) as caught:
        read_own_images(path)
    assert "images or val_images or x_val; labels or" in str(caught.value)
    with pytest.raises(InvalidInputError) as caught:
        read_own_images(tmp_path / "missing.npz")
    assert str(caught.value).endswith("missing.npz; check the path")


@pytest.mark.parametrize("key", ["x_train", "y_train", "x_test", "y_test"])
def test_a_missing_key_is_refused(tmp_path: Path, key: str) -> None:
    assert "needs x_train" in refusal(saved(tmp_path, **{key: None}))


NONE = np.zeros((0, 4, 5), np.uint8)
CASES: dict[str, dict[str, Any]] = {
    "5 labels": {"y_train": np.zeros(5, np.uint8)},
    "3 examples under x_test but 4 labels": {"y_test": np.zeros(4, np.uint8)},
    "no example under x_train": {"x_train": NONE, "y_train": np.zeros(0, int)},
    "no example under x_test": {"x_test": NONE, "y_test": np.zeros(0, int)},
    "no example under x_train;": {"x_train": np.uint8(3)},
    "dtype complex128": {"x_train": np.zeros((6, 4, 5), complex)},
    "dtype <U1": {"x_train": np.full((6, 4, 5), "a")},
    "NaN": {"x_train": np.full((6, 4, 5), np.nan)},
    "NaN or infinite": {"x_test": np.full((3, 4, 5), np.inf)},
    "values -1 to": {"x_train": np.full((6, 4, 5), -1)},
    "to 256": {"x_train": np.full((6, 4, 5), 256)},
    "shape (6, 20)": {"x_train": np.zeros((6, 20), np.uint8)},
    "label 3 in y_test but not in y_train": {"y_test": np.array([0, 3, 1])},
    "shape (6, 3, 8, 8)": {"x_train": np.zeros((6, 3, 8, 8), np.uint8)},
    "one size": {"x_test": np.zeros((3, 5, 4), np.uint8)},
    "not whole numbers": {"y_train": np.array([0, 1, 0.5, 1, 1, 1])},
    "in y_test that are not whole": {"y_test": np.array([0, np.nan, 1])},
    "y_train that are not whole": {"y_train": np.array(list("abcdef"))},
    "labels -1 to 2": {"y_train": np.array([-1, 0, 1, 2, 0, 1])},
    "one label": {"y_train": np.zeros((6, 14), np.uint8)},
    "label of 10000": {"y_test": np.array([0, 1, 10_000])},
}


@pytest.mark.parametrize("reason", CASES)
def test_unusable_arrays_are_refused_with_the_reason(
    tmp_path: Path, reason: str
) -> None:
    assert reason in refusal(saved(tmp_path, **CASES[reason]))


def rows(kind: type, width: int = 7) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "x_train": rng.normal(0, 50, (6, width)).astype(kind),
        "x_test": rng.normal(0, 50, (3, width)).astype(kind),
    }


@pytest.mark.parametrize(
    ("kind", "kept"),
    [(np.float64, np.float32), (np.float16, np.float32), (np.int32, np.int64)],
)
def test_two_dimensions_are_rows_of_features_or_tokens(
    kind: type, kept: type, tmp_path: Path
) -> None:
    given = rows(kind)
    dataset = read_dataset(saved(tmp_path, **given), "own")
    assert dataset.shape == (7,)
    assert not dataset.is_images
    assert dataset.train_images.dtype == dataset.test_images.dtype == kept
    np.testing.assert_array_equal(dataset.train_images, given["x_train"].astype(kept))
    seen = to_model_input(dataset.test_images)
    np.testing.assert_array_equal(seen, given["x_test"].astype(kept))


BAD_ROWS: dict[str, dict[str, Any]] = {
    "7 values a row in x_train and 8 in x_test": {
        **rows(float),
        "x_test": rows(float, 8)["x_test"],
    },
    "both fractions, or both whole numbers": {
        **rows(float),
        "x_test": rows(int)["x_test"],
    },
    "NaN or infinite values in x_test": {
        **rows(float),
        "x_test": np.full((3, 7), 1e300),
    },
    "dtype <U1; rows are numbers": {**rows(float), "x_train": np.full((6, 7), "a")},
}


@pytest.mark.parametrize("reason", BAD_ROWS)
def test_unusable_rows_are_refused_with_the_reason(tmp_path: Path, reason: str) -> None:
    assert reason in refusal(saved(tmp_path, **BAD_ROWS[reason]))


@pytest.mark.parametrize(
    ("owners", "names"),
    [
        (["b", "a", "b", "a", "c", "c"], ("a", "b", "c")),
        ([10, 2, 10, 2, 9, 9], ("2", "9", "10")),
        (["10", "x", "9", "x", "9", "x"], ("9", "10", "x")),
    ],
)
def test_a_file_may_name_the_client_of_each_example(
    owners: list[Any], names: tuple[str, ...], tmp_path: Path
) -> None:
    path = saved(tmp_path, clients=np.array(owners))
    assert read_owners(path) == names
    dataset = read_dataset(path, "own")
    clients = split_by_owner(dataset)
    assert tuple(data.client for data in clients) == names
    for data in clients:
        places = [i for i, owner in enumerate(owners) if str(owner) == data.client]
        np.testing.assert_array_equal(data.images, dataset.train_images[places])
        np.testing.assert_array_equal(data.labels, dataset.train_labels[places])
    assert read_owners(saved(tmp_path)) is None


BAD_OWNERS: dict[str, Any] = {
    "shape (5,) for 6 training examples": np.zeros(5, int),
    "shape (6, 1) for": np.zeros((6, 1), int),
    "as float64": np.zeros(6),
    "as bool": np.zeros(6, bool),
    "an empty name": np.array(["a", "b", "", "a", "b", "c"]),
    "Python objects": np.array(["a", None, "b", "c", "d", "e"], object),
}


@pytest.mark.parametrize("reason", BAD_OWNERS)
def test_unusable_names_of_clients_are_refused(tmp_path: Path, reason: str) -> None:
    path = saved(tmp_path, clients=BAD_OWNERS[reason])
    assert reason in refusal(path)
    with pytest.raises(InvalidInputError, match=re.escape(reason)):
        read_owners(path)


def test_pictures_need_no_labels(tmp_path: Path) -> None:
    path = tmp_path / "pictures.npz"
    pictures = np.zeros((4, 8, 8, 3), np.uint8)
    np.savez(path, x_train=pictures, x_test=pictures[:1])
    train, test = read_pictures(path)
    assert (train.shape, test.shape) == ((4, 8, 8, 3), (1, 8, 8, 3))


@pytest.mark.parametrize("compress", [True, False])
def test_written_arrays_read_back_the_same(tmp_path: Path, compress: bool) -> None:
    path = tmp_path / "odd.name"
    write_arrays(path, good(), compress=compress)
    assert [entry.name for entry in tmp_path.iterdir()] == ["odd.name"]
    images = read_dataset(path, "own").train_images
    np.testing.assert_array_equal(images[..., 0], good()["x_train"])
