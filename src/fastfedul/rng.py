"""Random numbers: named streams that never influence each other."""

import zlib

import numpy as np


def stream(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """Return the generator of one purpose, independent of all others.

    Args:
        seed: The seed of the whole run.
        purpose: Name of the stream, such as `keep`.
        key: Whole numbers that tell streams of one purpose apart, such as a round.

    >>> bool(stream(1, "keep", 2).random() == stream(1, "keep", 2).random())
    True
    >>> bool(stream(1, "keep", 2).random() == stream(1, "keep", 2, 0).random())
    False
    """
    spawn_key = (zlib.crc32(purpose.encode()), *key)
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=spawn_key))


def name_key(name: str) -> int:
    """Return a whole number for a client's name, as a part of a stream's key."""
    return zlib.crc32(name.encode("utf-8", "surrogatepass"))
