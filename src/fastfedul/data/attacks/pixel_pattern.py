"""The pixel pattern of a distributed backdoor: four bright segments at the top left.

Xie et al., "DBA: Distributed Backdoor Attacks against Federated Learning", ICLR 2020.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastfedul.data.dataset import Images
from fastfedul.errors import InvalidInputError

NUM_PARTS = 4
BRIGHT = 255


@dataclass(frozen=True, slots=True)
class Segment:
    """Pixels next to each other in one row: `row`, columns `start` to `end` - 1."""

    row: int
    start: int
    end: int


def segments(height: int, width: int) -> tuple[Segment, ...]:
    """Return the four parts of the pattern: upper left and right, lower left and right.

    28x28 as in DBA's MNIST runs: 1x4 pixels in rows 0 and 3, columns 0-3 and 6-9.
    32x32 as in its CIFAR-10 runs: 1x6 pixels in rows 0 and 4, columns 0-5 and 9-14.
    Any other size: the 28x28 pattern scaled to it, with segments of two pixels or more
    and gaps of one or more; 8x8 has 1x2 pixels in rows 0 and 2, columns 0-1 and 3-4.

    >>> segments(8, 8)[3]
    Segment(row=2, start=3, end=5)
    """
    if (height, width) == (32, 32):
        length, gap, below = 6, 3, 4
    else:
        length = max(2, round(width * 4 / 28))
        gap = max(1, round(width * 2 / 28))
        below = max(2, round(height * 3 / 28))
    if 2 * length + gap > width or below >= height:
        raise InvalidInputError(
            f"images of {height} x {width} pixels are too small for the pixel pattern; "
            "use 3 x 5 or larger"
        )
    second = length + gap
    return tuple(
        Segment(row, start, start + length)
        for row in (0, below)
        for start in (0, second)
    )


def stamp(images: Images, part: int | None = None) -> Images:
    """Return copies with the pattern, or one part of it, in full brightness.

    Args:
        images: Shaped (number, height, width, channels); all channels are set.
        part: 0 to 3 in the order of `segments`; None for the whole pattern.
    """
    parts = segments(images.shape[1], images.shape[2])
    stamped = images.copy()
    for segment in parts if part is None else (parts[part],):
        stamped[:, segment.row, segment.start : segment.end] = BRIGHT
    return stamped
