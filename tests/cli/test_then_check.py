"""`fastfedul forget --then-check`, as a user runs it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.commands import one_line, run, run_json

pytest.importorskip("torch", reason="training needs the extra torch")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny attacked run."""
    folder = tmp_path_factory.mktemp("then")
    usual = ("--clients", 4, "--train-size", 240, "--epochs", 1, "--workers", 1)
    attack = ("--attack", "pixel", "--poison-ratio", 0.5, "--lr", 0.1)
    run("train", "run", *usual, *attack, "--rounds", 3, cwd=folder)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, so that every test forgets from the same one."""
    shutil.copytree(trained / "run", tmp_path / "run")
    return tmp_path


def models_of(run_: Path) -> list[bytes]:
    """Return the files that hold the model of a run, and its metrics."""
    ledger = sorted((run_ / "ledger").rglob("*"))
    own = [run_ / "model.safetensors", run_ / "metrics.jsonl", run_ / "config.toml"]
    return [path.read_bytes() for path in [*own, *ledger] if path.is_file()]


def test_a_dry_run_shows_the_course_and_changes_nothing(folder: Path) -> None:
    before = models_of(folder / "run")
    words = ("forget", "run", "client-0", "--then-check", 2)
    found = run_json(*words, "--dry-run", cwd=folder)["then_check"]
    assert models_of(folder / "run") == before
    assert [point["rounds"] for point in found] == [0, 1, 2]
    assert found[0]["loss"] != found[1]["loss"]
    for point in found:
        assert point["backdoor"] == pytest.approx(
            point["backdoor_count"][0] / point["backdoor_count"][1]
        )
    told = run(*words, cwd=folder).stdout
    assert "Forgot client-0" in told
    assert "Does it come back?" in told


def test_the_course_is_the_one_that_the_run_then_takes(folder: Path) -> None:
    shutil.copytree(folder / "run", folder / "plain")
    words = ("client-0", "--then-check", 2)
    found = run_json("forget", "run", *words, cwd=folder)["then_check"]
    run("forget", "plain", "client-0", cwd=folder)
    # The check has left nothing in the run, so both go on alike.
    for name in ("run", "plain"):
        run("train", name, "--resume", "--rounds", 5, cwd=folder)
        after = run_json("evaluate", name, cwd=folder)
        assert after["main_count"] == found[2]["main_count"]
        assert after["backdoor_count"] == found[2]["backdoor_count"]


def test_what_cannot_be_checked_is_refused_before_anything_changes(
    folder: Path,
) -> None:
    shutil.copytree(folder / "run" / "ledger", folder / "alone")
    before = models_of(folder / "run")
    everybody = [f"client-{number}" for number in range(4)]
    for words, said in (
        (("run", "client-0", "--then-check", 0), "--then-check"),
        (("alone", "client-0", "--then-check", 1), "is no run"),
        (("run", *everybody, "--then-check", 1), "nobody stays"),
    ):
        told = run("forget", *words, code=2, cwd=folder, columns=300)
        assert said in one_line(told)
    assert models_of(folder / "run") == before
