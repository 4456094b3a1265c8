"""Runs with a server optimizer: trained, stopped, forgotten, retrained, compared."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from fastfedul import DiskLedger, InvalidInputError, LedgerReader, add_request
from fastfedul.federation.server_optimizers import ServerOptimizer
from fastfedul.ledger.protocol import models
from fastfedul.runs.config import RunConfig
from fastfedul.runs.training import (
    RoundMetrics,
    load_config,
    prepare,
    resume,
    retrain,
    start_workers,
    train,
)
from tests.support.commands import one_line, run_json
from tests.support.commands import run as run_command

pytest.importorskip("torch")

ADAM = RunConfig.from_options(
    train_size=200,
    clients=4,
    rounds=4,
    epochs=1,
    attack="pixel",
    seed=3,
    workers=1,
    server_optimizer="adam",
    server_lr=0.02,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "run"
    train(ADAM, folder)
    return folder


def test_the_run_and_its_ledger_know_the_optimizer(whole: Path) -> None:
    wanted = ServerOptimizer.make("adam", lr=0.02)
    assert load_config(whole).server.make_optimizer() == wanted
    with LedgerReader(whole) as ledger:
        assert ledger.settings.optimizer == wanted
        assert ledger.final.server is not None
        assert ledger.final.server.steps == 4
        assert [*models(ledger)][-1] is not None
    found = run_json("ledger", "info", whole)
    assert found["server_optimizer"] == str(wanted)
    shown = run_command("ledger", "info", whole).stdout
    assert "adam:lr=0.02" in shown


def test_a_stopped_run_goes_on_to_the_same_bytes(whole: Path, tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stop(metrics: RoundMetrics) -> None:
        if metrics.round == 1:
            raise StopError

    folder = tmp_path / "run"
    with pytest.raises(StopError):
        train(ADAM, folder, stop)
    resume(folder)
    with LedgerReader(whole) as first, LedgerReader(folder) as second:
        assert first.chain == second.chain
        assert first.model_digest == second.model_digest
        assert first.final.server is not None
        assert second.final.server is not None
        assert np.array_equal(first.final.server.vectors, second.final.server.vectors)


def test_lost_metrics_come_back_from_the_replayed_server(
    whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text(lines[0] + "\n")
    resume(folder)
    again = (folder / "metrics.jsonl").read_text().splitlines()
    wanted = [json.loads(line)["main"] for line in lines]
    assert [json.loads(line)["main"] for line in again] == wanted


def test_a_client_is_forgotten_while_it_trains(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def ask(metrics: RoundMetrics) -> None:
        if metrics.round == 1:
            add_request(folder, "client-0")

    summary = train(ADAM, folder, ask)
    assert [done.request.state for done in summary.answered] == ["applied"]
    with LedgerReader(folder) as ledger:
        assert {u.client for u in ledger.updates_in(3)} == {
            *("client-1", "client-2", "client-3")
        }
        assert list(ledger.server_states()) == [2]
        event = ledger.events()[-1]
    assert event.details["server_optimizer"] == str(ADAM.server.make_optimizer())
    certificates = list((folder / "certificates").glob("*.json"))
    assert len(certificates) == 1


def test_retraining_has_the_same_server(whole: Path) -> None:
    prepared = prepare(ADAM)
    with start_workers(prepared) as workers, LedgerReader(whole) as ledger:
        again = retrain(prepared, workers, frozenset())
        assert np.array_equal(again.params.flat, ledger.final.params.flat)


def test_a_method_that_adds_means_refuses(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    refused = run_command(
        "forget", tmp_path / "run", "client-0", "--method", "federaser", code=1
    )
    assert "this ledger's server uses adam" in one_line(refused)


def test_a_method_without_a_server_state_is_not_committed(
    whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    with DiskLedger(tmp_path / "run") as ledger:
        before = ledger.chain
        with pytest.raises(InvalidInputError, match="needs the state of the server"):
            ledger.commit_forgetting(
                ["client-0"], np.zeros(ledger.settings.layout.size, np.float32), {}
            )
        assert ledger.chain == before
        assert ledger.clients()["client-0"].state == "active"


def test_a_ledger_with_an_optimizer_is_not_compacted(whole: Path) -> None:
    refused = run_command("ledger", "compact", whole, code=1)
    assert "its server optimizer adam is replayed" in one_line(refused)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"server_optimizer": "sgd"}, "choose momentum, nesterov, adam"),
        ({"server_lr": 0.1}, "--server-lr needs a server optimizer"),
        ({"server_optimizer": "adam", "server_momentum": 0.5}, "has no momentum"),
        ({"server_optimizer": "adam", "server_beta1": 1.0}, "server beta1"),
        ({"server_optimizer": "adam", "server_lr": 0.0}, "server lr"),
        ({"server_optimizer": "yogi", "keep": "sums"}, "--keep sums keeps none"),
    ],
)
def test_options_that_make_no_sense_get_one_line(
    options: dict[str, object], match: str
) -> None:
    with pytest.raises(InvalidInputError, match=match) as found:
        RunConfig.from_options(options)
    assert "\n" not in str(found.value)
