"""`fastfedul compare`, run as a user runs it: seeds, files, narrow screens, Ctrl-C."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastfedul import LedgerReader
from fastfedul.cli import output
from fastfedul.report import page
from tests.support.commands import (
    COMMAND,
    has_text,
    interrupt,
    run,
    run_json,
)

pytest.importorskip("torch", reason="training needs the extra torch")

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICK = ("--train-size", 200, "--clients", 3, "--epochs", 1, "--workers", 1)
LONG_METHOD = "methods_of_my_own:LeavesTheModelAsItIs"
OWN_METHODS = '''
from dataclasses import dataclass
from typing import ClassVar

from fastfedul import Needs, UnlearnResult


@dataclass(frozen=True, kw_only=True)
class LeavesTheModelAsItIs:
    """Leaves the model as it is."""

    strength: float = 1.0
    name: ClassVar[str] = "leaves_the_model_as_it_is"
    needs: ClassVar[Needs] = Needs()

    def __call__(self, request):
        return UnlearnResult(params=request.ledger.final.params, clients=())


@dataclass(frozen=True)
class Fails(LeavesTheModelAsItIs):
    """Fails."""

    name: ClassVar[str] = "fails"

    def __call__(self, request):
        raise ZeroDivisionError("two\\nlines")
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small run of seed 4 and a module with methods."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "methods_of_my_own.py").write_text(OWN_METHODS)
    run(
        "train",
        "run",
        *QUICK,
        "--rounds",
        3,
        "--attack",
        "pixel",
        "--seed",
        4,
        cwd=folder,
    )
    return folder


def test_methods_of_a_module_are_compared_and_a_failing_one_is_named(
    folder: Path,
) -> None:
    name, fails = "leaves_the_model_as_it_is", "methods_of_my_own:Fails"
    options = ("--methods", f"fast-fedul,{LONG_METHOD},{fails}")
    found = run_json(
        "compare", "run", *options, "--set", f"{LONG_METHOD}.strength=2", cwd=folder
    )
    rows = {row["method"]: row for row in found["rows"]}
    assert list(rows) == ["before", "retrained", "fast-fedul", name]
    assert rows[name]["main"] == rows["before"]["main"]
    assert rows[name]["settings"] == {"strength": 2}
    assert found["refused"] == {
        "fails": "the method fails failed: ZeroDivisionError: two"
    }
    page = (folder / "run" / "report.html").read_text()
    assert f"--methods fast-fedul,{LONG_METHOD},{fails}" in page
    forgotten = ("forget", "run", "client-0", "--dry-run", "--method", LONG_METHOD)
    assert run_json(*forgotten, cwd=folder)["method"] == name
    alone = run("compare", "run", "--methods", fails, code=1, cwd=folder)
    assert alone.stderr == ("error: the method fails failed: ZeroDivisionError: two\n")


@pytest.mark.slow
def test_all_lists_retraining_once(folder: Path) -> None:
    for methods in ("all,retrain", "retrain,fast-fedul"):
        found = run_json("compare", "run", "--methods", methods, cwd=folder)
        names = [row["method"] for row in found["rows"]]
        assert names[:2] == ["before", "retrained"]
        assert len(set(names)) == len(names)
        assert "retrain" not in names
        assert "fast-fedul" in names


@pytest.mark.slow
def test_seeds_are_trained_once_and_shown_as_means(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "QUIET_SECONDS", 0)
    place = tmp_path / "work"
    shutil.copytree(folder, place)
    options = ("compare", "run", "--seeds", "5,4,6", "--methods", "fast-fedul")
    files = ("--csv", "rows.csv", "--latex", "table.tex")
    shown = run(*options, *files, cwd=place)
    assert "± " in shown.stdout
    assert "over the seeds 5, 4, 6." in shown.stdout
    assert "seed 5: training" in shown.stderr
    config = (place / "run" / "config.toml").read_text()
    chains = {}
    for seed in (5, 6):
        other = place / f"run-seed-{seed}"
        changed = config.replace("\nseed = 4\n", f"\nseed = {seed}\n")
        assert (other / "config.toml").read_text() == changed
        with LedgerReader(other) as ledger:
            assert ledger.num_rounds == 3
            chains[seed] = ledger.chain

    again = run_json(*options, cwd=place)
    assert again["seeds"] == [5, 4, 6]
    models = ("before", "retrained", "fast-fedul")
    expected = [(seed, model) for seed in (5, 4, 6) for model in models]
    assert [(row["seed"], row["method"]) for row in again["rows"]] == expected
    for seed, chain in chains.items():
        with LedgerReader(place / f"run-seed-{seed}") as ledger:
            assert ledger.chain == chain
    alone = run_json("compare", "run-seed-5", "--methods", "fast-fedul", cwd=place)
    assert [r["main"] for r in alone["rows"]] == [r["main"] for r in again["rows"][:3]]
    [means] = [m for m in again["means"] if m["method"] == "fast-fedul"]
    values = [row["main"] for row in again["rows"] if row["method"] == "fast-fedul"]
    mean = sum(values) / 3
    assert means["seeds"] == [5, 4, 6]
    assert means["main"]["mean"] == pytest.approx(mean)
    squares = sum((value - mean) ** 2 for value in values)
    assert means["main"]["std"] == pytest.approx((squares / 2) ** 0.5)

    with (place / "rows.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(int(line["seed"]), line["method"]) for line in lines] == expected
    assert [float(line["main"]) for line in lines] == [r["main"] for r in again["rows"]]
    table = (place / "table.tex").read_text()
    assert table.count(r"\\") == 4
    assert r"fast-fedul & " in table


@pytest.mark.slow
def test_a_stopped_comparison_says_how_to_go_on_and_goes_on(
    folder: Path, tmp_path: Path
) -> None:
    place = tmp_path / "my work"
    shutil.copytree(folder, place)
    seeds = ("compare", "run", "--seeds", "4,5", "--methods", "fast-fedul")
    # So many rounds that the other seed is still training when the signal comes.
    run("train", "run", "--resume", "--rounds", 30, "--json", cwd=place)
    metrics = place / "run-seed-5" / "metrics.jsonl"
    said, told = interrupt(*COMMAND, *seeds, ready=lambda: has_text(metrics), cwd=place)
    assert said == ""
    assert told.splitlines()[-1] == (
        "stopped; trained rounds and retrained models are kept; go on with: fastfedul "
        "compare run --seeds 4,5 --methods fast-fedul"
    )
    with LedgerReader(place / "run-seed-5") as ledger:
        assert 0 < ledger.num_rounds < 30
    first = metrics.read_text().splitlines()[0]
    found = run_json(*seeds, cwd=place)
    assert found["seeds"] == [4, 5]
    assert metrics.read_text().splitlines()[0] == first, "it began again"
    assert len(metrics.read_text().splitlines()) == 30


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--seeds", "0,1"), "run has seed 4, which must be among the seeds; choose"),
        (("--seeds", "4,4"), "seed 4 is named twice; name each seed once"),
        (
            ("--methods", "fast-fedul-2", "--damping", "0.2"),
            "no method that is compared",
        ),
        (
            ("--damping", "0.2", "--set", "fast-fedul.damping=0.1"),
            "the damping of fast-fedul is given twice",
        ),
        (("--seeds", "4,-1"), "write whole numbers with commas"),
        (("--seeds", ""), "write whole numbers with commas"),
        (("--forget", "client-9"), "no client is called 'client-9'"),
        (("--csv", "missing/rows.csv"), "in a folder that does not exist"),
        (("--csv", "run/config.toml"), "is a place of the run itself"),
        (("--latex", "run"), "is a place of the run itself"),
        (("--latex", "."), "is a folder"),
    ],
)
def test_an_error_is_found_before_anything_is_trained(
    options: tuple[str, ...], reason: str, folder: Path
) -> None:
    before = sorted(folder.rglob("*"))
    found = run_json("compare", "run", *options, code=2, cwd=folder)
    assert list(found) == ["error"]
    assert reason in found["error"]
    assert sorted(folder.rglob("*")) == before


def test_without_json_an_error_is_one_line(folder: Path) -> None:
    told = run("compare", "run", "--seeds", "x", code=2, cwd=folder)
    [line] = told.stderr.splitlines()
    assert line.startswith("error: cannot read --seeds 'x'; write whole numbers")
    assert told.stdout == ""


def test_other_seeds_must_be_runs_of_the_same_options(
    folder: Path, tmp_path: Path
) -> None:
    place = tmp_path / "work"
    shutil.copytree(folder, place)
    seeds = ("compare", "run", "--seeds", "4,5", "--methods", "fast-fedul")
    (place / "run-seed-5").mkdir()
    (place / "run-seed-5" / "letter.txt").write_text("keep me")
    assert "run-seed-5 is no run" in run(*seeds, code=2, cwd=place).stderr
    shutil.rmtree(place / "run-seed-5")
    other = ("--rounds", 2, "--attack", "pixel", "--seed", 5)
    run("train", "run-seed-5", *QUICK, *other, "--lr", 0.2, cwd=place)
    said = run(*seeds, code=2, cwd=place).stderr
    assert "run-seed-5 is a run with --lr 0.2, and run has " in said
    shutil.rmtree(place / "run-seed-5")
    # Fewer rounds are no other options: the run goes on to as many as the others have.
    run("train", "run-seed-5", *QUICK, *other, cwd=place)
    run(*seeds, cwd=place)
    with LedgerReader(place / "run-seed-5") as ledger:
        assert ledger.num_rounds == 3
    run("forget", "run", "client-1", cwd=place)
    said = run(*seeds, code=2, cwd=place).stderr
    assert "'client-1' was forgotten in run, and the runs of other seeds" in said


@pytest.mark.slow
def test_own_data_and_an_own_trainer_work_in_every_table(tmp_path: Path) -> None:
    place = tmp_path / "clinics"
    shutil.copytree(EXAMPLES / "own_trainer", place)
    subprocess.run(
        [sys.executable, "make_data.py", "tumours.npz"], cwd=place, check=True
    )
    (place / "methods_of_my_own.py").write_text(OWN_METHODS)
    trainer = ("--data", "tumours.npz", "--trainer", "tumour_trainer:make_trainer")
    attack = ("--attack", "label-flip", "--target-label", 1, "--attackers", "Bergen")
    run("train", "run", *trainer, *attack, "--rounds", 4, "--workers", 1, cwd=place)
    methods = ("--methods", f"all,{LONG_METHOD}", "--seeds", "0,1")
    files = ("--csv", "rows.csv", "--latex", "table.tex")
    found = run_json("compare", "run", *methods, *files, cwd=place)
    names = {row["method"] for row in found["rows"]}
    assert {"before", "retrained", "federaser", "fedrecover", "fast-fedul"} <= names
    assert "leaves_the_model_as_it_is" in names
    assert "TumourTrainer gives none" in found["refused"]["pga"]
    assert all(len(m["seeds"]) == 2 for m in found["means"])
    assert found["forget"] == ["Bergen"]
    table = (place / "table.tex").read_text()
    assert r"leaves\_the\_model\_as\_it\_is" in table
    assert table.count(r"\\") == len(names) + 1
    assert "Bergen" in run("compare", "run", "--seeds", "0,1", cwd=place).stdout
    said = run("compare", "run", "--forget", "Delft", cwd=place).stdout
    assert "Forgetting Delft" in said


@pytest.fixture(scope="module")
def long_place(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, ...], tuple[Path, tuple[object, ...], dict[str, Any]]]:
    """Comparisons of a run whose path is long: alone, and with another seed."""
    place = tmp_path_factory.mktemp("narrow") / " ".join(["a long name"] * 6)
    shutil.copytree(folder, place)
    methods = ("--methods", f"fast-fedul,fast-fedul-paper,{LONG_METHOD}")
    found: dict[tuple[str, ...], tuple[Path, tuple[object, ...], dict[str, Any]]] = {}
    for seeds in ((), ("--seeds", "4,5")):
        command = ("compare", place / "run", *methods, *seeds)
        found[seeds] = place, command, run_json(*command, cwd=place)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("seeds", [(), ("--seeds", "4,5")])
def test_nothing_is_broken_on_a_narrow_screen(
    columns: int,
    seeds: tuple[str, ...],
    long_place: dict[tuple[str, ...], tuple[Path, tuple[object, ...], dict[str, Any]]],
) -> None:
    place, command, facts = long_place[seeds]
    shown = run(*command, columns=columns, cwd=place).stdout
    lines = shown.splitlines()
    assert f"report: {place / 'run' / 'report.html'}" in lines
    told = [line for line in lines if not line.startswith("report: ")]
    assert max(map(len, told)) <= columns
    for means in facts["means"]:
        assert means["method"] in re.findall(r"[\w-]+", shown)
        for measure in ("main", "backdoor"):
            assert f"{means[measure]['mean']:.1%}" in shown.split()
    numbers = re.findall(r"[\d.]+", shown)
    for row in [] if seeds else facts["rows"]:
        for end in (*row["main_interval"], *row["backdoor_interval"]):
            assert f"{100 * end:.1f}" in numbers
    if seeds:
        assert len(re.findall(r"\d+\.\d% ± \d+\.\d\b", shown)) == 2 * 5


def test_without_the_package_of_pages_the_numbers_are_shown(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "work"
    shutil.copytree(folder, place)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    page.environment.cache_clear()
    command = ("compare", "run", "--methods", "fast-fedul")
    shown = run(*command, cwd=place)
    assert "│ fast-fedul │" in shown.stdout
    assert "report:" not in shown.stdout
    assert "warning: no page was written: pages need Jinja2" in shown.stderr
    assert run_json(*command, cwd=place)["report"] is None
    said = run(*command, "--out", "page.html", code=1, cwd=place).stderr
    assert said.startswith("error: pages need Jinja2; run pip install")


@pytest.mark.slow
def test_the_words_of_forget_mean_the_same_here(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "work")
    place, whom = tmp_path / "work", ("--forget", "client-1")
    methods = ("--methods", "fast-fedul,retrain", "--damping", 0.2)
    found = run_json("compare", "run", *whom, *methods, cwd=place)
    used = found["rows"][-1]["settings"]
    wanted = run_json(
        "forget", "run", "client-1", "--damping", 0.2, "--dry-run", cwd=place
    )
    assert (used["skew"], used["damping"]) == (wanted["skew"], wanted["damping"])
    assert found["refused"] == {"retrain": "compared as the row `retrained`"}
    retrain = ("client-1", "--method", "retrain", "--dry-run")
    asked = run_json("forget", "run/ledger", *retrain, cwd=place)
    assert asked["method"] == "retrain"
