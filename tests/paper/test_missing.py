"""The page that says what is not computed yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paper.cells import CellStore
from paper.experiments import lines_of
from paper.measures import EDITION
from paper.missing import PAGE, count_missing, write_page

Fill = Callable[..., CellStore]


def test_cells_are_counted_once_with_the_runs_they_need(store: CellStore) -> None:
    lines = lines_of("deviation", "smoke", 2)
    first = lines[0].cells[0]
    store.write(first, {"main": 0.5})
    store.write(lines[1].cells[0], {"edition": EDITION, "untimed": True})
    edge, pixel = count_missing("deviation", "smoke", lines, store)
    assert (edge.attack, edge.data) == ("edge-case", "digits")
    assert (edge.cells, edge.missing, edge.runs) == (10, 8, 2)
    assert (edge.older, edge.untimed) == (1, 1)
    assert (pixel.missing, pixel.runs, pixel.older) == (10, 2, 0)


def test_a_complete_page_is_not_on_the_list(store: CellStore, tmp_path: Path) -> None:
    lines = lines_of("deviation", "smoke", 1)
    for line in lines:
        store.write(line.cells[0], {"main": 0.5, "edition": EDITION})
    [path] = write_page([("deviation", "smoke", 1)], store, tmp_path)
    assert path.name == PAGE
    assert "| deviation |" not in path.read_text("utf-8")
    [path] = write_page([("deviation", "smoke", 2)], store, tmp_path)
    assert "| deviation | smoke | digits | pixel | 10 | 5 | 1 | 0 | 0 |" in (
        path.read_text("utf-8")
    )
