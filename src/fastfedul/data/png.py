"""PNG pictures as arrays: just enough to read batches of photographs.

Portable Network Graphics (PNG) Specification, W3C, section 9: filtering.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

from fastfedul.data.dataset import Images
from fastfedul.errors import InvalidInputError

_CHANNELS = {0: 1, 2: 3}


def decode_png(content: bytes) -> Images:
    """Return a PNG picture as (height, width, channels).

    Raises:
        InvalidInputError: If it is not an 8-bit grey or RGB picture, or damaged.
    """
    try:
        chunks = _read_chunks(content)
        width, height, *form = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
        if form not in ([8, 0, 0, 0, 0], [8, 2, 0, 0, 0]):
            raise InvalidInputError(
                "only 8-bit grey or RGB pictures without interlacing can be read"
            )
        channels = _CHANNELS[form[1]]
        flat = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8)
        rows = flat.reshape(height, 1 + width * channels)
    except (KeyError, ValueError, struct.error, zlib.error):
        raise InvalidInputError("the PNG picture is damaged; fetch it again") from None
    picture = np.zeros((height, width, channels), np.uint8)
    above = np.zeros((width, channels), np.uint8)
    for place, row in enumerate(rows):
        above = _unfilter(int(row[0]), row[1:].reshape(width, channels), above)
        picture[place] = above
    return picture


def _read_chunks(content: bytes) -> dict[bytes, bytes]:
    if content[:8] != b"\x89PNG\r\n\x1a\n":
        raise ValueError
    parts: dict[bytes, list[bytes]] = {}
    place = 8
    while place < len(content):
        length, kind = struct.unpack_from(">I4s", content, place)
        body = content[place + 8 : place + 8 + length]
        (check,) = struct.unpack_from(">I", content, place + 8 + length)
        if zlib.crc32(body, zlib.crc32(kind)) != check:
            raise ValueError
        parts.setdefault(kind, []).append(body)
        place += 12 + length
    return {kind: b"".join(pieces) for kind, pieces in parts.items()}


def _unfilter(kind: int, row: Images, above: Images) -> Images:
    if kind == 0:
        return row
    if kind == 1:
        return np.cumsum(row, axis=0, dtype=np.uint8)
    if kind == 2:
        return row + above
    if kind not in (3, 4):
        raise InvalidInputError("the PNG picture is damaged; fetch it again")
    columns = [
        _unfilter_channel(kind, row[:, channel].tolist(), above[:, channel].tolist())
        for channel in range(row.shape[1])
    ]
    return np.array(columns, np.uint8).T


def _unfilter_channel(kind: int, row: list[int], above: list[int]) -> list[int]:
    """Undo filter 3 or 4, where each value needs the one before it."""
    left = corner = 0
    values = []
    for value, up in zip(row, above, strict=True):
        guess = (left + up) // 2 if kind == 3 else _paeth(left, up, corner)
        left = (value + guess) % 256
        corner = up
        values.append(left)
    return values


def _paeth(left: int, up: int, corner: int) -> int:
    """Return the neighbour nearest to left + up - corner; ties go in this order."""
    estimate = left + up - corner
    return min((left, up, corner), key=lambda neighbour: abs(estimate - neighbour))
