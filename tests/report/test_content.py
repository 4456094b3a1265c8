"""Records of a report refuse what could not be drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastfedul.errors import InvalidInputError
from fastfedul.report.content import Contributions, ExampleImages, Row, find_row


@pytest.mark.parametrize("shape", [(2,), (1, 4), (3, 4), (2, 4, 1)])
def test_contributions_need_one_row_per_client(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInputError, match="2 clients need one row each"):
        Contributions(("a", "b"), np.zeros(shape))


@pytest.mark.parametrize(
    "images",
    [
        np.zeros((1, 8, 8), np.uint8),
        np.zeros((1, 8, 8, 2), np.uint8),
        np.zeros((1, 8, 8, 1), np.float32),
        np.zeros((1, 0, 8, 1), np.uint8),
        np.zeros((2, 8, 8, 1), np.uint8),
    ],
)
def test_example_images_are_bytes_with_a_caption_each(images: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        ExampleImages(images, ("one",))
    assert "\n" not in str(caught.value)


def test_a_row_is_found_by_its_method() -> None:
    rows = (
        Row("before", 0.5, (1, 2), (0.1, 0.9)),
        Row("retrained", 1, (2, 2), (0.3, 1)),
    )
    assert find_row(rows, "retrained") is rows[1]
    assert find_row(rows, "other") is None
