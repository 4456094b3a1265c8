"""Small pictures inside a page: PNG as a data address, no file beside it.

Portable Network Graphics (PNG) Specification, W3C.
"""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np

from fastfedul.report.content import Images

_COLOUR_TYPES = {1: 0, 3: 2}


def encode_png(image: Images) -> bytes:
    """Return a uint8 picture (height, width, 1 or 3 channels) as a PNG file.

    >>> encode_png(np.zeros((2, 2, 1), np.uint8))[1:4]
    b'PNG'
    """
    height, width, channels = image.shape
    form = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    unfiltered = np.zeros((height, 1), np.uint8)
    lines = np.hstack([unfiltered, image.reshape(height, width * channels)])
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", form)
        + _chunk(b"IDAT", zlib.compress(lines.tobytes(), 9))
        + _chunk(b"IEND", b"")
    )


def png_address(image: Images) -> str:
    """Return a picture as a `data:` address for an `img` element."""
    return "data:image/png;base64," + base64.b64encode(encode_png(image)).decode()


def _chunk(kind: bytes, content: bytes) -> bytes:
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)
