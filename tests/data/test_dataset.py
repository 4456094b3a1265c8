from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastfedul.data.dataset import (
    Dataset,
    Images,
    choose,
    set_aside,
    subset,
    to_model_input,
)
from fastfedul.errors import InvalidInputError
from fastfedul.rng import stream

law = settings(max_examples=100, deadline=None)


def numbered(num_train: int, num_classes: int = 3) -> Dataset:
    """A data set whose images show their own number."""
    number = np.arange(num_train)
    images = np.zeros((num_train, 2, 2, 1), np.uint8)
    images[:, 0, 0, 0], images[:, 0, 1, 0] = number % 256, number // 256
    labels = number % num_classes
    test = images[:num_classes]
    return Dataset(
        "numbered", images, labels, test, labels[:num_classes], num_classes, (2, 2, 1)
    )


def numbers(images: Images) -> list[int]:
    low, high = images[:, 0, 0, 0].astype(int), images[:, 0, 1, 0].astype(int)
    return [int(number) for number in low + 256 * high]


def test_a_model_sees_black_as_minus_one_and_white_as_one() -> None:
    images = np.array([[[[0]], [[255]]], [[[51]], [[204]]]], np.uint8)
    seen = to_model_input(images)
    assert seen.dtype == np.float32
    expected = np.array([[-1, 1], [-0.6, 0.6]])
    np.testing.assert_allclose(seen[:, 0, :, 0], expected, atol=1e-6)


def test_a_model_sees_channels_before_height_and_width() -> None:
    images = np.zeros((5, 4, 3, 3), np.uint8)
    images[2, 1, 0, 2] = 255
    seen = to_model_input(images)
    assert seen.shape == (5, 3, 4, 3)
    assert np.argwhere(seen == 1).tolist() == [[2, 2, 1, 0]]
    assert seen.flags.c_contiguous


def test_the_transform_leaves_its_argument_alone() -> None:
    images = np.full((1, 2, 2, 1), 7, np.uint8)
    to_model_input(images)[:] = 0
    assert (images == 7).all()


def test_images_that_were_scaled_before_are_refused() -> None:
    scaled: Any = np.zeros((1, 2, 2, 1), np.float32)
    with pytest.raises(InvalidInputError, match="uint8"):
        to_model_input(scaled)


@law
@given(count=st.integers(0, 600), seed=st.integers(0, 2**32))
def test_set_aside_images_and_the_rest_are_the_whole(count: int, seed: int) -> None:
    whole = numbered(601)
    server, rest = set_aside(whole, count, seed)
    assert len(server.labels) == len(server.images) == count
    together = numbers(server.images) + numbers(rest.train_images)
    assert sorted(together) == list(range(601))


@law
@given(size=st.integers(1, 601), seed=st.integers(0, 2**32))
def test_a_subset_keeps_the_classes_in_proportion(size: int, seed: int) -> None:
    small = subset(numbered(601), size, seed)
    counts = np.bincount(small.train_labels, minlength=3)
    assert counts.sum() == size
    assert counts.max() - counts.min() <= 2
    assert len(set(numbers(small.train_images))) == size


def test_a_subset_of_everything_is_everything_in_order() -> None:
    whole = numbered(300)
    same = subset(whole, 300, seed=5)
    np.testing.assert_array_equal(same.train_images, whole.train_images)


def test_the_test_images_are_never_touched() -> None:
    whole = numbered(300)
    assert subset(whole, 10, 0).test_images is whole.test_images
    assert set_aside(whole, 10, 0)[1].test_images is whole.test_images


@pytest.mark.parametrize("size", [0, -1, 301])
def test_an_impossible_subset_is_refused(size: int) -> None:
    with pytest.raises(InvalidInputError, match="1 to 300"):
        subset(numbered(300), size, 0)


@pytest.mark.parametrize("count", [-1, 300, 301])
def test_setting_everything_aside_is_refused(count: int) -> None:
    with pytest.raises(InvalidInputError, match="0 to 299"):
        set_aside(numbered(300), count, 0)


def test_images_keep_their_labels() -> None:
    server, rest = set_aside(numbered(300), 50, 1)
    for images, labels in (server, rest.train):
        assert [number % 3 for number in numbers(images)] == labels.tolist()


def test_a_choice_is_a_function_of_the_stream() -> None:
    labels = np.arange(100) % 4
    first = choose(labels, 30, stream(1, "x"))
    np.testing.assert_array_equal(first, choose(labels, 30, stream(1, "x")))
    assert (first != choose(labels, 30, stream(2, "x"))).any()
    assert (np.diff(first) > 0).all()
