"""Pictures are real PNG files."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
import pytest

from fastfedul.report.pictures import encode_png, png_address


def chunks(content: bytes) -> dict[bytes, bytes]:
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    found, place = {}, 8
    while place < len(content):
        length, kind = struct.unpack_from(">I4s", content, place)
        body = content[place + 8 : place + 8 + length]
        (check,) = struct.unpack_from(">I", content, place + 8 + length)
        assert check == zlib.crc32(kind + body)
        found[kind] = body
        place += 12 + length
    return found


@pytest.mark.parametrize(("channels", "colour_type"), [(1, 0), (3, 2)])
def test_every_byte_of_the_picture_is_in_the_file(
    channels: int, colour_type: int
) -> None:
    image = np.arange(5 * 7 * channels, dtype=np.uint8).reshape(5, 7, channels)
    found = chunks(encode_png(image))
    assert list(found) == [b"IHDR", b"IDAT", b"IEND"]
    assert struct.unpack(">IIBBBBB", found[b"IHDR"])[:4] == (7, 5, 8, colour_type)
    lines = np.frombuffer(zlib.decompress(found[b"IDAT"]), np.uint8).reshape(5, -1)
    assert not lines[:, 0].any()
    np.testing.assert_array_equal(lines[:, 1:].reshape(image.shape), image)


def test_an_address_holds_the_whole_file() -> None:
    image = np.full((2, 2, 1), 9, np.uint8)
    kind, content = png_address(image).split(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(content) == encode_png(image)
