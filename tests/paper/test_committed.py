"""The committed results: every page says what the committed cells give."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from fastfedul.errors import InvalidInputError
from fastfedul.methods.registry import BUILT_IN, find_method
from paper.cells import BEFORE, RETRAINED, CellStore, Kind, without_ledger
from paper.experiments import EXPERIMENTS, lines_of
from paper.pages import PUBLISHED, folder_of, write_pages
from paper.settings import SCALES, Scale
from paper.short import BEGIN, END, short_table, write_short

ROOT = Path(__file__).resolve().parents[2]
PAGES, RESULTS = ROOT / "docs" / "results", ROOT / "results"
DATA = ("digits", "mnist", "cifar10", "oct-retina-subset")
LAST_COMMIT_OF_RETIRED = "f3df8bfe0a1b8c041e740a116bc84bc82e453a8c"


def records(name: str) -> list[dict[str, Any]]:
    text = (RESULTS / f"{name}.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def files_below(folder: Path) -> set[Path]:
    return {p.relative_to(folder) for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, data_file: Callable[[str], Path]
) -> Path:
    # Which data set stands for OCTMNIST depends on what is there.
    data_file("oct_retina_subset.npz")
    folder = tmp_path_factory.mktemp("pages")
    for _ in write_pages(RESULTS, folder):
        pass
    return folder


@pytest.mark.slow
def test_one_command_makes_everything_but_the_prose(made: Path) -> None:
    names = {name for name, scale, _ in PUBLISHED if scale == "standard"}
    assert {"edge-case", "pixel", "cost"} <= names
    by_hand = (
        *("README.md", "claims.md", "setup.md"),
        *("board-protocol.md", "tracing-protocol.md"),
    )
    written_by_hand = {Path(name) for name in by_hand}
    assert files_below(made) == files_below(PAGES) - written_by_hand


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scale"), [each[:2] for each in PUBLISHED])
def test_a_page_is_what_its_cells_give(name: str, scale: Scale, made: Path) -> None:
    for suffix in ("md", "csv"):
        file = f"{name}.{suffix}"
        given = (folder_of(scale, made) / file).read_text("utf-8")
        assert (folder_of(scale, PAGES) / file).read_text("utf-8") == given, suffix


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["board", "buffers", "server-rules", "tracing", "audit"]
)
def test_the_board_is_what_its_runs_give(name: str, made: Path) -> None:
    given = (made / f"{name}.md").read_text("utf-8")
    assert (PAGES / f"{name}.md").read_text("utf-8") == given


@pytest.mark.slow
def test_figures_are_drawn_as_committed(made: Path) -> None:
    for path in sorted(PAGES.rglob("*.svg")):
        again = made / path.relative_to(PAGES)
        assert again.read_text("utf-8") == path.read_text("utf-8"), path


def test_every_committed_cell_belongs_to_a_page(
    data_file: Callable[[str], Path],
) -> None:
    data_file("oct_retina_subset.npz")
    known = {
        cell.key
        for name in EXPERIMENTS
        for scale in SCALES
        for line in lines_of(name, scale, 5)
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
        name = record["method"]
        assert record["run"]["data"] == data
        assert record["kind"] in get_args(Kind)
        if record["kind"] == "model" and name not in (BEFORE, RETRAINED):
            find_method(name, without_ledger(record["settings"]))


def test_results_of_removed_methods_are_kept_apart_with_their_commit() -> None:
    for record in records("retired"):
        assert record["commit"] == LAST_COMMIT_OF_RETIRED
        assert (
            record["method"] not in BUILT_IN
            or record["kind"] not in get_args(Kind)
            or record["settings"].get("skew") == "direction"
        )


def test_the_table_in_short_is_what_the_cells_give(
    data_file: Callable[[str], Path],
) -> None:
    data_file("oct_retina_subset.npz")
    text = (PAGES / "README.md").read_text("utf-8")
    table = text.partition(BEGIN)[2].partition(END)[0].strip()
    assert table == short_table(CellStore(RESULTS))
    assert len(table.splitlines()) > 10


def test_the_table_in_short_is_written_between_its_marks(
    store: CellStore, tmp_path: Path
) -> None:
    readme = tmp_path / "README.md"
    assert list(write_short(store, readme)) == []
    readme.write_text(f"above\n{BEGIN}stale\n{END}\nbelow\n", "utf-8")
    for _ in range(2):
        assert list(write_short(store, readme)) == [readme]
    text = readme.read_text("utf-8")
    assert text.startswith(f"above\n{BEGIN}\n| method |")
    assert text.endswith(f" |\n\n{END}\nbelow\n")
    assert "stale" not in text
    readme.write_text("no marks", "utf-8")
    with pytest.raises(InvalidInputError, match="lacks the line"):
        list(write_short(store, readme))
