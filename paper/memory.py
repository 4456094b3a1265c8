"""How much memory something takes, workers included, seen from the system."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SECONDS = 0.005


@dataclass(slots=True)
class Peak:
    """The most memory above the memory at the start; None if unknown."""

    num_bytes: int | None = None


@contextmanager
def watched() -> Iterator[Peak]:
    """Watch the memory of this process and its children for the time of a block.

    It looks every few milliseconds, so a peak that is shorter may be missed. What this
    process had freed is handed back first, else filling it again would not show.
    """
    peak = Peak()
    _hand_back()
    before = resident()
    if before is None:
        yield peak
        return
    peak.num_bytes = 0
    stop = threading.Event()

    def watch() -> None:
        while True:
            now = resident() or 0
            peak.num_bytes = max(peak.num_bytes or 0, now - before)
            if stop.wait(_SECONDS):
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def resident() -> int | None:
    """Return the resident bytes of this process and its children; None if unknown."""
    own = os.getpid()
    total = _resident_of(own)
    if total is None:
        return None
    for path in Path(f"/proc/{own}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:
            continue
        total += sum(_resident_of(int(child)) or 0 for child in children)
    return total


def _hand_back() -> None:
    """Let the C library give freed memory back to the system, where it can."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _resident_of(pid: int) -> int | None:
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
