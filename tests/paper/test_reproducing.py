"""The paper's evaluation end to end on digits: stopped, gone on with, and written."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.support.commands import run_program

pytest.importorskip("torch", reason="training needs the extra torch")


from fastfedul.methods.registry import BUILT_IN
from paper.experiments import EXPERIMENTS, lines_of
from paper.memory import watched
from paper.plots import DRAWN

COMMAND = [sys.executable, "-m", "paper"]
ROOT = Path(__file__).parents[2]
SLOW = ("epochs", "non-iid")
NAMES = tuple(name for name in EXPERIMENTS if name not in SLOW)
EVERYTHING = [",".join(NAMES), "--scale", "smoke", "--seeds", "1"]


def run(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    return run_program(*COMMAND, *arguments, code=code, cwd=ROOT, timeout=550)


@dataclass(frozen=True)
class Reproduced:
    """A folder of results, and the cells that were there when it was interrupted."""

    folder: Path
    first: dict[str, str]
    interrupted_with: int


def cells_in(folder: Path) -> dict[str, str]:
    """Return the finished lines of all results by key."""
    texts = [p.read_text("utf-8") for p in (folder / "results").glob("*.jsonl")]
    lines = [line for text in texts for line in text.split("\n")[:-1]]
    found = {json.loads(line)["key"]: line for line in lines}
    assert len(found) == len(lines)
    return found


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory: pytest.TempPathFactory) -> Reproduced:
    """Most names at scale smoke, interrupted once by Ctrl-C and then gone on with."""
    folder = tmp_path_factory.mktemp("reproduced")
    started = subprocess.Popen(
        [*COMMAND, *EVERYTHING, "--out", str(folder)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while len(cells_in(folder)) < 3:
            assert started.poll() is None, "it ended too early"
            time.sleep(0.05)
        started.send_signal(signal.SIGINT)
        code = started.wait(60)
    finally:
        started.kill()
        started.wait()
    first = cells_in(folder)
    run(*EVERYTHING, "--out", folder)
    return Reproduced(folder, first, code)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_interrupted_it_goes_on_and_keeps_what_was_done(reproduced: Reproduced) -> None:
    assert reproduced.interrupted_with == 130
    now = cells_in(reproduced.folder)
    assert 3 <= len(reproduced.first) < len(now)
    assert {name: now[name] for name in reproduced.first} == reproduced.first
    wanted = {
        cell.key
        for name in NAMES
        for line in lines_of(name, "smoke", 1)
        for cell in line.cells
    }
    assert set(now) == wanted
    assert not any((reproduced.folder / "runs").iterdir())


@pytest.mark.slow
def test_a_second_time_nothing_is_computed(reproduced: Reproduced) -> None:
    before = cells_in(reproduced.folder)
    text = run(*EVERYTHING, "--out", reproduced.folder, "--json").stdout
    facts = json.loads(text)
    assert facts["cells"] == facts["cells_done"] == len(before)
    assert cells_in(reproduced.folder) == before
    assert all(Path(path).is_file() for path in facts["files"])


@pytest.mark.slow
def test_every_name_has_a_page_a_table_and_plots(reproduced: Reproduced) -> None:
    for name in NAMES:
        page = (reproduced.folder / f"{name}.md").read_text("utf-8")
        assert "not run yet" not in page
        with (reproduced.folder / f"{name}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == len(lines_of(name, "smoke", 1))
        if name in DRAWN:
            assert list(reproduced.folder.glob(f"{name}-*.svg"))


@pytest.mark.slow
def test_the_story_of_the_paper_shows_already_on_digits(reproduced: Reproduced) -> None:
    for name in ("edge-case", "pixel"):
        with (reproduced.folder / f"{name}.csv").open(newline="") as file:
            rows = {row["label"]: row for row in csv.DictReader(file)}
        backdoor = {label: float(row["backdoor"]) for label, row in rows.items()}
        assert backdoor["before"] > 0.5
        assert backdoor["retrained"] < 0.1
        assert backdoor["fast-fedul-paper, all kept"] < 0.5 * backdoor["before"]
        assert backdoor["fast-fedul"] < 0.5 * backdoor["before"]
        assert backdoor["fedrecover"] < 0.5 * backdoor["before"]
        assert backdoor["cdp"] > 0.3, "pruning a class is not known to remove it"
        calls = {label: float(row["client_calls"]) for label, row in rows.items()}
        assert (
            calls["fast-fedul"]
            == calls["fast-fedul-paper"]
            == calls["kd"]
            == calls["fedaccum"]
            == 0
        )
        assert 0 < calls["fedrecover"] < calls["retrained"] == 90
        seconds = {label: float(row["seconds"]) for label, row in rows.items()}
        assert seconds["fast-fedul"] < seconds["retrained"]


@pytest.mark.slow
def test_the_criteria_name_every_method_of_the_paper(reproduced: Reproduced) -> None:
    page = (reproduced.folder / "criteria.md").read_text("utf-8")
    first = page.split("\n## ")[0]
    rows = [line for line in first.splitlines() if line.startswith("| ")]
    table = {row.split("|")[1].strip(): row for row in rows[1:]}
    for name in ("retrain", "federaser", "cdp", "pga", "kd", "fast-fedul-paper"):
        assert name in BUILT_IN
        cells = [cell.strip() for cell in table[name].split("|")[2:7]]
        assert all(cell.split(" / ")[1] in ("yes", "no") for cell in cells)
    assert table["kd"].split("|")[5].strip() == "no / no"
    assert table["fast-fedul-paper"].split("|")[6].strip() == "yes / yes"
    assert table["pga"].split("|")[6].strip() == "no / yes"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["table-9"], "unknown name 'table-9'; choose edge-case"),
        (["pixel", "--scale", "huge"], "choose smoke or standard"),
        (["pixel", "--seeds", "0"], "choose 1 or more"),
        (["pixel", "--data", "mars"], "choose digits"),
    ],
)
def test_wrong_arguments_get_one_line(
    arguments: list[str], reason: str, tmp_path: Path
) -> None:
    error = run(*arguments, "--out", tmp_path, code=2).stderr
    assert reason in " ".join(error.split())
    assert not list(tmp_path.iterdir())


def test_memory_that_was_freed_before_counts_when_it_is_filled_again() -> None:
    blocks = [np.ones(20_000) for _ in range(300)]
    del blocks
    with watched() as peak:
        blocks = [np.ones(20_000) for _ in range(300)]
        time.sleep(0.1)
    assert peak.num_bytes is None or peak.num_bytes > 40_000_000
    assert len(blocks) == 300


def test_memory_is_watched_while_something_runs() -> None:
    with watched() as peak:
        block = bytearray(50_000_000)
        block[::4096] = b"x" * len(block[::4096])
        time.sleep(0.1)
    assert peak.num_bytes is None or 40_000_000 < peak.num_bytes < 120_000_000


def test_data_that_are_not_there_are_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTFEDUL_DATA", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "out"
    done = run(
        *("deviation", "--scale", "standard", "--seeds", 1, "--out", out), code=2
    )
    assert "mnist is not on this machine" in done.stderr
    assert not cells_in(out)


def test_what_is_kept_at_random_is_drawn_anew_for_each_seed() -> None:
    [line] = [
        line
        for line in lines_of("ablation", "smoke", 3)
        if line.label == "fast-fedul-1" and line.attack == "pixel"
    ]
    assert [cell.settings["keep_seed"] for cell in line.cells] == [0, 1, 2]
