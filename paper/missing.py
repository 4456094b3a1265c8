"""The page that says which cells of the published tables are missing, and how to go on.

It counts cells: a cell is one method on one run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from fastfedul.files import write_whole
from paper.cells import Cell, CellStore, run_key
from paper.experiments import Line, lines_of
from paper.running import UNTIMED, is_missing
from paper.settings import Scale

PAGE = "missing.md"
_GO_ON = "python -m paper NAMES --scale SCALE --seeds 3 --out OUT --results results"
_HEAD = f"""# What is not computed yet

`python -m paper.pages` counts the cells of the published pages here.
A cell is one method on one run, and a run may serve several pages.

| column | counts |
|---|---|
| missing | cells without a result |
| runs | runs that the missing cells need |
| older | results without the ARDIS sevens and without Theorem 1's bound |
| untimed | results from a busy machine: their times are older, or none |

Each of these commands goes on where it was stopped:

| command | computes |
|---|---|
| `{_GO_ON} --no-times` | what is missing, also on a busy machine |
| `{_GO_ON} --no-times --again` | the older results, too |
| `{_GO_ON} --again` | times and memory, too; nothing else may use the machine |

`NAMES` are pages with commas between them, and `--data mnist` takes one data set.
`--server-only` leaves out the methods that ask clients, which take longest.
"""


@dataclass(frozen=True, slots=True)
class Missing:
    """Cells of a page that are to be computed.

    Attributes:
        name: The page.
        scale: The scale.
        data: The data set.
        attack: The attack.
        cells: Cells of the page in all.
        missing: Cells without a result.
        runs: Runs that the missing cells need.
        older: Results without the newest measures.
        untimed: Results without times of their own.
    """

    name: str
    scale: Scale
    data: str
    attack: str
    cells: int
    missing: int
    runs: int
    older: int
    untimed: int


def count_missing(
    name: str, scale: Scale, lines: Sequence[Line], store: CellStore
) -> Iterator[Missing]:
    """Yield the counts of each data set and attack of a page that is not complete."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for line in lines:
        group = groups.setdefault((line.cells[0].run.data.source, line.attack), [])
        group.extend(line.cells)
    for (data, attack), cells in groups.items():
        counts = _count(cells, store)
        if any(counts[1:]):
            yield Missing(name, scale, data, attack, *counts)


def _count(cells: Sequence[Cell], store: CellStore) -> tuple[int, int, int, int, int]:
    """Return the last five fields of `Missing`, with each cell counted once."""
    once = list({cell.key: cell for cell in cells}.values())
    missing = [cell for cell in once if is_missing(cell, store)]
    older = [cell for cell in once if is_missing(cell, store, again=True, timed=False)]
    untimed = [cell for cell in once if UNTIMED in (store.read(cell) or ())]
    runs = {run_key(cell.run) for cell in missing}
    num_older = len(older) - len(missing)
    return len(once), len(missing), len(runs), num_older, len(untimed)


def write_page(
    published: Sequence[tuple[str, Scale, int]], store: CellStore, out: Path
) -> Iterator[Path]:
    """Write the page; yield its file.

    Args:
        published: Name, scale and number of seeds of each page.
        store: The results.
        out: Folder of the page.
    """
    columns = [field.name for field in fields(Missing)]
    pages = {(name, scale): lines_of(name, scale, n) for name, scale, n in published}
    rows = [
        [str(getattr(each, column)) for column in columns]
        for (name, scale), lines in pages.items()
        for each in count_missing(name, scale, lines, store)
    ]
    cells = [cell for lines in pages.values() for x in lines for cell in x.cells]
    rows.append(["all, each cell once", "", "", "", *map(str, _count(cells, store))])
    head = [columns, ["---"] * 4 + ["---:"] * 5]
    table = "\n".join("| " + " | ".join(row) + " |" for row in [*head, *rows])
    path = out / PAGE
    write_whole(path, f"{_HEAD}\n{table}\n")
    yield path
