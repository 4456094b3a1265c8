"""A cell of a table: one method on one run, and the file that keeps its result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from fastfedul.errors import FastFedULError
from fastfedul.history.schema import digest_of
from fastfedul.run_config import RunConfig
from fastfedul.whole_files import write_whole

BEFORE, RETRAINED = "before", "retrained"
FORMAT = 1
"""Raised when a change makes results that were kept wrong."""

Kind = Literal["model", "iterations", "curve", "validated"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One method on one run.

    Attributes:
        run: The options of the run.
        method: `before`, `retrained`, or the name of a method.
        settings: Its settings where they are not the usual ones.
        kind: `model` measures the cleaned model; `iterations` the model after each
            round of Fast-FedUL's trace; `curve` the models of several values of a
            setting; `validated` the model that the server's own images choose.
        leavers: How many leave where nobody attacks.
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
        """The name of the file that keeps the result."""
        return _digest(self.facts)


def run_facts(run: RunConfig) -> dict[str, Any]:
    """Return the options that decide how a run goes; not how many processes it has."""
    facts = {k: v for k, v in asdict(run).items() if k != "workers" and v is not None}
    facts["forget"] = list(run.forget)
    return facts


def run_key(run: RunConfig) -> str:
    """Return a name for a run's folder."""
    return _digest(run_facts(run))


@dataclass(frozen=True, slots=True)
class CellStore:
    """Results of cells in a folder, a file each; a file is whole or not there."""

    folder: Path

    def read(self, cell: Cell) -> dict[str, Any] | None:
        """Return a result, or None if there is none.

        Raises:
            FastFedULError: If the file is not what was written.
        """
        path = self.path(cell)
        try:
            kept = json.loads(path.read_text("utf-8"))
            if {name: kept[name] for name in cell.facts} == cell.facts:
                result: dict[str, Any] = kept["result"]
                return result
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            pass
        raise FastFedULError(f"{path} is damaged; delete it to compute it again")

    def write(self, cell: Cell, result: Mapping[str, Any]) -> None:
        """Keep a result."""
        text = json.dumps({**cell.facts, "result": result}, indent=1, sort_keys=True)
        path = self.path(cell)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, text + "\n")
        except OSError as error:
            reason = error.strerror or str(error)
            raise FastFedULError(f"cannot write {path}: {reason}") from None

    def path(self, cell: Cell) -> Path:
        """Return where a cell's result is kept."""
        return self.folder / f"{cell.key}.json"


def _digest(facts: Mapping[str, Any]) -> str:
    text = json.dumps(facts, sort_keys=True, ensure_ascii=True)
    return digest_of(text).hex()[:16]
