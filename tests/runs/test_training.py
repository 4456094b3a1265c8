"""Whole runs: the same bytes however they were interrupted or spread over processes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tomllib
import zlib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from fastfedul import DiskLedger, LedgerReader, add_request, forget
from fastfedul.errors import FastFedULError, InvalidInputError
from fastfedul.federation.trainer import TrainingError
from fastfedul.runs.config import read_options
from fastfedul.runs.training import (
    RoundMetrics,
    RunConfig,
    RunSummary,
    load_config,
    prepare,
    resume,
    retrain,
    score,
    start_workers,
    train,
)

pytest.importorskip("torch")

SMALL = RunConfig(
    train_size=240, clients=4, rounds=5, epochs=1, attack="pixel", seed=11, workers=1
)

KILLED = """
import os
import signal
import sys
import threading
from pathlib import Path

from fastfedul.runs.training import RunConfig, train
from fastfedul.federation.trainer import TrainingError
from fastfedul.runs.config import read_options



def die():
    os.kill(os.getpid(), signal.SIGKILL)


def show(metrics):
    if metrics.round == 1:
        threading.Timer(0.03, die).start()


if __name__ == "__main__":
    train(sys.argv[1], RunConfig(**read_options(Path(sys.argv[2]))), show)
"""


def outcome(folder: Path) -> tuple[bytes, str, list[dict[str, Any]]]:
    """Return what must not depend on how a run went: model, chain, accuracies."""
    with LedgerReader(folder) as ledger:
        chain = ledger.chain.hex()
    lines = metrics_of(folder)
    for line in lines:
        line.pop("seconds")
    return (folder / "model.safetensors").read_bytes(), chain, lines


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(folder, SMALL)
    return folder


def cut_after(folder: Path, num_rounds: int, config: RunConfig = SMALL) -> None:
    """Make a run that was stopped after so many rounds."""

    class StopError(Exception):
        pass

    def stop(metrics: RoundMetrics) -> None:
        if metrics.round == num_rounds - 1:
            raise StopError

    with pytest.raises(StopError):
        train(folder, config, stop)


def test_a_run_is_a_folder_with_everything(whole: Path) -> None:
    names = {path.name for path in whole.iterdir()}
    assert names == {
        "config.toml",
        "ledger",
        "metrics.jsonl",
        "initial.safetensors",
        "model.safetensors",
    }
    assert load_config(whole) == SMALL
    lines = metrics_of(whole)
    assert [line["round"] for line in lines] == list(range(5))
    assert all(0 <= line["main"] <= 1 and line["seconds"] > 0 for line in lines)
    with LedgerReader(whole) as ledger:
        model = load_file(whole / "model.safetensors")
        for name, array in ledger.final.params.items():
            np.testing.assert_array_equal(model[name], array)
        initial = load_file(whole / "initial.safetensors")
        np.testing.assert_array_equal(
            initial["0.weight"], ledger.initial.params["0.weight"]
        )
        assert set(ledger.clients()) == {f"client-{number}" for number in range(4)}


def test_two_workers_give_the_same_bytes_as_one(whole: Path, tmp_path: Path) -> None:
    summary = train(tmp_path / "run", replace(SMALL, workers=2))
    assert outcome(tmp_path / "run") == outcome(whole)
    assert isinstance(summary, RunSummary)
    assert summary.attackers == ("client-0",)
    assert summary.rounds == 5


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_stopped_run_goes_on_to_the_same_bytes(
    rounds: int, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    cut_after(folder, rounds)
    seen: list[int] = []
    resume(folder, progress=lambda metrics: seen.append(metrics.round))
    assert seen == list(range(rounds, 5))
    assert outcome(folder) == outcome(whole)


def test_a_killed_run_goes_on_to_the_same_bytes(whole: Path, tmp_path: Path) -> None:
    """A real process, killed with two workers in the middle of its rounds."""
    folder = tmp_path / "run"
    script, options = tmp_path / "killed.py", tmp_path / "options.toml"
    script.write_text(KILLED)
    options.write_text(replace(SMALL, workers=2).to_toml())
    died = subprocess.run([sys.executable, script, folder, options], timeout=120)
    assert died.returncode == -signal.SIGKILL
    with LedgerReader(folder) as ledger:
        assert 2 <= ledger.num_rounds < 5
    resume(folder, {"workers": 1})
    assert outcome(folder) == outcome(whole)


def test_what_a_crash_may_leave_is_put_right(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    cut_after(folder, 3)
    metrics = folder / "metrics.jsonl"
    kept = metrics.read_text().splitlines()
    late = '{"round": 9, "main": 1, "backdoor": 1, "seconds": 1}'
    metrics.write_text("\n".join([kept[0], late, kept[2][:20]]))
    resume(folder)
    assert outcome(folder) == outcome(whole)
    assert [line["seconds"] is None for line in metrics_of(folder)] == [
        *(False, True, True, False, False),
    ]


def test_a_run_killed_before_its_ledger_was_there_can_go_on(
    whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    cut_after(folder, 1)
    shutil.rmtree(folder / "ledger")
    (folder / "initial.safetensors").unlink()
    resume(folder)
    assert outcome(folder) == outcome(whole)


def test_a_finished_run_can_be_resumed_and_train_longer(
    whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    assert resume(folder).rounds == 5
    assert outcome(folder) == outcome(whole)
    assert resume(folder, {"rounds": 7}).rounds == 7
    assert load_config(folder).rounds == 7
    longer = tmp_path / "longer"
    train(longer, replace(SMALL, rounds=7))
    assert outcome(folder) == outcome(longer)


def test_forgetting_between_rounds_leaves_the_client_out(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = replace(SMALL, forget=("client-0@3",))
    train(folder, config)
    with LedgerReader(folder) as ledger:
        assert ledger.clients()["client-0"].state == "forgotten"
        assert ledger.clients()["client-0"].forgotten_at == 3
        takes_part = [
            "client-0" in {u.client for u in ledger.updates_in(index)}
            for index in range(5)
        ]
        assert takes_part == [True, True, True, False, False]
    by_hand = tmp_path / "by hand"
    cut_after(by_hand, 3)
    with DiskLedger(by_hand) as ledger:
        forget(ledger, ["client-0"])
    resume(by_hand)
    assert outcome(by_hand) == outcome(folder)


def test_a_request_during_training_is_as_an_erasure_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A key that cannot be used does not stop a training.
    monkeypatch.setenv("FASTFEDUL_KEY", str(tmp_path / "missing.pem"))
    folder = tmp_path / "run"

    def ask(metrics: RoundMetrics) -> None:
        if metrics.round == 2:
            add_request(folder, "client-0")

    summary = train(folder, SMALL, ask)
    [answered] = summary.answered
    assert answered.request.state == "applied"
    assert answered.certificate == folder / "certificates" / "1.json"
    assert not answered.signed
    by_hand = tmp_path / "by hand"
    cut_after(by_hand, 3)
    with DiskLedger(by_hand) as ledger:
        forget(ledger, ["client-0"], erase=True)
    resume(by_hand)
    assert outcome(by_hand) == outcome(folder)
    assert (by_hand / "certificates" / "event-1.json").exists()


def test_a_request_during_the_last_round_is_applied_too(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def ask(metrics: RoundMetrics) -> None:
        if metrics.round == SMALL.rounds - 1:
            add_request(folder, "client-1")

    assert len(train(folder, SMALL, ask).answered) == 1
    with LedgerReader(folder) as ledger:
        model = load_file(folder / "model.safetensors")
        for name, array in ledger.final.params.items():
            np.testing.assert_array_equal(model[name], array)
        assert ledger.clients()["client-1"].state == "erased"


def test_scripted_forgetting_happens_once_however_often_resumed(tmp_path: Path) -> None:
    config = replace(SMALL, forget=("client-2@2", "client-0@5"))
    whole, folder = tmp_path / "whole", tmp_path / "run"
    train(whole, config)
    cut_after(folder, 2, config)
    resume(folder)
    resume(folder)
    resume(folder, {"forget": ("client-0@5",)})
    assert outcome(folder) == outcome(whole)
    with LedgerReader(folder) as ledger:
        assert [event.clients for event in ledger.events()] == [
            ("client-2",),
            ("client-0",),
        ]


def test_a_client_never_drawn_is_left_out_all_the_same(tmp_path: Path) -> None:
    config = replace(SMALL, clients=24, per_round=2, rounds=4, attack="none")
    folder = tmp_path / "run"
    train(folder, config)
    with LedgerReader(folder) as ledger:
        first = {u.client for u in ledger.updates_in(0)}
        late = sorted({u.client for u in ledger.updates_in(3)} - first)[0]
        early = {u.client for i in range(3) for u in ledger.updates_in(i)}
    assert late not in early, "the draw of this seed does not fit the test"
    train(tmp_path / "without", replace(config, forget=(f"{late}@1",)))
    with LedgerReader(tmp_path / "without") as ledger:
        assert late not in ledger.clients()


def test_retraining_leaves_a_slot_empty_and_everything_else_the_same(
    whole: Path,
) -> None:
    prepared = prepare(SMALL)
    with start_workers(prepared) as workers, LedgerReader(whole) as ledger:
        everybody = retrain(prepared, workers, frozenset())
        expected = ledger.final.params.flat.tobytes()
        assert everybody.params.flat.tobytes() == expected
        without = retrain(prepared, workers, {"client-0"})
        assert without.params.flat.tobytes() != expected
        main, backdoor = score(prepared, workers, everybody)
    assert (main, backdoor) == tuple(
        metrics_of(whole)[-1][k] for k in ("main", "backdoor")
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.5}, "began with lr 0.05"),
        ({"rounds": 3}, "5 rounds are recorded"),
        ({"forget": ("client-1@2",)}, "round 2 is over"),
        ({"forget": ("client-9@2",)}, "there is no client"),
    ],
)
def test_a_change_of_the_past_is_refused(
    changes: dict[str, Any], message: str, whole: Path
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        resume(whole, changes)
    assert load_config(whole) == SMALL


@pytest.mark.parametrize("num_lines", [0, 5, -1])
def test_a_config_that_was_cut_is_not_taken_for_a_short_one(
    num_lines: int, whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    file = tmp_path / "run" / "config.toml"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:num_lines]))
    with pytest.raises(InvalidInputError, match="its end is missing"):
        resume(tmp_path / "run")


def test_a_lost_index_is_named(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "ledger" / "index.sqlite").unlink()
    with pytest.raises(FastFedULError, match=r"it has no index\.sqlite; restore"):
        resume(tmp_path / "run")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def build(shape, classes): raise RuntimeError('boom')", "RuntimeError: boom"),
        ("def build(): pass", "TypeError"),
        ("def build(", "SyntaxError"),
        ("raise KeyError('x')", "KeyError"),
    ],
)
def test_what_a_users_network_raises_is_said_in_one_line(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"network_{zlib.crc32(text.encode())}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InvalidInputError, match=message):
        train(tmp_path / "run", replace(SMALL, model=f"{name}:build"))
    assert not (tmp_path / "run").exists()


def test_a_taken_folder_is_refused_and_a_missing_run_too(
    whole: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError, match="add --resume"):
        train(whole, SMALL)
    with pytest.raises(InvalidInputError, match="there is no run"):
        resume(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "options", [{"model": "no.module:build"}, {"data": "no-such-data"}]
)
def test_a_run_that_cannot_begin_leaves_no_folder(
    options: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(FastFedULError):
        train(tmp_path / "run", replace(SMALL, **options))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", [{"keep": "optimal:2", "keep_use": "aggregate"}])
def test_keeping_less_is_recorded_and_aggregated(
    options: dict[str, Any], tmp_path: Path
) -> None:
    config = replace(SMALL, **options, store="int8", dropout=0.2, weighting="equal")
    train(tmp_path / "run", config)
    with LedgerReader(tmp_path / "run") as ledger:
        assert ledger.settings.update_dtype == "int8"
        assert {entry.use for entry in ledger.rounds()} == {"aggregate"}
        kept = [u.kept for i in range(5) for u in ledger.updates_in(i)]
        assert 0 < sum(kept) < len(kept)


def test_training_that_runs_away_says_so(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="smaller learning rate"):
        train(tmp_path / "run", replace(SMALL, lr=1e25))


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(
    data=TEXT,
    model=TEXT,
    lr=st.floats(1e-30, 1e30),
    momentum=st.floats(0, 0.99),
    train_size=st.none() | st.integers(1, 10**9),
    seed=st.integers(0, 2**62),
)
def test_options_survive_toml(**options: Any) -> None:
    config = RunConfig(**options, forget=("client-3@7", "client-1@20"))
    found = tomllib.loads(config.to_toml())
    assert found["data"] == options["data"]
    back = {key.replace("-", "_"): value for key, value in found.items()}
    back["forget"] = tuple(back["forget"])
    assert RunConfig(**back) == config


def test_a_config_file_says_only_what_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'rounds = 3\nlr = 1\nbatch_size = 8\nattackers = 2\nattack = "pixel"'
    )
    config = RunConfig(**read_options(path))
    assert config == RunConfig(
        rounds=3, lr=1.0, batch_size=8, attackers="2", attack="pixel"
    )
    assert isinstance(config.lr, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds = ", "not valid TOML"),
        ("roundz = 3", "did you mean rounds"),
        ("rounds = 2.5", "not a whole number"),
        ("rounds = true", "not a whole number"),
        ("lr = 'high'", "not a number"),
        ("model = 3", "not text"),
        ("forget = 'client-0@3'", "list of text"),
    ],
)
def test_a_bad_config_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=message) as caught:
        read_options(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(InvalidInputError, match="cannot read"):
        read_options(tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 0}, "--clients is 0"),
        ({"rounds": 0}, "--rounds is 0"),
        ({"train_size": 0}, "--train-size is 0"),
        ({"seed": -1}, "--seed"),
        ({"per_round": 11}, "10 clients"),
        ({"store": "float8"}, "--store"),
        ({"keep": "some"}, "cannot read the policy"),
        ({"keep": "optimal"}, "budget"),
        ({"keep_use": "both"}, "store or aggregate"),
        ({"partition": "dirichlet"}, "cannot read the split"),
        ({"attack": "magic"}, "unknown attack"),
        ({"attackers": "2"}, "needs an attack"),
        ({"poison_ratio": 0.5}, "--poison-ratio needs an attack"),
        ({"attack": "pixel", "attackers": ""}, "attackers"),
        ({"budget": "0"}, "choose more"),
        ({"budget": "99999999TB"}, "choose less"),
        ({"forget": ("nobody@2",)}, "there is no client 'nobody'"),
        ({"clients": 2, "forget": ("client-0@1", "client-1@2")}, "nobody would be"),
        ({"attack": "pixel", "attackers": "bob"}, "no client 'bob'"),
        ({"attack": "pixel", "poison_ratio": 2.0}, "poison ratio"),
        ({"weighting": "loud"}, "size or equal"),
        ({"dropout": 1.5}, "dropout"),
        ({"lr": -1.0}, "learning rate"),
        ({"forget": ("client-0",)}, "CLIENT@ROUND"),
        ({"forget": ("client-0@0",)}, "before round 1 to 20"),
        ({"forget": ("client-0@21",)}, "before round 1 to 20"),
        ({"forget": ("client-0@2", "client-0@3")}, "twice"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        RunConfig(**options)
    assert "\n" not in str(caught.value)


def test_every_option_has_a_default() -> None:
    assert all(hasattr(RunConfig(), field.name) for field in fields(RunConfig))
    assert RunConfig().names[0] == "client-0"
