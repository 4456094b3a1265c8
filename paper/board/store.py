"""The file of results: a line per row, sorted, and the runs that processes do now.

A run's lines are added all at once: the file is written anew and put in place whole.
Beside it lies a lock file. Its first byte is for writing, the others for one run each;
the system frees the locks of a process that dies.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

from fastfedul.errors import FastFedULError
from fastfedul.files import write_whole

Line = dict[str, Any]


class Run(Protocol):
    """A run of a list that was drawn before anything was scored."""

    @property
    def number(self) -> int:
        """Its place in the list, from 0."""

    @property
    def key(self) -> str:
        """Its name."""

    @property
    def seeds(self) -> range:
        """Its seeds, in the order in which they are tried."""

    @property
    def facts(self) -> dict[str, Any]:
        """All its choices, as JSON values."""


_NOT_CHOSEN = ("seed",)
"""Fields in which a result may differ from the list: a run takes one of its seeds."""


class Results:
    """Results in a file; any number of processes may work on it.

    A process must not open the same file twice: closing one would free the locks of
    the other.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._locks = os.open(lock_file(path), os.O_RDWR | os.O_CREAT, 0o644)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._locks)

    @contextmanager
    def claim(self, run: Run) -> Iterator[bool]:
        """Give whether this process may do the run now; nobody else can meanwhile."""
        try:
            fcntl.lockf(self._locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1 + run.number)
        except OSError:
            yield False
            return
        try:
            yield not is_done(run, read_lines(self._path))
        finally:
            fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, 1 + run.number)

    def append(self, lines: Sequence[Line]) -> None:
        """Add all lines of a run."""
        with self._writing():
            every = sorted([*read_lines(self._path), *lines], key=lambda at: at["key"])
            write_whole(self._path, "".join(_text(line) for line in every))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        fcntl.lockf(self._locks, fcntl.LOCK_EX, 1, 0)
        try:
            yield
        finally:
            fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, 0)


def lock_file(path: Path) -> Path:
    """Return the lock file of a file of results."""
    return path.with_name(f".{path.name}.lock")


def read_lines(path: Path) -> list[Line]:
    """Return all lines; none if there is no file.

    Raises:
        FastFedULError: If a line cannot be read.
    """
    if not path.exists():
        return []
    found = []
    for number, text in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            line: Line = json.loads(text)
            found.append({**line, "run": line["run"], "key": line["key"]})
        except (ValueError, KeyError, TypeError):
            raise FastFedULError(f"{path}, line {number}: cannot be read") from None
    return found


def is_done(run: Run, lines: Sequence[Line]) -> bool:
    """Return whether the lines have this run.

    Raises:
        FastFedULError: If they have another run under its name.
    """
    own = next((line for line in lines if line["run"] == run.key), None)
    if own is None:
        return False
    facts = {name: own.get(name) for name in run.facts}
    for name in _NOT_CHOSEN:
        facts[name] = run.facts[name]
    if facts != run.facts or own["seed"] not in run.seeds:
        raise FastFedULError(
            f"the results have another run under the name {run.key}; the list was "
            "changed after they were made"
        )
    return True


def _text(line: Line) -> str:
    return json.dumps(line, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
