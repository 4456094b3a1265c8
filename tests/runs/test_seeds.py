"""Where the runs of other seeds are, and which folders are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastfedul import DiskLedger, InvalidInputError, RunConfig, forget
from fastfedul.runs.seeds import find_runs, seed_runs_with
from tests.support.commands import run as fastfedul
from tests.support.disk_ledgers import initial_model, round_of


def begun(folder: Path, **options: object) -> Path:
    """Return a run that was stopped before its first round."""
    folder.mkdir(parents=True, exist_ok=True)
    RunConfig.from_options(options).save(folder / "config.toml")
    return folder


def recorded(folder: Path, **options: object) -> Path:
    """Return a run with two rounds of the clients a, b, c and d in its ledger."""
    begun(folder, **options)
    with DiskLedger.create(folder / "ledger", initial_model()) as ledger:
        for index in range(2):
            ledger.append(round_of(index))
    return folder


def test_other_seeds_stand_beside_the_run(tmp_path: Path) -> None:
    run = begun(tmp_path / "run", seed=3)
    found = find_runs(run, [1, 3])
    assert found == {1: tmp_path / "run-seed-1", 3: run}
    assert list(found) == [1, 3]
    with pytest.raises(InvalidInputError, match="seed 1 is named twice"):
        find_runs(run, [1, 3, 1])
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
        ([0, -2], "a seed is a whole number, 0 or more, not -2"),
    ],
)
def test_wrong_seeds_are_refused(seeds: list[int], reason: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        find_runs(begun(tmp_path / "run"), seeds)


def test_the_runs_of_other_seeds_that_still_hold_a_client_are_found(
    tmp_path: Path,
) -> None:
    run = recorded(tmp_path / "run")
    first, second = (
        recorded(tmp_path / f"run-seed-{seed}", seed=seed) for seed in (1, 2)
    )
    recorded(tmp_path / "runs-seed-1")
    begun(tmp_path / "run-seed-3", seed=3)
    assert seed_runs_with(run, ["a", "x"]) == {first: ["a"], second: ["a"]}
    assert seed_runs_with(first, ["a"]) == {run: ["a"], second: ["a"]}
    with DiskLedger(second) as ledger:
        forget(ledger, ["a"], erase=False)
        forget(ledger, ["b"])
    assert seed_runs_with(run, ["a", "b"]) == {first: ["a", "b"], second: ["a"]}
    (run / "config.toml").write_text("damaged")
    (second / "ledger" / "index.sqlite").write_bytes(b"damaged")
    assert seed_runs_with(run, ["b"]) == {first: ["b"], second: ["b"]}


def test_forgetting_names_the_runs_that_still_hold_the_client(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    other = recorded(tmp_path / "run-seed-1", seed=1)
    said = f"forget there too: fastfedul forget {other} a"
    assert said not in fastfedul("forget", run, "a", "--dry-run").stderr
    assert said in fastfedul("forget", run, "a").stderr
    fastfedul("request", "add", run, "b")
    applied = fastfedul("request", "apply", run).stderr
    assert f"run-seed-1 beside this run still holds b; {said[:-1]}b" in applied
