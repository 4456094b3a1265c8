"""Whole runs: the same bytes however they were interrupted or spread over processes."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fastfedul import (
    DiskLedger,
    FastFedUL,
    LedgerReader,
    Scalar,
    add_request,
    forget,
)
from fastfedul.data.sources import load
from fastfedul.errors import FastFedULError, InvalidInputError
from fastfedul.federation.replies import RoundDiscardedError
from fastfedul.forgetting.certificates import read_certificate
from fastfedul.ledger.failures import read_failures
from fastfedul.runs.preparation import client_names
from fastfedul.runs.training import (
    PlannedForgetting,
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

SMALL = RunConfig.from_options(
    train_size=240,
    clients=4,
    rounds=5,
    epochs=1,
    attack="pixel",
    seed=11,
    workers=1,
    federation="Four of us",
)

KILLED = """
import os
import signal
import sys
import threading
from pathlib import Path

from fastfedul.runs.training import RunConfig, train
from fastfedul.federation.trainer import TrainingError


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def show(metrics):
    if metrics.round == 1:
        threading.Timer(0.03, die).start()


if __name__ == "__main__":
    train(RunConfig.load(Path(sys.argv[2])), sys.argv[1], show)
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
    train(SMALL, folder)
    return folder


def test_the_ledger_knows_its_federation(whole: Path) -> None:
    with LedgerReader(whole) as ledger:
        assert ledger.settings.federation == "Four of us"


def cut_after(folder: Path, num_rounds: int, config: RunConfig = SMALL) -> None:
    """Make a run that was stopped after so many rounds."""

    class StopError(Exception):
        pass

    def stop(metrics: RoundMetrics) -> None:
        if metrics.round == num_rounds - 1:
            raise StopError

    with pytest.raises(StopError):
        train(config, folder, stop)


def test_a_run_is_a_folder_with_everything(whole: Path) -> None:
    names = {path.name for path in whole.iterdir()}
    assert names == {
        "config.toml",
        "ledger",
        "metrics.jsonl",
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
        assert set(ledger.clients()) == {f"client-{number}" for number in range(4)}


@pytest.mark.slow
def test_two_workers_give_the_same_bytes_as_one(whole: Path, tmp_path: Path) -> None:
    summary = train(SMALL.with_options(workers=2), tmp_path / "run")
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


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bytes(whole: Path, tmp_path: Path) -> None:
    """A real process, killed with two workers in the middle of its rounds."""
    folder = tmp_path / "run"
    script, options = tmp_path / "killed.py", tmp_path / "options.toml"
    script.write_text(KILLED)
    options.write_text(SMALL.with_options(workers=2).to_toml())
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
    train(SMALL.with_options(rounds=7), longer)
    assert outcome(folder) == outcome(longer)


@pytest.mark.parametrize(("erase", "state"), [(True, "erased"), (False, "forgotten")])
def test_forgetting_between_rounds_leaves_the_client_out(
    erase: bool, state: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    config = SMALL.with_options(forget=("client-0@3",), erase=erase)
    train(config, folder)
    with LedgerReader(folder) as ledger:
        assert ledger.clients()["client-0"].state == state
        assert ledger.clients()["client-0"].forgotten_at == 3
        takes_part = [
            "client-0" in {u.client for u in ledger.updates_in(index)}
            for index in range(5)
        ]
        assert takes_part == [not erase] * 3 + [False] * 2
    by_hand = tmp_path / "by hand"
    cut_after(by_hand, 3)
    with DiskLedger(by_hand) as ledger:
        forget(ledger, ["client-0"], erase=erase)
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

    summary = train(SMALL, folder, ask)
    [answered] = summary.answered
    assert answered.request.state == "applied"
    assert answered.certificate == folder / "certificates" / "1.json"
    assert not answered.signed
    by_hand = tmp_path / "by hand"
    cut_after(by_hand, 3)
    with DiskLedger(by_hand) as ledger:
        forget(ledger, ["client-0"], key=None)
    resume(by_hand)
    assert outcome(by_hand) == outcome(folder)
    assert (by_hand / "certificates" / "event-1.json").exists()


def settings_of(folder: Path, name: str) -> dict[str, Any]:
    method = read_certificate(folder / "certificates" / name).predicate.method
    assert method is not None
    assert method.settings is not None
    return method.settings


def test_the_options_say_how_to_forget_while_it_trains(tmp_path: Path) -> None:
    """The paper's Algorithm 1 with its damping, for a plan and for a request."""
    folder = tmp_path / "run"

    def ask(metrics: RoundMetrics) -> None:
        if metrics.round == 3:
            add_request(folder, "client-1")

    config = SMALL.with_options(
        forget=("client-0@2",), skew="scalar", damping=0.07, erase=False
    )
    train(config, folder, ask)
    for name in ("event-1.json", "1.json"):
        settings = settings_of(folder, name)
        assert (settings["skew"], settings["damping"]) == ("scalar", 0.07)
    by_hand = tmp_path / "by hand"
    cut_after(by_hand, 2)
    with DiskLedger(by_hand) as opened:
        forget(opened, ["client-0"], FastFedUL(skew=Scalar(0.07)), erase=False)
    resume(by_hand)
    with LedgerReader(folder) as ledger, LedgerReader(by_hand) as other:
        assert ledger.rounds()[:4] == other.rounds()[:4]
        states = {name: entry.state for name, entry in ledger.clients().items()}
    assert states["client-0"] == states["client-1"] == "forgotten"


def test_how_to_forget_may_change_when_a_run_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    cut_after(folder, 2, SMALL.with_options(damping=0.2))
    resume(folder, {"skew": "kronecker", "forget": ("client-0@4",)})
    assert load_config(folder).forgetting.damping is None
    assert settings_of(folder, "event-1.json")["skew"] == "kronecker"


def test_a_budget_without_room_for_every_step_is_refused_before_the_first_round(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(InvalidInputError, match="fewer rounds, or keep") as caught:
        train(SMALL.with_options(budget="500KB"), folder)
    assert not folder.exists()
    [least] = re.findall(r"at least ([0-9,]+),", str(caught.value))
    # The index grows with the participants, who are not counted.
    budget = int(least.replace(",", "")) + 60_000
    train(SMALL.with_options(budget=str(budget)), folder)
    with LedgerReader(folder) as ledger:
        assert ledger.num_rounds == SMALL.rounds
        assert not any(u.kept for u in ledger.updates_in(0))


def test_images_that_clients_own_keep_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = load("digits")
    owners = np.array(["north", "south", "west"])[np.arange(300) % 3]
    np.savez(
        tmp_path / "own.npz",
        x_train=digits.train_images[:300],
        y_train=digits.train_labels[:300],
        x_test=digits.test_images,
        y_test=digits.test_labels,
        clients=owners,
    )
    monkeypatch.chdir(tmp_path)
    config = RunConfig.from_options(
        data="own.npz",
        rounds=2,
        epochs=1,
        attack="pixel",
        attackers="west",
        forget=("south@1",),
        server_images=30,
    )
    summary = train(config, "run")
    assert summary.clients == ("north", "south", "west")
    assert summary.attackers == ("west",)
    prepared = prepare(load_config(Path("run")))
    assert sum(prepared.sizes.values()) == 270
    monkeypatch.chdir(tmp_path.parent)
    # The path of the data holds in any working folder.
    assert client_names(load_config(tmp_path / "run")) == summary.clients
    with LedgerReader(tmp_path / "run") as ledger:
        assert {u.client for u in ledger.updates_in(1)} == {"north", "west"}


def test_a_name_that_no_ledger_takes_is_refused(tmp_path: Path) -> None:
    digits = load("digits")
    np.savez(
        tmp_path / "own.npz",
        x_train=digits.train_images,
        y_train=digits.train_labels,
        x_test=digits.test_images,
        y_test=digits.test_labels,
        clients=np.array(["\ud800", "b"])[np.arange(len(digits.train_labels)) % 2],
    )
    with pytest.raises(InvalidInputError, match="is not valid Unicode"):
        train(RunConfig(data=str(tmp_path / "own.npz")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_without_a_folder_finds_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run-1").mkdir()
    assert train(SMALL.with_options(rounds=1)).path == Path("run-2")
    assert load_config(Path("run-2")).rounds == 1


def test_a_request_during_the_last_round_is_applied_too(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def ask(metrics: RoundMetrics) -> None:
        if metrics.round == SMALL.rounds - 1:
            add_request(folder, "client-1")

    assert len(train(SMALL, folder, ask).answered) == 1
    with LedgerReader(folder) as ledger:
        model = load_file(folder / "model.safetensors")
        for name, array in ledger.final.params.items():
            np.testing.assert_array_equal(model[name], array)
        assert ledger.clients()["client-1"].state == "erased"


def test_scripted_forgetting_happens_once_however_often_resumed(tmp_path: Path) -> None:
    config = SMALL.with_options(forget=("client-2@2", "client-0@5"))
    whole, folder = tmp_path / "whole", tmp_path / "run"
    told: list[PlannedForgetting] = []
    found = train(config, whole, forgot=told.append)
    assert found.forgotten == tuple(told)
    assert [(done.client, done.rounds) for done in told] == [
        ("client-2", 2),
        ("client-0", 5),
    ]
    assert all(done.forgetting.erased for done in told)
    cut_after(folder, 2, config)
    resume(folder)
    assert resume(folder).forgotten == ()
    resume(folder, {"forget": ("client-0@5",)})
    assert outcome(folder) == outcome(whole)
    with LedgerReader(folder) as ledger:
        assert [event.clients for event in ledger.events()] == [
            ("client-2",),
            ("client-0",),
        ]


def test_a_client_never_drawn_is_left_out_all_the_same(tmp_path: Path) -> None:
    config = SMALL.with_options(clients=24, per_round=2, rounds=4, attack="none")
    folder = tmp_path / "run"
    train(config, folder)
    with LedgerReader(folder) as ledger:
        first = {u.client for u in ledger.updates_in(0)}
        late = sorted({u.client for u in ledger.updates_in(3)} - first)[0]
        early = {u.client for i in range(3) for u in ledger.updates_in(i)}
    assert late not in early, "the draw of this seed does not fit the test"
    train(config.with_options(forget=(f"{late}@1",)), tmp_path / "without")
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
        ({"lr": 0.5}, "began with --lr 0.05"),
        ({"rounds": 3}, "5 rounds are recorded"),
        ({"forget": ("client-1@2",)}, "round 2 is over"),
        ({"skew": "magic"}, "no skew"),
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
        train(SMALL.with_options(model=f"{name}:build"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_taken_folder_is_refused_and_a_missing_run_too(
    whole: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError, match="add --resume"):
        train(SMALL, whole)
    with pytest.raises(InvalidInputError, match="there is no run"):
        resume(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"config": {"rounds": 2}},
            "a configuration is a RunConfig, not {",
        ),
        (
            {"folder": 3},
            "a path is text, a pathlib.Path, or what fastfedul.train returned, not 3",
        ),
        ({"progress": 3}, "progress is a function, not 3"),
        ({"answered": "x"}, "answered is a function, not 'x'"),
    ],
)
def test_arguments_of_wrong_types_get_one_line(
    arguments: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        train(**{"folder": tmp_path / "run", **arguments})
    assert str(caught.value).startswith(said)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options", [{"model": "no.module:build"}, {"data": "no-such-data"}]
)
def test_a_run_that_cannot_begin_leaves_no_folder(
    options: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(FastFedULError):
        train(SMALL.with_options(**options), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", [{"keep": "optimal:2", "keep_use": "aggregate"}])
def test_keeping_less_is_recorded_and_aggregated(
    options: dict[str, Any], tmp_path: Path
) -> None:
    config = SMALL.with_options(**options, dtype="int8", dropout=0.2, weighting="equal")
    train(config, tmp_path / "run")
    with LedgerReader(tmp_path / "run") as ledger:
        assert ledger.settings.update_dtype == "int8"
        assert {entry.use for entry in ledger.rounds()} == {"aggregate"}
        kept = [u.kept for i in range(5) for u in ledger.updates_in(i)]
        assert 0 < sum(kept) < len(kept)


def test_training_that_runs_away_says_so(tmp_path: Path) -> None:
    with pytest.raises(RoundDiscardedError, match="smaller learning rate") as caught:
        train(SMALL.with_options(lr=1e25), tmp_path / "run")
    assert "more than half; 'client-0': its parameters have NaN" in str(caught.value)


def test_a_client_whose_training_runs_away_is_noted_beside_the_ledger(
    tmp_path: Path,
) -> None:
    train(SMALL.with_options(attack_scale=1e6, rounds=2), tmp_path / "run")
    found = read_failures(tmp_path / "run" / "ledger")
    assert [(one.round, one.client, one.task) for one in found] == [
        (1, "client-0", "train"),
        (2, "client-0", "train"),
    ]
    with LedgerReader(tmp_path / "run") as ledger:
        assert "client-0" not in {update.client for update in ledger.updates_in(0)}
