"""The committed results: every page is what the committed cells give."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from fastfedul.reproduction.cells import CellStore
from fastfedul.reproduction.experiments import EXPERIMENTS, lines_of
from fastfedul.reproduction.writing import write

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
COMMITTED = [name for name in EXPERIMENTS if (RESULTS / f"{name}.md").is_file()]


def test_there_are_results() -> None:
    assert {"edge-case", "pixel", "cost"} <= set(COMMITTED)


@pytest.mark.parametrize("name", COMMITTED)
def test_a_page_is_what_its_cells_give(
    name: str, tmp_path: Path, data_file: Callable[[str], Path]
) -> None:
    # Which data set stands for OCTMNIST depends on what is there.
    data_file("oct_retina_subset.npz")
    page = (RESULTS / f"{name}.md").read_text("utf-8")
    [num_seeds] = re.findall(rf"reproduce {name} --scale standard --seeds (\d+)", page)
    lines = lines_of(name, "standard", int(num_seeds))
    write(name, "standard", lines, CellStore(RESULTS / "cells"), tmp_path)
    for suffix in ("md", "csv", "json"):
        given = (tmp_path / f"{name}.{suffix}").read_text("utf-8")
        assert (RESULTS / f"{name}.{suffix}").read_text("utf-8") == given, suffix


def test_every_committed_cell_belongs_to_a_page(
    data_file: Callable[[str], Path],
) -> None:
    data_file("oct_retina_subset.npz")
    known = {
        cell.key
        for name in EXPERIMENTS
        for line in lines_of(name, "standard", 5)
        for cell in line.cells
    }
    assert {path.stem for path in (RESULTS / "cells").glob("*.json")} <= known


def test_the_table_in_short_says_what_the_main_tables_say() -> None:
    measured = {
        (line["label"], line["data"], name): (
            f"{100 * line['main']['value']:.2f} / {100 * line['backdoor']['value']:.2f}"
        )
        for name in ("edge-case", "pixel")
        for line in json.loads((RESULTS / f"{name}.json").read_text("utf-8"))["lines"]
        if line["main"] and line["backdoor"]
    }
    columns = list(product(("mnist", "cifar10", "oct"), ("edge-case", "pixel")))
    text = (RESULTS / "README.md").read_text("utf-8").split("## In short")[1]
    table = text.split("\n\n")[2].splitlines()[2:]
    assert len(table) > 10
    for row in table:
        method, *figures, _ = (part.strip() for part in row.split("|")[1:-1])
        expected = [measured.get((method, *column), "–") for column in columns]
        assert figures == expected, method
