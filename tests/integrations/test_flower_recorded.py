"""Real simulations under `Recorded`: what is in the ledger, and who was left out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import load_file

from fastfedul import (
    LedgerReader,
    LocalSGD,
)
from fastfedul import verify as verify_ledger
from fastfedul.errors import LedgerError
from fastfedul.records import ClientState
from fastfedul.runs.training import train
from tests.support.flower import chain_by_hand

if TYPE_CHECKING:
    from tests.integrations.conftest import Scenarios, Simulations

pytestmark = pytest.mark.slow

CLIENTS = [f"client-{number}" for number in range(5)]
BUFFERS = ("norm.running_mean", "norm.num_batches_tracked")


@contextmanager
def opened(path: Path) -> Iterator[LedgerReader]:
    with LedgerReader(path) as ledger:
        yield ledger


def participants(ledger: LedgerReader) -> list[list[str]]:
    return [
        [update.client for update in ledger.updates_in(index)]
        for index in range(ledger.num_rounds)
    ]


def states(ledger: LedgerReader) -> dict[str, ClientState]:
    return {name: entry.state for name, entry in ledger.clients().items()}


def by_hand(path: Path, num_rounds: int) -> bytes:
    """Return the chain of a ledger of the same training without Flower."""
    app = import_module("flower_app")
    return chain_by_hand(
        path, num_rounds, app.initial_arrays(), app.locally_trained, app.SIZES
    )


@pytest.fixture(autouse=True)
def app_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_the_ledger_is_that_of_the_same_training_without_flower(
    scenarios: Scenarios, tmp_path: Path
) -> None:
    with opened(scenarios.ledger("plain")) as ledger:
        assert ledger.chain == by_hand(tmp_path / "ledger", 4)
        assert not verify_ledger(ledger).problems


def test_a_project_recorded_through_flower_has_the_digest_of_its_own_engine(
    scenarios: Scenarios, tmp_path: Path
) -> None:
    summary = train(import_module("flower_app").PROJECT, tmp_path / "run")
    with opened(scenarios.ledger("project")) as ledger:
        assert ledger.chain.hex() == summary.chain


def test_how_clients_train_is_what_the_server_told_them_and_not_what_they_say(
    scenarios: Scenarios,
) -> None:
    told = LocalSGD(lr=0.1, momentum=0.5, batch_size=16, epochs=2)
    for name, expected in (
        ("told", told),
        ("plain", None),
        ("project", import_module("flower_app").PROJECT.local.training.sgd),
    ):
        with opened(scenarios.ledger(name)) as ledger:
            assert {round_.local for round_ in ledger.rounds()} == {expected}, name


def test_what_start_returns_is_the_ledgers_model(scenarios: Scenarios) -> None:
    found = scenarios.found["plain"]
    returned = load_file(scenarios.folder / "plain" / "result-4.safetensors")
    with opened(scenarios.ledger("plain")) as ledger:
        final = ledger.final
        for name, array in {**final.params.exported(), **final.buffers}.items():
            np.testing.assert_array_equal(returned[name], array)
        assert int(final.buffers["norm.num_batches_tracked"]) == 16
        sent = ledger.last_buffers()
        assert set(sent) == {update.client for update in ledger.updates_in(3)}
        assert all(own.keys() == set(BUFFERS) for own in sent.values())
    assert found["order"] == [BUFFERS[0], "w", BUFFERS[1], "b"]


def test_metrics_and_evaluation_are_those_of_the_wrapped_strategy(
    scenarios: Scenarios,
) -> None:
    found = scenarios.found["plain"]
    assert found["asked"] == [0, 1, 2, 3, 4]
    assert found["evaluated"] == [1, 2, 3, 4]
    expected = sum(number * (number + 1) for number in range(5)) / 15
    assert found["losses"]["1"] == pytest.approx(expected)


def test_the_order_of_arrival_makes_no_difference(scenarios: Scenarios) -> None:
    with (
        opened(scenarios.ledger("plain")) as plain,
        opened(scenarios.ledger("backwards")) as backwards,
    ):
        assert plain.chain == backwards.chain
        model, other = plain.final.params.flat, backwards.final.params.flat
        np.testing.assert_array_equal(model, other)


@pytest.mark.parametrize(
    ("name", "aggregation"),
    [("prox", "mean"), ("median", "median"), ("trimmed", "trimmed-mean:0.2")],
)
def test_each_strategy_is_recorded_as_what_it_is(
    scenarios: Scenarios, name: str, aggregation: str
) -> None:
    with opened(scenarios.ledger(name)) as ledger:
        assert ledger.settings.aggregation == aggregation
        assert participants(ledger) == [CLIENTS] * 3
        assert not verify_ledger(ledger).problems


def test_only_a_sample_is_kept_if_asked_and_everybody_counts(
    scenarios: Scenarios,
) -> None:
    with (
        opened(scenarios.ledger("sampled")) as sampled,
        opened(scenarios.ledger("prox")) as whole,
    ):
        kept = [u.kept for i in range(3) for u in sampled.updates_in(i)]
        assert len(kept) == 15
        assert 0 < sum(kept) < 15
        assert sampled.settings.update_dtype == "int8"
        np.testing.assert_array_equal(
            sampled.final.params.flat, whole.final.params.flat
        )


def test_sums_and_a_budget_are_kept_to(scenarios: Scenarios) -> None:
    with (
        opened(scenarios.ledger("sums")) as sums,
        opened(scenarios.ledger("prox")) as whole,
    ):
        assert (sums.settings.history, sums.settings.budget) == ("sums", 10**8)
        np.testing.assert_array_equal(sums.final.params.flat, whole.final.params.flat)


def test_a_strategy_that_draws_clients_is_recorded_as_drawn(
    scenarios: Scenarios,
) -> None:
    with opened(scenarios.ledger("some")) as ledger:
        drawn = participants(ledger)
    assert [len(names) for names in drawn] == [2] * 4
    seen = scenarios.seen("some")
    for index, names in enumerate(drawn):
        told = {line for line in seen if line.endswith(f" {index + 1}")}
        trained = {f"train {name[-1]} {index + 1}" for name in names}
        assert trained == {line for line in told if line.startswith("train")}


def test_a_broken_client_is_left_out_of_its_round_and_named(
    scenarios: Scenarios,
) -> None:
    broken = ["client-1", "client-2", "client-3", "client-4", "client-0"]
    with opened(scenarios.ledger("faults")) as ledger:
        expected = [[c for c in CLIENTS if c != gone] for gone in ["", *broken]]
        assert participants(ledger) == expected
        assert np.isfinite(ledger.final.params.flat).all()
    failures = scenarios.failures("faults")
    assert [(f["round"], f["client"]) for f in failures] == [
        (number, client) for number, client in enumerate(broken, start=2)
    ]
    reasons = [failure["reason"] for failure in failures]
    assert reasons[0] == "it failed: no data today"
    assert reasons[1] == "its parameters have NaN or infinite values"
    assert reasons[2] == "parameter 'w' has shape (2, 2), not (3, 2)"
    assert reasons[3].startswith("its update has norm 2.45e+06, the round's median is")
    assert reasons[4].startswith("parameter names differ")
    log = (scenarios.folder / "log.txt").read_text()
    assert "round 3 without 'client-2': its parameters have NaN or infinite" in log


def test_a_round_with_too_few_updates_is_repeated(scenarios: Scenarios) -> None:
    with opened(scenarios.ledger("repeated")) as ledger:
        assert participants(ledger) == [CLIENTS]
    failed = [failure["client"] for failure in scenarios.failures("repeated")]
    assert failed == ["client-1", "client-2"]
    trained = [s for s in scenarios.seen("repeated") if s.startswith("train 0")]
    assert trained == ["train 0 1"] * 2


def test_a_round_that_never_has_enough_fails_and_records_nothing(
    scenarios: Scenarios,
) -> None:
    error = scenarios.found["hopeless"]["error"]
    assert error.startswith(
        "RoundDiscardedError: round 1 is discarded: it brought 3 usable replies and "
    )
    assert "discarded round 2 in a row" in error
    with opened(scenarios.ledger("hopeless")) as ledger:
        assert ledger.num_rounds == 0
    assert len(scenarios.failures("hopeless")) == 4


def test_a_strategy_that_is_not_what_it_says_is_found_out(
    scenarios: Scenarios,
) -> None:
    assert "Wrong does not compute the mean" in scenarios.found["wrong"]["error"]
    with opened(scenarios.ledger("wrong")) as ledger:
        assert ledger.num_rounds == 0


def test_forgetting_through_flower_is_forgetting_on_the_command_line(
    scenarios: Scenarios,
) -> None:
    copy = scenarios.folder / "forget" / "copy"
    command = [sys.executable, "-m", "fastfedul", "forget", str(copy), "client-1"]
    subprocess.run([*command, "--erase", "--json"], check=True, capture_output=True)
    cleaned = load_file(scenarios.folder / "forget" / "result-3.safetensors")
    with opened(copy) as ledger:
        final = ledger.final
        for name, array in {**final.params.exported(), **final.buffers}.items():
            np.testing.assert_array_equal(cleaned[name], array)
        np.testing.assert_raises(
            AssertionError,
            np.testing.assert_array_equal,
            cleaned["w"],
            ledger.initial.params["w"],
        )


def test_training_goes_on_without_the_forgotten(scenarios: Scenarios) -> None:
    with opened(scenarios.ledger("forget")) as ledger:
        found = states(ledger)
        assert found == {
            **dict.fromkeys(CLIENTS, "active"),
            "client-1": "erased",
            "client-3": "erased",
        }
        assert [r.state for r in ledger.requests()] == ["applied", "applied"]
        assert participants(ledger)[3:] == [["client-0", "client-2", "client-4"]] * 3
        assert not verify_ledger(ledger).problems
    folder = scenarios.folder / "forget" / "certificates"
    assert len(list(folder.glob("*.json"))) == 2
    assert scenarios.found["forget"]["rest"]["min_available"] == 3


def test_a_forgotten_client_never_gets_a_message_again(scenarios: Scenarios) -> None:
    seen = scenarios.seen("forget")
    trained = [line for line in seen if line.startswith("train 1 ")]
    assert trained == [f"train 1 {number}" for number in (1, 2, 3)]
    evaluated = [line for line in seen if line.startswith("evaluate 1 ")]
    assert evaluated == [f"evaluate 1 {number}" for number in (1, 2, 3)]
    # Asked for after round 4, so it was in round 5, which was under way by then.
    trained = [line for line in seen if line.startswith("train 3 ")]
    assert trained == [f"train 3 {number}" for number in (1, 2, 3, 4, 5)]
    evaluated = [line for line in seen if line.startswith("evaluate 3 ")]
    assert evaluated == [f"evaluate 3 {number}" for number in (1, 2, 3, 4)]


def test_who_was_seen_is_kept_beside_the_ledger(scenarios: Scenarios) -> None:
    text = (scenarios.folder / "plain" / "ledger.nodes.json").read_text()
    assert json.loads(text) == {"clients": dict.fromkeys(CLIENTS)}


def test_the_log_has_flowers_own_lines(scenarios: Scenarios) -> None:
    log = (scenarios.folder / "log.txt").read_text("utf-8")
    for line in (
        "Starting Recorded strategy:",
        "Number of rounds: 4",
        "Initial global evaluation results: {'sum':",
        "└──> Aggregated MetricRecord: {'loss':",
        "Global evaluation",
        "└──> MetricRecord: {'sum':",
        "Strategy execution finished in ",
        "Final results:",
        "ServerApp-side Evaluate Metrics:",
    ):
        assert line in log, line


def test_a_finished_run_says_how_to_train_more(scenarios: Scenarios) -> None:
    log = (scenarios.folder / "log.txt").read_text("utf-8")
    told = "all 3 rounds are recorded; raise num_rounds"
    assert log.count(told) == 1
    _, _, rest = log.partition(told)
    assert "going on with round 4 of " in rest
    assert "[ROUND" not in rest.partition("Final results:")[0]


def test_a_killed_server_goes_on_and_no_round_is_lost_or_doubled(
    simulations: Simulations, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    ledger = folder / "killed" / "ledger"
    process = simulations.start(folder, "1000")
    try:
        wait_for_rounds(ledger, 3, process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with opened(ledger) as stopped:
        before = stopped.num_rounds
    assert before >= 3
    simulations.finish(folder, str(before + 2))
    with opened(ledger) as whole:
        assert participants(whole) == [CLIENTS] * (before + 2)
        assert whole.chain == by_hand(tmp_path / "ledger", before + 2)
        assert not verify_ledger(whole).problems
    seen = (folder / "killed" / "seen.txt").read_text().splitlines()
    assert seen.count(f"train 0 {before + 2}") == 1
    assert seen.count(f"train 0 {before}") == 1


def wait_for_rounds(
    ledger: Path, num_rounds: int, process: subprocess.Popen[bytes]
) -> None:
    while process.poll() is None:
        with suppress(LedgerError), opened(ledger) as running:
            if running.num_rounds >= num_rounds:
                return
        time.sleep(0.05)
    pytest.fail("the simulation ended before it was killed")


def test_prometheus_finds_rounds_stages_and_failures(scenarios: Scenarios) -> None:
    before, _, after = scenarios.found["watched"]["pages"]
    assert "fastfedul_rounds_total 0.0" in before
    assert "fastfedul_rounds_total 2.0" in after
    assert 'failures_total{outcome="left out",task="train"} 1.0' in after
    assert 'stage_seconds_count{stage="train"} 2.0' in after
    assert 'stage_seconds_count{stage="record"} 2.0' in after
    assert 'stage_seconds_count{stage="evaluate"} 2.0' in after
    assert "client-" not in after
