"""From the name of a table to its files: plan, compute missing cells, write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fastfedul.errors import InvalidInputError
from fastfedul.methods.protocol import needs_help
from fastfedul.methods.registry import find_method
from paper.cells import BEFORE, RETRAINED, Cell, CellStore, run_key, without_ledger
from paper.experiments import EXPERIMENTS, Line, lines_of
from paper.running import Say, compute, is_missing
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
        again: Whether results without the newest measures count as missing.
        timed: Whether nothing else uses the machine.
    """

    scale: Scale
    tables: dict[str, list[Line]]
    cells: tuple[Cell, ...]
    num_done: int
    folder: Path
    results: Path
    again: bool = False
    timed: bool = True

    def is_missing(self, cell: Cell, store: CellStore) -> bool:
        """Return whether a cell is still to be computed."""
        return is_missing(cell, store, again=self.again, timed=self.timed)

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
    again: bool = False,
    timed: bool = True,
    server_only: bool = False,
) -> Plan:
    """Return the cells of a table, and the number of finished ones.

    Args:
        name: Of a table, of several with commas, or `all`.
        scale: `smoke`, `standard` or `paper`.
        num_seeds: Seeds 0 to this number less 1.
        folder: Where pages go.
        results: Where the results of cells are kept; None for `results` below it.
        only: Leave out all other data sets.
        again: Count results without the newest measures as missing.
        timed: Measure times; if not, keep those that are known.
        server_only: Leave out the cells of methods that ask clients or images.
    """
    if scale not in SCALES:
        raise InvalidInputError(
            f"the scale is {scale!r:.20}; choose {' or '.join(SCALES)}"
        )
    names = tuple(EXPERIMENTS) if name == "all" else tuple(name.split(","))
    tables = {one: _only(lines_of(one, scale, num_seeds), only) for one in names}
    wanted = [c for lines in tables.values() for x in lines for c in x.cells]
    if server_only:
        wanted = [cell for cell in wanted if not _asks(cell)]
    cells = _together(wanted)
    results = results or folder / RESULTS
    store = CellStore(results)
    planned = Plan(scale, tables, cells, 0, folder, results, again, timed)
    num_done = sum(not planned.is_missing(cell, store) for cell in cells)
    return replace(planned, num_done=num_done)


def _asks(cell: Cell) -> bool:
    """Return whether a cell's method asks clients or needs images of the server."""
    return cell.method not in (BEFORE, RETRAINED) and needs_help(
        find_method(cell.method, without_ledger(cell.settings))
    )


def reproduce(
    planned: Plan, say: Say, *, limit: int | None = None, keep_runs: bool = False
) -> tuple[Path, ...]:
    """Compute the missing cells and write the tables; return the files.

    An interruption also writes the tables, from the finished cells.

    Args:
        planned: The plan.
        say: Told how far it is.
        limit: Stop after so many runs.
        keep_runs: Leave the folders of the runs in `runs` below the pages.
    """
    folder = planned.folder
    store = CellStore(planned.results)
    missing = [cell for cell in planned.cells if planned.is_missing(cell, store)]
    if limit is not None:
        first = list(dict.fromkeys(run_key(cell.run) for cell in missing))[:limit]
        missing = [cell for cell in missing if run_key(cell.run) in first]
    try:
        runs = folder / RUNS
        compute(missing, store, runs, say, keep_runs=keep_runs, timed=planned.timed)
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
