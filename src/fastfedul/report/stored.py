"""Where pages and comparisons of a run or ledger are put, and the newest comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastfedul.errors import InvalidInputError
from fastfedul.files import read_regular, write_whole
from fastfedul.ledger.protocol import now
from fastfedul.ledger.store.folder import find_ledger
from fastfedul.runs.evaluation_source import run_at

PAGE = "report.html"
COMPARISON = "comparison.json"


def place_of(path: Path, name: str) -> Path:
    """Return where a file of a run goes, or of a ledger outside a run: beside it."""
    run = run_at(path)
    if run is not None:
        return run / name
    ledger = find_ledger(path).absolute()
    return ledger.with_name(f"{ledger.name}.{name}")


def write_comparison(path: Path, found: Mapping[str, Any]) -> None:
    """Keep a comparison, as `compare --json` prints it, with its time.

    Raises:
        InvalidInputError: If the file cannot be written.
    """
    place = place_of(path, COMPARISON)
    try:
        write_whole(place, json.dumps({"time": now(), **found}, indent=1) + "\n")
    except OSError as error:
        raise InvalidInputError(
            f"cannot write {place}: {error.strerror or error}"
        ) from None


def read_comparison(path: Path) -> dict[str, Any] | None:
    """Return the newest comparison; None if there is none to read."""
    try:
        found = json.loads(read_regular(place_of(path, COMPARISON)))
    except (OSError, ValueError):
        return None
    usable = isinstance(found, dict) and isinstance(found.get("rows"), list)
    return found if usable else None
