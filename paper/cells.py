"""A cell of a table: one method on one run, and the files that keep the results."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from blake3 import blake3

from fastfedul.errors import FastFedULError
from fastfedul.files import write_whole
from fastfedul.runs.config import NUM_CLIENTS, RunConfig

BEFORE, RETRAINED = "before", "retrained"
FORMAT = 1
"""Raised when a change makes results that were kept wrong."""

_FIRST_OPTIONS = frozenset(
    (
        *("data", "train_size", "clients", "partition", "server_images", "rounds"),
        *("per_round", "weighting", "dropout", "epochs", "batch_size", "lr"),
        *("momentum", "weight_decay", "model", "attack", "attackers", "poison_ratio"),
        *("target_label", "attack_scale", "keep", "keep_use", "dtype", "budget"),
        *("federation", "forget", "seed", "workers"),
    )
)
"""Options of the time of the first results; any other is a fact only where it is set.

So an option that comes later leaves the stored results where they are.
"""

Kind = Literal["model", "iterations", "keeping"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One method on one run.

    Attributes:
        run: The options of the run.
        method: `before`, `retrained`, or the name of a method.
        settings: The method's settings where they are not the usual ones.
        kind: `model` measures the cleaned model; `iterations` measures the model after
            each round of the trace of the paper's method; `keeping` measures how
            likely optimal keeping keeps the attackers' updates.
        leavers: How many clients leave where nobody attacks.
    """

    run: RunConfig
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    kind: Kind = "model"
    leavers: int = 1

    @property
    def facts(self) -> dict[str, Any]:
        """Everything the result depends on, as JSON values."""
        return {
            "format": FORMAT,
            "run": run_facts(self.run),
            "method": self.method,
            "settings": dict(sorted(self.settings.items())),
            "kind": self.kind,
            **({"leavers": self.leavers} if self.leavers > 1 else {}),
        }

    @property
    def key(self) -> str:
        """The digest of the facts, by which the result is found."""
        return _digest(self.facts)


def run_facts(run: RunConfig) -> dict[str, Any]:
    """Return the options that decide how a run goes; not how many processes it has.

    The stored results are found by these facts, so the facts keep the names and the
    options of the time when the results were computed.
    """
    usual = RunConfig().to_options()
    options = {
        name: value
        for name, value in run.to_options().items()
        if name in _FIRST_OPTIONS or value != usual[name]
    }
    options["store"] = options.pop("dtype")
    options["clients"] = options["clients"] or NUM_CLIENTS
    options["partition"] = options["partition"] or "iid"
    options["forget"] = list(options["forget"])
    del options["workers"]
    return {name: value for name, value in options.items() if value is not None}


def run_key(run: RunConfig) -> str:
    """Return a name for a run's folder."""
    return _digest(run_facts(run))


LEDGER_SETTINGS = {"store": "float32", "history": "rounds"}
"""Settings of cells that are about the ledger, not the method, and the run's own."""


def without_ledger(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are about the method."""
    return {k: v for k, v in settings.items() if k not in LEDGER_SETTINGS}


Record = dict[str, Any]
"""A line of a file: a key, the facts of the cell and its result."""


class CellStore:
    """Results of cells in a folder: a file for each data set, a line for each cell.

    A result is on the disk when `write` returns. A process that is killed while it
    writes leaves at most a torn last line, which is ignored and overwritten. Several
    processes may write to one folder: each locks it for the moment of a change.
    """

    def __init__(self, folder: Path) -> None:
        """Open a folder of results; it need not be there yet."""
        self.folder = folder
        self._known: dict[Path, dict[str, Record]] = {}

    def read(self, cell: Cell) -> dict[str, Any] | None:
        """Return a result, or None if there was none when its file was opened.

        Raises:
            FastFedULError: If a line of the file is damaged.
        """
        record = self._opened(self.path(cell)).get(cell.key)
        if record is None:
            return None
        result: dict[str, Any] = record["result"]
        return result

    def write(self, cell: Cell, result: Mapping[str, Any]) -> None:
        """Append a result to the file of its data set."""
        path, record = self.path(cell), {"key": cell.key, **cell.facts}
        line = _to_line({**record, "result": result})
        known = self._opened(path)
        with self._changing(path):
            _append(path, line.encode("ascii"))
        known[cell.key] = json.loads(line)

    def sort(self) -> None:
        """Rewrite each file that was opened: sorted by key, every key once."""
        for path in self._known:
            if not path.is_file():
                continue
            with self._changing(path):
                # Another process may have appended lines since this one looked.
                records = _read(path)
                text = "".join(_to_line(records[key]) for key in sorted(records))
                if path.read_text("utf-8") != text:
                    write_whole(path, text)
            self._known[path] = records

    def path(self, cell: Cell) -> Path:
        """Return the file that keeps a cell's result."""
        return self.folder / f"{Path(cell.run.data.source).stem}.jsonl"

    def _opened(self, path: Path) -> dict[str, Record]:
        if path not in self._known:
            self._known[path] = _read(path)
        return self._known[path]

    @contextmanager
    def _changing(self, path: Path) -> Iterator[None]:
        """Lock the folder while one of its files is changed."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                os.close(descriptor)
        except OSError as error:
            reason = error.strerror or str(error)
            raise FastFedULError(f"cannot write {path}: {reason}") from None


def _read(path: Path) -> dict[str, Record]:
    """Return the records of a file by key; of two with one key the later one."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        reason = error.strerror or str(error)
        raise FastFedULError(f"cannot read {path}: {reason}") from None
    # After the last line break comes a torn line, or nothing.
    lines = content.split(b"\n")[:-1]
    return dict(_checked(path, number, line) for number, line in enumerate(lines, 1))


def _checked(path: Path, number: int, line: bytes) -> tuple[str, Record]:
    try:
        record = json.loads(line)
        facts = {k: v for k, v in record.items() if k not in ("key", "result")}
        if record["key"] == _digest(facts) and isinstance(record["result"], dict):
            return record["key"], record
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise FastFedULError(
        f"line {number} of {path} is damaged; delete the line to compute it again"
    )


def _append(path: Path, line: bytes) -> None:
    """Append a line by a single write, in place of a torn one if there is one."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.ftruncate(descriptor, os.pread(descriptor, size, 0).rfind(b"\n") + 1)
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _to_line(record: Mapping[str, Any]) -> str:
    return json.dumps(record) + "\n"


def _digest(facts: Mapping[str, Any]) -> str:
    text = json.dumps(facts, sort_keys=True, ensure_ascii=True)
    data = text.encode()
    # The letter and the length are part of every key there is.
    return blake3(b"T" + len(data).to_bytes(8, "little") + data).hexdigest()[:16]
