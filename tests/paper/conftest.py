"""Made-up results, the same for the same cell; the methods' small federation."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fastfedul.methods.registry import BUILT_IN
from fastfedul.runs.config import RunConfig
from paper.cells import BEFORE, RETRAINED, Cell, CellStore
from paper.experiments import Line
from tests.methods.conftest import normalised, small_run

__all__ = ["normalised", "small_run"]

Fill = Callable[[Sequence[Line]], CellStore]


def chance(cell: Cell, what: str) -> float:
    """Return a number from 0 to 1 that looks random."""
    return zlib.crc32(f"{cell.key} {what}".encode()) % 10_000 / 10_000


def made_up(cell: Cell) -> dict[str, Any]:
    """Return a result of the form that a computed one has."""
    is_before = cell.method == "before"
    main = 0.95 + 0.03 * chance(cell, "main")
    backdoor = 0.8 + 0.15 * chance(cell, "b") if is_before else chance(cell, "b") / 10
    if cell.kind == "keeping":
        chances = [chance(cell, f"p {n}") for n in range(4)]
        held = {"features": 3, "num_features": 40, "pairs": 0, "num_pairs": 5}
        return {
            "attacker": chances,
            "honest": [0.5] * 4,
            "largest": [p > 0.7 for p in chances],
            "condition": {"xi": 0.5, **held},
        }
    if cell.kind == "iterations":
        ends = [(n + 1) / 12 for n in range(12)]
        course = [0.9 - (0.9 - backdoor) * end for end in ends]
        return {"main": [main - end / 20 for end in ends], "backdoor": course}
    found: dict[str, Any] = {
        "main": main,
        "main_count": round(main * 1000),
        "main_total": 1000,
        "backdoor": backdoor,
        "backdoor_count": round(backdoor * 400),
        "backdoor_total": 400,
        "mia_auc": 0.5,
        "distance": 1.5,
        "bound": 30.0,
        "lipschitz": 0.5,
        "angle_degrees": 4.0,
        "unit_angles": [30 * chance(cell, f"unit {n}") for n in range(9)] + [None],
        "seconds": 0.0 if is_before else 10 ** (3 * chance(cell, "time") - 1),
        "client_calls": 0 if "fast" in cell.method else 40,
        "software": "0.1.0",
    }
    if cell.method not in ("before", "retrained"):
        found["bytes_read"] = round(10 ** (4 + 4 * chance(cell, "read")))
        found["stored_bytes"] = 0 if cell.method == "cdp" else 40_000_000
        found["peak_bytes"] = round(10 ** (6 + 2 * chance(cell, "peak")))
        found["warnings"] = []
    return found


@pytest.fixture
def store(tmp_path: Path) -> CellStore:
    return CellStore(tmp_path / "kept")


@pytest.fixture
def fill(store: CellStore) -> Fill:
    """Give every cell of some lines a made-up result."""

    def filled(lines: Sequence[Line]) -> CellStore:
        for line in lines:
            for cell in line.cells:
                store.write(cell, made_up(cell))
        return store

    return filled


@pytest.fixture
def line_with(store: CellStore) -> Callable[..., Line]:
    """Return a line of which every seed has a given result; None is a missing one."""

    def built(
        *results: dict[str, Any] | None,
        label: str = "fast-fedul-paper",
        method: str | None = None,
        data: str = "mnist",
        source: str | None = None,
        **more: Any,
    ) -> Line:
        kind = "iterations" if any(_is_course(found) for found in results) else "model"
        known = (*BUILT_IN, BEFORE, RETRAINED)
        name = method or (label if label in known else "fast-fedul-paper")
        cells = []
        for seed, result in enumerate(results):
            run = RunConfig(data=source or data, attack="pixel", seed=seed)
            cells.append(Cell(run, name, {}, kind))  # type: ignore[arg-type]
            if result is not None:
                store.write(cells[-1], result)
        return Line(data, "pixel", label, tuple(cells), **more)

    return built


def _is_course(result: dict[str, Any] | None) -> bool:
    return isinstance((result or {}).get("main"), list)
