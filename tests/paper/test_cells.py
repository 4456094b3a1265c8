"""Results survive being killed, being shared, and being sorted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastfedul.errors import FastFedULError
from fastfedul.runs.config import RunConfig
from paper.cells import Cell, CellStore, run_facts

APPEND = """
import sys
from pathlib import Path
from paper.cells import Cell, CellStore
from fastfedul.runs.config import RunConfig
store = CellStore(Path(sys.argv[1]))
for seed in range(int(sys.argv[2]), 80, 2):
    store.write(Cell(RunConfig(seed=seed), "kd"), {"main": seed, "text": "x" * 9000})
    if seed % 10 < 2:
        store.sort()
"""


def cell_of(seed: int, data: str = "digits") -> Cell:
    return Cell(RunConfig(seed=seed, data=data), "kd")


def file_of(folder: Path) -> Path:
    return CellStore(folder).path(cell_of(0))


def test_a_result_is_there_at_once_and_for_whoever_comes_later(tmp_path: Path) -> None:
    store = CellStore(tmp_path / "new" / "results")
    assert store.read(cell_of(0)) is None
    store.write(cell_of(0), {"main": 0.5, "ends": (1, 2)})
    assert store.read(cell_of(0)) == {"main": 0.5, "ends": [1, 2]}
    assert CellStore(store.folder).read(cell_of(0)) == {"main": 0.5, "ends": [1, 2]}
    assert CellStore(store.folder).read(cell_of(1)) is None


def test_every_data_set_has_its_file(tmp_path: Path) -> None:
    store = CellStore(tmp_path)
    store.write(cell_of(0), {})
    store.write(cell_of(0, "mnist"), {})
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["digits.jsonl", "mnist.jsonl"]


@pytest.mark.parametrize("torn", ['{"key": "12', "\0\0\0\0", "{}"])
def test_a_torn_last_line_is_ignored_and_overwritten(tmp_path: Path, torn: str) -> None:
    CellStore(tmp_path).write(cell_of(0), {"main": 0})
    path = file_of(tmp_path)
    path.write_text(path.read_text() + torn)
    store = CellStore(tmp_path)
    assert store.read(cell_of(0)) == {"main": 0}
    store.write(cell_of(1), {"main": 1})
    lines = path.read_text().splitlines()
    assert [json.loads(line)["result"] for line in lines] == [{"main": 0}, {"main": 1}]
    assert CellStore(tmp_path).read(cell_of(1)) == {"main": 1}


def test_a_torn_first_line_is_ignored_too(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    path.write_text('{"key"')
    store = CellStore(tmp_path)
    assert store.read(cell_of(0)) is None
    store.sort()
    assert path.read_text() == ""
    store.write(cell_of(0), {"main": 0})
    assert CellStore(tmp_path).read(cell_of(0)) == {"main": 0}


def test_a_line_that_cannot_be_finished_is_told_and_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CellStore(tmp_path)
    store.write(cell_of(0), {"main": 0})
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: write(file, data[:20]))
        with pytest.raises(FastFedULError, match=r"cannot write .*: No space left"):
            store.write(cell_of(1), {"main": 1})
    assert store.read(cell_of(1)) is None
    store.write(cell_of(2), {"main": 2})
    again = CellStore(tmp_path)
    found = [again.read(cell_of(seed)) for seed in range(3)]
    assert found == [{"main": 0}, None, {"main": 2}]


def test_sorting_puts_the_keys_in_order_and_the_last_result_of_a_key(
    tmp_path: Path,
) -> None:
    store = CellStore(tmp_path)
    for seed in (*range(9), 3):
        store.write(cell_of(seed), {"main": seed, "order": "later"})
    store.write(cell_of(3), {"main": "new"})
    store.sort()
    text = file_of(tmp_path).read_text()
    keys = [json.loads(line)["key"] for line in text.splitlines()]
    assert keys == sorted({cell_of(seed).key for seed in range(9)})
    assert store.read(cell_of(3)) == {"main": "new"}
    stamp = file_of(tmp_path).stat()
    store.sort()
    assert file_of(tmp_path).stat().st_ino == stamp.st_ino, "nothing was to be done"
    assert [path.name for path in tmp_path.iterdir()] == ["digits.jsonl"]


def test_two_stores_that_append_in_turn_lose_nothing(tmp_path: Path) -> None:
    one, other = CellStore(tmp_path), CellStore(tmp_path)
    assert one.read(cell_of(0)) is other.read(cell_of(0)) is None
    for seed in range(10):
        (one if seed % 2 else other).write(cell_of(seed), {"main": seed})
    one.sort()
    other.write(cell_of(10), {"main": 10})
    other.sort()
    one.sort()
    for store in (one, other, CellStore(tmp_path)):
        found = [store.read(cell_of(seed)) for seed in range(11)]
        assert found == [{"main": seed} for seed in range(11)]


def test_two_processes_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", APPEND, str(tmp_path)]
    both = [subprocess.Popen([*command, first]) for first in ("0", "1")]
    assert [process.wait(100) for process in both] == [0, 0]
    store = CellStore(tmp_path)
    found = [store.read(cell_of(seed)) for seed in range(80)]
    assert [result and result["main"] for result in found] == list(range(80))


def test_a_damaged_line_is_not_used(tmp_path: Path) -> None:
    for seed in range(3):
        CellStore(tmp_path).write(cell_of(seed), {"main": 0.5})
    path = file_of(tmp_path)
    first, second, third = path.read_text().splitlines()
    for wrong in ("{", "[]", second.replace('"digits"', '"mnist"'), "", "\0"):
        path.write_text("\n".join((first, wrong, third, "")))
        with pytest.raises(FastFedULError, match=r"line 2 of .* delete the line"):
            CellStore(tmp_path).read(cell_of(0))
    path.write_text("\n".join((first, third, "")))
    assert CellStore(tmp_path).read(cell_of(1)) is None
    assert CellStore(tmp_path).read(cell_of(2)) == {"main": 0.5}


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FastFedULError, match=r"cannot write .*digits\.jsonl"):
        CellStore(tmp_path / "file" / "results").write(cell_of(0), {})


def test_a_result_depends_on_what_it_says_and_not_on_the_number_of_workers() -> None:
    cell = Cell(RunConfig(), "kd", {"lr": 0.1})
    assert cell.key == Cell(RunConfig(workers=2), "kd", {"lr": 0.1}).key
    others = {
        Cell(RunConfig(seed=1), "kd", {"lr": 0.1}).key,
        Cell(RunConfig(), "pga", {"lr": 0.1}).key,
        Cell(RunConfig(), "kd", {"lr": 0.2}).key,
        Cell(RunConfig(), "kd", {"lr": 0.1}, "iterations").key,
        Cell(RunConfig(), "kd", {"lr": 0.1}, leavers=2).key,
    }
    assert len(others - {cell.key}) == 5


def test_the_facts_of_a_run_keep_the_names_of_the_stored_results() -> None:
    facts = run_facts(RunConfig())
    assert facts["store"] == "float32"
    assert (facts["clients"], facts["partition"]) == (10, "iid")
    assert not {"dtype", "trainer", "method", "erase", "workers"} & set(facts)
    set_later = RunConfig.from_options(skew="scalar", trainer="own:make", erase=False)
    assert run_facts(set_later) == {
        **facts,
        "skew": "scalar",
        "trainer": "own:make",
        "erase": False,
    }


def test_every_stored_run_has_the_facts_it_was_stored_with() -> None:
    num_runs = 0
    for path in (Path(__file__).parents[2] / "results").glob("*.jsonl"):
        for line in path.read_text("utf-8").splitlines():
            stored = json.loads(line).get("run")
            if isinstance(stored, dict):
                options = {**stored, "dtype": stored["store"]}
                del options["store"]
                assert run_facts(RunConfig.from_options(options)) == stored
                num_runs += 1
    assert num_runs > 1000
