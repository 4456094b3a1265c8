"""The committed results: every page says what the committed cells give."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

from fastfedul.methods.registry import METHODS, find_method
from paper.cells import BEFORE, RETRAINED, CellStore, Kind
from paper.experiments import EXPERIMENTS, lines_of
from paper.writing import write

ROOT = Path(__file__).resolve().parents[2]
PAGES, RESULTS = ROOT / "docs" / "results", ROOT / "results"
COMMITTED = [name for name in EXPERIMENTS if (PAGES / f"{name}.md").is_file()]
DATA = ("digits", "mnist", "cifar10", "oct-retina-subset")
LAST_COMMIT_OF_RETIRED = "f3df8bfe0a1b8c041e740a116bc84bc82e453a8c"


def records(name: str) -> list[dict[str, Any]]:
    text = (RESULTS / f"{name}.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_there_are_results() -> None:
    assert {"edge-case", "pixel", "cost"} <= set(COMMITTED)


@pytest.mark.parametrize("name", COMMITTED)
def test_a_page_is_what_its_cells_give(
    name: str, tmp_path: Path, data_file: Callable[[str], Path]
) -> None:
    # Which data set stands for OCTMNIST depends on what is there.
    data_file("oct_retina_subset.npz")
    page = (PAGES / f"{name}.md").read_text("utf-8")
    [num_seeds] = re.findall(
        rf"python -m paper {name} --scale standard --seeds (\d+)", page
    )
    lines = lines_of(name, "standard", int(num_seeds))
    write(name, "standard", lines, CellStore(RESULTS), tmp_path)
    for suffix in ("md", "csv", "json"):
        given = (tmp_path / f"{name}.{suffix}").read_text("utf-8")
        assert (PAGES / f"{name}.{suffix}").read_text("utf-8") == given, suffix


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
    for data in DATA:
        for record in records(data):
            # Retraining takes longest, so that of retired experiments can be used.
            reference = record["method"] in (BEFORE, RETRAINED)
            assert reference or record["key"] in known, record["key"]


@pytest.mark.parametrize("name", [*DATA, "retired"])
def test_results_are_sorted_and_every_key_is_there_once(name: str) -> None:
    keys = [record["key"] for record in records(name)]
    assert keys == sorted(set(keys))


@pytest.mark.parametrize("data", DATA)
def test_results_can_be_computed_again_by_the_methods_there_are(data: str) -> None:
    for record in records(data):
        name, settings = record["method"], dict(record["settings"])
        assert record["run"]["data"] == data
        assert record["kind"] in get_args(Kind)
        if record["kind"] == "model" and name not in (BEFORE, RETRAINED):
            about_the_ledger = {"store", "history"}
            own = {k: settings[k] for k in settings if k not in about_the_ledger}
            find_method(name, own)


def test_results_of_removed_methods_are_kept_apart_with_their_commit() -> None:
    for record in records("retired"):
        assert record["commit"] == LAST_COMMIT_OF_RETIRED
        assert (
            record["method"] not in METHODS
            or record["kind"] not in get_args(Kind)
            or record["settings"].get("skew") == "direction"
        )


def test_the_table_in_short_says_what_the_main_tables_say() -> None:
    measured = {
        (line["label"], line["data"], name): (
            f"{100 * line['main']['value']:.2f} / {100 * line['backdoor']['value']:.2f}"
        )
        for name in ("edge-case", "pixel")
        for line in json.loads((PAGES / f"{name}.json").read_text("utf-8"))["lines"]
        if line["main"] and line["backdoor"]
    }
    columns = list(product(("mnist", "cifar10", "oct"), ("edge-case", "pixel")))
    text = (PAGES / "README.md").read_text("utf-8").split("## In short")[1]
    table = text.split("\n\n")[2].splitlines()[2:]
    assert len(table) >= 10
    for row in table:
        method, *figures, _ = (part.strip() for part in row.split("|")[1:-1])
        expected = [measured.get((method, *column), "–") for column in columns]
        assert figures == expected, method
