"""Files that hold their old content or their new content, never a part of it.

And reading that neither waits nor fills the memory, whatever lies at a path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

_PIECE = 1 << 20

MOST_BYTES = 64 << 20
"""Largest size of the files beside a ledger that hold no arrays."""

SPECIAL = frozenset({errno.EINVAL, errno.ELOOP, errno.ENXIO, errno.EFBIG})
"""Error numbers by which `read_regular` says that a path has no such file."""


def open_regular(path: Path, *, follow: bool = True) -> BinaryIO:
    """Return a regular file that is open for reading.

    Raises:
        OSError: See `regular_descriptor`.
    """
    return os.fdopen(regular_descriptor(path, follow=follow), "rb")


def regular_descriptor(path: Path, *, follow: bool = True) -> int:
    """Return the descriptor of a regular file that is open for reading.

    Opening a FIFO would wait for its other end, and a device may have no end.

    Args:
        path: The file.
        follow: Whether the file may be a symbolic link.

    Raises:
        OSError: If the path has no regular file, or it cannot be opened.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return descriptor


def read_regular(
    path: Path, most_bytes: int = MOST_BYTES, *, follow: bool = True
) -> bytes:
    """Return the content of a regular file that has at most some bytes.

    Raises:
        OSError: If the path has no regular file, or it is larger or cannot be read.
    """
    content = bytearray()
    with open_regular(path, follow=follow) as file:
        while piece := file.read(min(_PIECE, most_bytes + 1 - len(content))):
            content += piece
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
    return bytes(content)


def read_regular_text(path: Path, errors: str = "strict") -> str:
    """Return the text of a small regular file in UTF-8.

    Raises:
        OSError: See `read_regular`.
        UnicodeDecodeError: If it is not UTF-8, unless `errors` says otherwise.
    """
    return read_regular(path).decode("utf-8", errors)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder, and the missing folders above it, if they are not there.

    Raises:
        OSError: If one cannot be made.
    """
    for folder in [each for each in (path, *path.parents) if not each.exists()][::-1]:
        folder.mkdir(mode, exist_ok=True)
        _give_away(folder, folder.parent)


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
    remove_leftovers(path.parent, path.name)
    temporary = _temporary(path, os.getpid())
    try:
        with temporary.open("wb") as file:
            _give_away(file.fileno(), path.parent)
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
    first instant, and nobody waits for anybody. A process that is killed here leaves a
    file under a name that may never come again: see `remove_leftovers`.

    Raises:
        OSError: If the file cannot be written.
    """
    with _one_at_a_time:
        temporary = _temporary(path, os.getpid())
        try:
            descriptor = open_private(
                str(temporary), os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            )
            with os.fdopen(descriptor, "wb") as file:
                _give_away(descriptor, path.parent)
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


def _give_away(new: Path | int, folder: Path) -> None:
    """Give what root makes to the owner of its folder, who must be able to use it."""
    if os.geteuid() == 0:
        owner = folder.stat()
        # A file server may not let root give files away; they are not root's there.
        with contextlib.suppress(PermissionError):
            os.chown(new, owner.st_uid, owner.st_gid)


_one_at_a_time = threading.Lock()
"""Threads of a process share the names of its temporary files."""


def _temporary(path: Path, process: int) -> Path:
    return path.with_name(f".{path.name}.new-{process}")


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove what killed processes left when they wrote files of a folder.

    Args:
        folder: The folder; it need not be there.
        name: The file that they wrote; None for any.
    """
    start = "." if name is None else _temporary(folder / name, 0).name[:-1]
    with contextlib.suppress(OSError):
        for found in folder.iterdir():
            written, _, process = found.name.rpartition(".new-")
            ours = written and found.name.startswith(start) and process.isdecimal()
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
