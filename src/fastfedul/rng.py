"""Random numbers: named streams that never influence each other."""

import zlib

import numpy as np


def stream(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """Return the generator for one purpose, independent of all the others.

    Args:
        seed: The seed of the whole run.
        purpose: What the numbers are for; another purpose gives another stream.
        key: Whole numbers that tell apart streams of one purpose, such as a round.

    >>> bool(stream(1, "keep", 2).random() == stream(1, "keep", 2).random())
    True
    >>> bool(stream(1, "keep", 2).random() == stream(1, "keep", 2, 0).random())
    False
    """
    spawn_key = (zlib.crc32(purpose.encode()), *key)
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=spawn_key))


def name_key(name: str) -> int:
    """Return a whole number for a name, so that streams can be keyed by client."""
    return zlib.crc32(name.encode("utf-8", "surrogatepass"))
