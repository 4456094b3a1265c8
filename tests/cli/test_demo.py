"""`fastfedul demo` and what was there before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch", reason="training needs the extra torch")

from fastfedul.cli.main import app
from fastfedul.errors import InvalidInputError
from fastfedul.runs.config import RunConfig
from tests.support.commands import COMMAND, has_text, interrupt


class TrainedError(Exception):
    """The demo got as far as training."""


@pytest.fixture(autouse=True)
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the options, as training does first, and stop there."""

    def train(config: RunConfig, folder: Path, progress: object) -> None:
        write_run(folder, config)
        raise TrainedError

    monkeypatch.setattr("fastfedul.runs.training.train", train)


def write_run(folder: Path, config: RunConfig) -> None:
    (folder / "ledger").mkdir(parents=True)
    config.save(folder / "config.toml")
    (folder / "mark").touch()


def start_demo(folder: Path, *options: object) -> BaseException | None:
    arguments = ["demo", "--out", str(folder), *map(str, options)]
    return CliRunner().invoke(app, arguments).exception


def test_an_earlier_demo_is_replaced_whatever_its_seed(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    assert isinstance(start_demo(folder, "--seed", 3), TrainedError)
    (folder / "old").touch()
    assert isinstance(start_demo(folder, "--seed", 4), TrainedError)
    assert not (folder / "old").exists()


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    assert isinstance(start_demo(tmp_path), TrainedError)


@pytest.mark.parametrize("config", [RunConfig(), RunConfig(rounds=500, seed=1)])
def test_another_run_is_not_replaced(tmp_path: Path, config: RunConfig) -> None:
    folder = tmp_path / "my-run"
    write_run(folder, config)
    error = start_demo(folder)
    assert isinstance(error, InvalidInputError)
    assert "is a run with other options than the demo's" in str(error)
    assert (folder / "mark").exists()


def test_a_run_whose_options_cannot_be_read_is_not_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "my-run"
    write_run(folder, RunConfig())
    (folder / "config.toml").write_text("rounds = ")
    assert isinstance(start_demo(folder), InvalidInputError)
    assert (folder / "mark").exists()


def test_an_option_that_is_refused_leaves_the_earlier_demo(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    assert isinstance(start_demo(folder), TrainedError)
    assert isinstance(start_demo(folder, "--seed", -1), InvalidInputError)
    assert (folder / "mark").exists()


def test_the_help_says_what_is_replaced() -> None:
    text = CliRunner().invoke(app, ["demo", "--help"]).output
    assert "an earlier demo is replaced" in " ".join(text.replace("│", " ").split())


def interrupted(folder: Path, ready: Callable[[], bool]) -> str:
    """Start a demo, stop it with Ctrl-C when it is ready, return what it says last."""
    _, said = interrupt(*COMMAND, "demo", "--out", folder, ready=ready)
    return said.strip().splitlines()[-1]


@pytest.mark.slow
def test_ctrl_c_while_it_trains_says_how_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    metrics = folder / "metrics.jsonl"
    said = interrupted(folder, lambda: has_text(metrics))
    assert said.startswith("stopped after ")
    assert said.endswith(f"go on with: fastfedul train {folder} --resume")


@pytest.mark.slow
def test_ctrl_c_while_it_compares_says_how_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    said = interrupted(folder, (folder / "model.safetensors").exists)
    told = f"go on with: fastfedul compare {folder}"
    assert said == f"stopped after the training; {told}"
