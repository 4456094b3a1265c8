"""`fastfedul status`: what it shows, and when it asks for somebody."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastfedul import DiskLedger, add_request
from fastfedul.ledger.failures import FailureEntry, failures_of, note_failures
from fastfedul.runs.metrics_file import RoundMetrics, append, metrics_beside
from tests.support.commands import run, run_json
from tests.support.damage import array_of
from tests.support.disk_ledgers import record, round_of

pytestmark = pytest.mark.usefixtures("own_configuration")


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return record(tmp_path / "ledger", 4)


def test_a_new_ledger_is_to_be_verified_and_to_say_how_it_is_evaluated(
    ledger: Path,
) -> None:
    found = run_json("status", ledger)
    assert (found["rounds"], found["last_clients"]) == (4, 4)
    assert found["clients"] == {"active": 4, "forgotten": 0, "erased": 0}
    assert found["verified"] is None
    assert any("ledger verify" in text for text in found["advice"])
    assert any('ledger.federation.toml: model = "' in text for text in found["advice"])
    assert not any("docs/" in text for text in found["advice"])
    assert found["bytes"] > 0
    assert found["writer"] is None
    text = run("status", ledger).stdout
    assert "never verified" in text
    assert "nobody" in text


def test_a_verification_is_noted_and_damage_is_a_problem(ledger: Path) -> None:
    run("ledger", "verify", ledger)
    found = run_json("status", ledger, "--alert")
    assert found["verified"]["problems"] == []
    assert found["verified"]["rounds"] == 4
    assert "intact at" in run("status", ledger).stdout
    array_of(ledger, round_=2, client="b").flip(-1)
    run("ledger", "verify", ledger, code=1)
    found = run_json("status", ledger, "--alert", code=1)
    assert "round 2" in found["problems"][0]
    assert run_json("status", ledger)["problems"]


def test_a_request_that_waits_too_long_is_a_problem(ledger: Path) -> None:
    add_request(ledger, "a", "no <b>reason</b>")
    found = run_json("status", ledger, "--alert")
    assert [one["client"] for one in found["waiting"]] == ["a"]
    assert any("request apply" in text for text in found["advice"])
    late = run_json("status", ledger, "--alert", "--max-wait", 0, code=1)
    assert "request 1 has waited" in late["problems"][0]
    assert "1 waits" in run("status", ledger).stdout


def test_a_writer_is_seen_without_taking_its_lock(ledger: Path) -> None:
    if not Path("/proc/locks").is_file():
        pytest.skip("needs /proc/locks, which Linux has")
    with DiskLedger(ledger) as writer:
        found = run_json("status", ledger)
        writer.append(round_of(4))
        assert found["writer"] is not None
        assert run_json("status", ledger)["rounds"] == 5
    assert run_json("status", ledger)["writer"] is None


def test_an_accuracy_before_a_forgetting_is_told_as_such(ledger: Path) -> None:
    append(metrics_beside(ledger), RoundMetrics(3, 0.9, None, 1.0))
    assert run_json("status", ledger)["forgot_since_metrics"] is False
    assert "accuracy 90.0%;" in run("status", ledger).stdout
    run("forget", ledger, "a")
    assert run_json("status", ledger)["forgot_since_metrics"] is True
    shown = " ".join(run("status", ledger).stdout.split())
    assert "accuracy 90.0%, before the last forgetting;" in shown
    with DiskLedger(ledger) as writer:
        writer.append(round_of(4, clients=("b", "c")))
    append(metrics_beside(ledger), RoundMetrics(4, 0.8, None, 1.0))
    assert "accuracy 80.0%;" in run("status", ledger).stdout


def test_failures_are_counted_and_the_last_rounds_are_named(ledger: Path) -> None:
    entries = [
        FailureEntry(
            "2026-01-01T00:00:00+00:00", number, "train", name, "left out", "x"
        )
        for number, name in ((3, "a"), (4, "b"))
    ]
    note_failures(ledger, entries)
    with failures_of(ledger).open("a") as file:
        file.write('{"time": "cut o')
    found = run_json("status", ledger)
    assert found["failures"] == 2
    assert [one["client"] for one in found["last_failures"]] == ["b"]
    assert "in the last round b" in run("status", ledger).stdout


def test_a_note_that_is_no_note_is_passed_over(ledger: Path) -> None:
    note = ledger.with_name("ledger.verified.json")
    for text in ("", "[]", json.dumps({"time": 3}), "\x00"):
        note.write_text(text)
        assert run_json("status", ledger)["verified"] is None
