"""Files that hold their old content or their new content, never a part of it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file; when this returns, it survives power loss.

    Raises:
        OSError: If the file cannot be written; the old file is still there then.
    """
    with placed(path, [text.encode("utf-8")]):
        pass


@contextlib.contextmanager
def placed(path: Path, pieces: Iterable[bytes | memoryview]) -> Iterator[None]:
    """Write a file beside its place, and move it there when the block succeeds.

    So a full disk shows before the block does anything.

    Args:
        path: The place of the file; a file that is there gives way.
        pieces: The content.

    Raises:
        OSError: If the file cannot be written, or cannot be moved.
    """
    _remove_leftovers(path)
    temporary = _temporary(path, os.getpid())
    try:
        with temporary.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        yield
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def place_new(path: Path, content: bytes) -> bool:
    """Return whether a new file got this name; if so, it survives power loss.

    Of several processes only one gets the name. The file has all its content from the
    first instant, and nobody waits for anybody.

    Raises:
        OSError: If the file cannot be written.
    """
    with _one_at_a_time:
        _remove_leftovers(path)
        temporary = _temporary(path, os.getpid())
        try:
            descriptor = open_private(
                str(temporary), os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            )
            with os.fdopen(descriptor, "wb") as file:
                if os.geteuid() == 0:
                    # Whoever owns the folder must be able to read the file.
                    folder = path.parent.stat()
                    os.fchown(descriptor, folder.st_uid, folder.st_gid)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            sync_folder(path.parent)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
    return True


def open_private(path: str, flags: int) -> int:
    """Return the descriptor of a file that only its owner may read, if it is new."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def sync_folder(folder: Path) -> None:
    """Make new, renamed and removed files of a folder survive power loss."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_one_at_a_time = threading.Lock()
"""Threads of a process share the names of its temporary files."""


def _temporary(path: Path, process: int) -> Path:
    return path.with_name(f".{path.name}.new-{process}")


def _remove_leftovers(path: Path) -> None:
    """Remove what killed processes left when they wrote this file."""
    start = _temporary(path, 0).name.removesuffix("0")
    with contextlib.suppress(OSError):
        for found in path.parent.iterdir():
            process = found.name.removeprefix(start)
            ours = found.name.startswith(start) and process.isdecimal()
            if ours and not _is_running(int(process)):
                found.unlink()


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass  # It runs for somebody else.
    return True
