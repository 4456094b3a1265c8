"""Arrays that several processes see, in memory that has no name.

The memory belongs to an open file that is in no folder. Processes get the descriptor of
the file. The system frees the memory when the last process ends, even after a crash.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastfedul.errors import FastFedULError
from fastfedul.limits import machine_memory
from fastfedul.params import Array

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """Shape and dtype of one array."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, array: Array) -> ArrayShape:
        """Return shape and dtype of an array."""
        return cls(array.shape, array.dtype.str)

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def create(shapes: Sequence[ArrayShape]) -> int:
    """Return the descriptor of new memory for arrays of these shapes, all zero.

    Raises:
        FastFedULError: If there is not enough memory.
    """
    size = _size(shapes)
    if size > machine_memory():
        # Asking for it would not fail: the system would end processes to make room.
        raise _refusal(size, "the machine has less")
    descriptor = _open_unnamed()
    try:
        os.ftruncate(descriptor, size)
        # The process takes the memory now: running out later would end it at once.
        with contextlib.suppress(AttributeError):
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.close(descriptor)
        raise _refusal(size, str(error.strerror)) from None
    return descriptor


def arrays_in(descriptor: int, shapes: Sequence[ArrayShape]) -> list[Array]:
    """Return the arrays in shared memory; the caller may close the descriptor."""
    memory = mmap.mmap(descriptor, _size(shapes))
    found, start = [], 0
    for shape in shapes:
        count = math.prod(shape.shape)
        flat = np.frombuffer(memory, np.dtype(shape.dtype), count, start)
        found.append(flat.reshape(shape.shape))
        start += _padded(shape)
    return found


def _size(shapes: Sequence[ArrayShape]) -> int:
    return max(1, sum(_padded(shape) for shape in shapes))


def _refusal(size: int, reason: str) -> FastFedULError:
    return FastFedULError(
        f"{size / 2**20:.0f} MiB of shared memory are not available: {reason}; "
        "use one worker, fewer images or a smaller model"
    )


def _padded(shape: ArrayShape) -> int:
    return -(-shape.num_bytes // _ALIGNMENT) * _ALIGNMENT


def _open_unnamed() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fastfedul", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
