"""Where the runs of other seeds are, and which folders are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastfedul import InvalidInputError, RunConfig
from fastfedul.runs.seeds import find_runs


def begun(folder: Path, **options: object) -> Path:
    """Return a run that was stopped before its first round."""
    folder.mkdir(parents=True, exist_ok=True)
    RunConfig.from_options(options).save(folder / "config.toml")
    return folder


def test_other_seeds_stand_beside_the_run(tmp_path: Path) -> None:
    run = begun(tmp_path / "run", seed=3)
    found = find_runs(run, [1, 3, 1])
    assert found == {1: tmp_path / "run-seed-1", 3: run}
    assert list(found) == [1, 3]
    other = begun(tmp_path / "run-seed-1", seed=1)
    assert find_runs(other, [1, 2]) == {1: other, 2: tmp_path / "run-seed-2"}


def test_the_working_folder_may_be_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(begun(tmp_path / "run"))
    assert find_runs(Path(), [0, 1])[1] == tmp_path / "run-seed-1"


def test_workers_and_fewer_rounds_may_differ_and_nothing_else(tmp_path: Path) -> None:
    run = begun(tmp_path / "run", rounds=5)
    begun(tmp_path / "run-seed-1", rounds=4, workers=2, seed=1)
    find_runs(run, [0, 1])
    for wrong in ({"rounds": 6}, {"seed": 2}, {"attack": "pixel"}, {"damping": 0.1}):
        begun(tmp_path / "run-seed-1", **{"rounds": 5, "seed": 1, **wrong})
        [name] = wrong
        with pytest.raises(InvalidInputError, match=f"is a run with --{name} "):
            find_runs(run, [0, 1])


@pytest.mark.parametrize(
    ("seeds", "reason"),
    [
        ([1], "run has seed 0, which must be among the seeds; choose 0,1$"),
        ([0, -2], "a seed is -2; choose 0 or more"),
    ],
)
def test_wrong_seeds_are_refused(seeds: list[int], reason: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        find_runs(begun(tmp_path / "run"), seeds)
