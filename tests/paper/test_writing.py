"""The files of a reproduction, whole and linked to each other."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fastfedul.errors import InvalidInputError
from paper.cells import CellStore
from paper.experiments import lines_of
from paper.writing import write

Fill = Callable[..., CellStore]


def test_the_page_its_data_and_its_plots_are_written(
    fill: Fill, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra report")
    lines, out = lines_of("ablation", "smoke", 2), tmp_path / "deep" / "out"
    files = write("ablation", "smoke", lines, fill(lines), out)
    names = [path.name for path in files]
    assert names == [
        "ablation.md",
        "ablation.csv",
        "ablation-edge-case-digits.svg",
        "ablation-pixel-digits.svg",
    ]
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    linked = re.findall(r"!\[.*\]\((.*)\)", files[0].read_text("utf-8"))
    assert linked == names[2:]
    with files[1].open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(lines)


def test_writing_again_gives_the_same_bytes(fill: Fill, tmp_path: Path) -> None:
    lines = lines_of("sampling", "smoke", 2)
    store = fill(lines)
    first = write("sampling", "smoke", lines, store, tmp_path / "a")
    second = write("sampling", "smoke", lines, store, tmp_path / "b")
    assert [p.name for p in first] == [p.name for p in second]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_nothing_computed_yet_is_a_page_that_says_so(
    store: CellStore, tmp_path: Path
) -> None:
    lines = lines_of("cost", "smoke", 1)
    files = write("cost", "smoke", lines, store, tmp_path)
    assert len(files) == 2
    text = files[0].read_text("utf-8")
    assert text.count("Not run yet.") == text.count("\n## ") == 2
    assert "|" not in text


def test_without_matplotlib_the_rest_is_written(
    fill: Fill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = lines_of("pixel", "smoke", 1)
    store = fill(lines)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    files = write("pixel", "smoke", lines, store, tmp_path)
    assert [path.suffix for path in files] == [".md", ".csv"]
    assert "pip install 'fastfedul[report]'" in files[0].read_text("utf-8")


def test_a_folder_that_cannot_be_written_is_told(
    store: CellStore, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    lines = lines_of("pixel", "smoke", 1)
    with pytest.raises(InvalidInputError, match="cannot write"):
        write("pixel", "smoke", lines, store, tmp_path / "file")
