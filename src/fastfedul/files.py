"""Text files that a crash leaves whole: the new text or the old one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that after a crash it has the new text or the old one.

    Raises:
        OSError: If the text cannot be written; the old file stays.
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
