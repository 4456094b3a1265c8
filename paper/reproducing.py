"""From the name of a table to its files: plan, compute missing cells, write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastfedul.errors import InvalidInputError
from paper.cells import Cell, CellStore, run_key
from paper.experiments import EXPERIMENTS, Line, lines_of
from paper.running import Say, compute
from paper.settings import SCALES, Scale
from paper.writing import write

RESULTS, RUNS = "results", "runs"


@dataclass(frozen=True, slots=True)
class Plan:
    """The cells to compute and the tables to write.

    Attributes:
        scale: Of the runs.
        tables: Lines of each table, by its name.
        cells: All of them, each once, runs together.
        num_done: How many have a result.
        folder: Where pages go, and runs while they are computed.
        results: Where the results of cells are kept.
    """

    scale: Scale
    tables: dict[str, list[Line]]
    cells: tuple[Cell, ...]
    num_done: int
    folder: Path
    results: Path

    @property
    def num_cells(self) -> int:
        """How many cells there are."""
        return len(self.cells)


def plan(
    name: str,
    scale: str,
    num_seeds: int,
    folder: Path,
    *,
    results: Path | None = None,
    only: str | None = None,
) -> Plan:
    """Return the cells of a table, and the number of finished ones.

    Args:
        name: Of a table, of several with commas, or `all`.
        scale: `smoke` or `standard`.
        num_seeds: Seeds 0 to this number less 1.
        folder: Where pages go.
        results: Where the results of cells are kept; None for `results` below it.
        only: Leave out all other data sets.
    """
    if scale not in SCALES:
        raise InvalidInputError(
            f"the scale is {scale!r:.20}; choose {' or '.join(SCALES)}"
        )
    names = tuple(EXPERIMENTS) if name == "all" else tuple(name.split(","))
    tables = {one: _only(lines_of(one, scale, num_seeds), only) for one in names}
    cells = _together([c for lines in tables.values() for x in lines for c in x.cells])
    results = results or folder / RESULTS
    store = CellStore(results)
    num_done = sum(store.read(cell) is not None for cell in cells)
    return Plan(scale, tables, cells, num_done, folder, results)


def reproduce(planned: Plan, say: Say, *, limit: int | None = None) -> tuple[Path, ...]:
    """Compute the missing cells and write the tables; return the files.

    An interruption also writes the tables, from the finished cells.

    Args:
        planned: The plan.
        say: Told how far it is.
        limit: Stop after so many runs.
    """
    folder = planned.folder
    store = CellStore(planned.results)
    missing = [cell for cell in planned.cells if store.read(cell) is None]
    if limit is not None:
        runs = list(dict.fromkeys(run_key(cell.run) for cell in missing))[:limit]
        missing = [cell for cell in missing if run_key(cell.run) in runs]
    try:
        compute(missing, store, folder / RUNS, say)
    finally:
        store.sort()
        written = [
            path
            for name, lines in planned.tables.items()
            for path in write(name, planned.scale, lines, store, folder)
        ]
    return tuple(written)


def _only(lines: Sequence[Line], data: str | None) -> list[Line]:
    found = [line for line in lines if data in (None, line.data)]
    if not found:
        known = ", ".join(dict.fromkeys(line.data for line in lines))
        raise InvalidInputError(
            f"no table has the data set {data!r:.40}; choose {known}"
        )
    return found


def _together(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """Return each cell once, ordered by seed, with the cells of a run together."""
    once = {cell.key: cell for cell in cells}
    by_run: dict[str, list[Cell]] = {}
    for cell in once.values():
        by_run.setdefault(run_key(cell.run), []).append(cell)
    groups = sorted(by_run.values(), key=lambda group: group[0].run.seed)
    return tuple(cell for group in groups for cell in group)
