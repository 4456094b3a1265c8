"""Text files that are there whole, or as they were before."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from fastfedul.errors import InvalidInputError


def as_path(place: Path | str) -> Path:
    """Return a place of the file system, given as text or as a `Path`.

    Raises:
        InvalidInputError: If it is given as anything else.
    """
    if not isinstance(place, str | os.PathLike):
        raise InvalidInputError(f"a path is text or a Path, not {place!r:.60}")
    return Path(place)


def write_whole(path: Path, text: str) -> None:
    """Write a file beside its place and put it there when it is on the disk.

    Raises:
        OSError: If it cannot be written; the place is then as it was.
    """
    temporary = path.with_name(f".{path.name}.new-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
