import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastfedul.data.attacks.pixel_pattern import NUM_PARTS, segments, stamp
from fastfedul.data.dataset import Images
from fastfedul.errors import InvalidInputError

law = settings(max_examples=100, deadline=None)

# Written down from the paper's figure and settings, not from the code.
BY_HAND = {
    (28, 28): [
        {(0, 0), (0, 1), (0, 2), (0, 3)},
        {(0, 6), (0, 7), (0, 8), (0, 9)},
        {(3, 0), (3, 1), (3, 2), (3, 3)},
        {(3, 6), (3, 7), (3, 8), (3, 9)},
    ],
    (32, 32): [
        {(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5)},
        {(0, 9), (0, 10), (0, 11), (0, 12), (0, 13), (0, 14)},
        {(4, 0), (4, 1), (4, 2), (4, 3), (4, 4), (4, 5)},
        {(4, 9), (4, 10), (4, 11), (4, 12), (4, 13), (4, 14)},
    ],
    (8, 8): [
        {(0, 0), (0, 1)},
        {(0, 3), (0, 4)},
        {(2, 0), (2, 1)},
        {(2, 3), (2, 4)},
    ],
}


def black(shape: tuple[int, int], channels: int = 1) -> Images:
    return np.zeros((2, *shape, channels), np.uint8)


def lit(image: Images) -> set[tuple[int, int]]:
    return {(int(row), int(column)) for row, column in np.argwhere(image[..., 0])}


@pytest.mark.parametrize("shape", BY_HAND)
@pytest.mark.parametrize("part", range(4))
def test_each_part_lights_the_pixels_of_the_paper(
    shape: tuple[int, int], part: int
) -> None:
    assert lit(stamp(black(shape), part)[1]) == BY_HAND[shape][part]


@pytest.mark.parametrize("shape", BY_HAND)
def test_the_whole_pattern_is_the_union_of_its_parts(shape: tuple[int, int]) -> None:
    assert lit(stamp(black(shape))[0]) == set().union(*BY_HAND[shape])


def test_all_channels_are_as_bright_as_can_be_and_nothing_else_changes() -> None:
    images = np.full((3, 32, 32, 3), 100, np.uint8)
    stamped = stamp(images)
    changed = (stamped != images).any(axis=3)
    assert changed.sum() == 3 * 24
    assert (stamped[changed] == 255).all()
    assert (images == 100).all()


@law
@given(height=st.integers(3, 300), width=st.integers(5, 300))
def test_every_size_has_four_parts_that_lie_apart(height: int, width: int) -> None:
    parts = segments(height, width)
    assert len(parts) == NUM_PARTS
    upper_left, upper_right, lower_left, lower_right = parts
    assert (
        upper_left.start == lower_left.start == upper_left.row == upper_right.row == 0
    )
    assert upper_left.end < upper_right.start < upper_right.end <= width
    assert 1 < lower_left.row == lower_right.row < height
    assert lower_right.start == upper_right.start


@pytest.mark.parametrize("shape", [(2, 8), (8, 4), (1, 1)])
def test_images_too_small_for_the_pattern_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(InvalidInputError, match="too small"):
        segments(*shape)
