"""Metrics for Prometheus: what they say, who serves them, and the board's queries."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="needs the extra watch")

from prometheus_client.parser import text_string_to_metric_families

from fastfedul import DiskLedger, RunConfig, add_request, forget, train
from fastfedul.errors import InvalidInputError
from fastfedul.ledger.failures import FailureEntry, failures_of, note_failures
from fastfedul.ledger.store.folder import INDEX
from fastfedul.runs import metrics_file
from fastfedul.runs.stages import STAGES, StageTimes
from fastfedul.watching import Metrics, served_metrics
from tests.support.disk_ledgers import record

BOARD = Path(__file__).parents[1] / "examples" / "grafana" / "fastfedul.json"

pytestmark = pytest.mark.usefixtures("own_configuration")


@pytest.fixture
def own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("FASTFEDUL_KEY", raising=False)


def values(text: str) -> dict[str, float]:
    """Return every sample: its name with its labels, and its value."""
    return {
        " ".join([sample.name, *map(str, sample.labels.values())]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped(metrics: Metrics) -> dict[str, float]:
    return values(metrics.text("")[0].decode())


def get(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return str(answer.read().decode())


def fail(ledger: Path, task: str, outcome: str, client: str = "b") -> None:
    entry = FailureEntry("2026-01-01T00:00:00+00:00", 1, task, client, outcome, "why")
    note_failures(ledger, [entry])


def test_a_scrape_says_what_the_ledger_says_and_names_no_client(tmp_path: Path) -> None:
    ledger = record(tmp_path / "ledger", 4)
    metrics = Metrics(ledger)
    found = scraped(metrics)
    assert found["fastfedul_rounds_total"] == 4
    assert found["fastfedul_clients active"] == 4
    assert found["fastfedul_ledger_readable"] == 1
    assert found["fastfedul_oldest_request_age_seconds"] == 0
    with DiskLedger(ledger) as opened:
        assert found["fastfedul_ledger_bytes"] == opened.num_array_bytes()
    assert "fastfedul_budget_bytes" not in found
    add_request(ledger, "a", "no <b>reason</b>")
    waiting = scraped(metrics)
    assert waiting["fastfedul_requests_waiting"] == 1
    assert 0 <= waiting["fastfedul_oldest_request_age_seconds"] < 60
    with DiskLedger(ledger) as opened:
        forget(opened, ["b"])
    text = metrics.text("")[0].decode()
    assert values(text)["fastfedul_clients erased"] == 1
    assert "reason" not in text
    assert not re.search(r'="(a|b)"', text)


def test_failures_are_counted_once_each_also_when_a_line_is_not_whole_yet(
    tmp_path: Path,
) -> None:
    ledger = record(tmp_path / "ledger", 1)
    metrics = Metrics(ledger)
    left_out = "fastfedul_failures_total left out train"
    assert scraped(metrics)[left_out] == 0
    fail(ledger, "train", "left out", '"outcome": "left out"\n')
    fail(ledger, "evaluate", "capped")
    fail(ledger, "nonsense", "left out")
    assert scraped(metrics)[left_out] == 1
    assert scraped(metrics)["fastfedul_failures_total capped evaluate"] == 1
    file = failures_of(ledger)
    line = file.read_bytes().splitlines(keepends=True)[0]
    with file.open("ab") as lines:
        lines.write(line[:20])
    assert scraped(metrics)[left_out] == 1
    with file.open("ab") as lines:
        lines.write(line[20:] + b"[1]\n" + b"no json\n")
    assert scraped(metrics)[left_out] == 2
    file.write_bytes(line)
    assert scraped(metrics)[left_out] == 1


def test_a_damaged_ledger_is_said_to_be_unreadable(tmp_path: Path) -> None:
    ledger = record(tmp_path / "ledger", 2)
    (ledger / INDEX).write_bytes(b"x" * 5000)
    assert scraped(Metrics(ledger)) == {"fastfedul_ledger_readable": 0}


def test_metrics_are_served_on_this_machine_alone_and_until_the_block_ends(
    tmp_path: Path,
) -> None:
    ledger = tmp_path / "ledger"
    with served_metrics(ledger, 0, StageTimes()) as port:
        assert values(get(port))["fastfedul_ledger_readable"] == 1
        assert "fastfedul_rounds_total" not in get(port)
        record(ledger, 3)
        assert values(get(port))["fastfedul_rounds_total"] == 3
        others = {
            info[4][0] for info in socket.getaddrinfo(socket.gethostname(), port)
        } - {"127.0.0.1", "::1"}
        for address in others:
            with contextlib.closing(socket.socket()) as probe:
                probe.settimeout(2)
                assert probe.connect_ex((address, port)) != 0
        with (
            pytest.raises(InvalidInputError, match="cannot serve metrics on port"),
            served_metrics(ledger, port),
        ):
            pass
    with pytest.raises(OSError, match="refused"):
        get(port)
    with (
        pytest.raises(InvalidInputError, match="metrics port"),
        served_metrics(ledger, 65536),
    ):
        pass


@pytest.mark.slow
def test_a_training_tells_the_seconds_of_its_stages(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the extra torch")
    config = RunConfig.from_options(
        train_size=120, clients=3, rounds=3, epochs=1, workers=1, forget=["client-0@2"]
    )
    stages, seen = StageTimes(), []
    with served_metrics(tmp_path / "run", 0, stages) as port:
        train(config, tmp_path / "run", lambda _: seen.append(get(port)), stages=stages)
        found = values(get(port))
    rounds = [values(text)["fastfedul_rounds_total"] for text in seen]
    assert rounds == [1, 2, 3]
    assert found["fastfedul_rounds_planned"] == 3
    assert 0 <= found["fastfedul_accuracy"] <= 1
    counts = {s: found[f"fastfedul_stage_seconds_count {s}"] for s in STAGES}
    assert counts == {"train": 3, "record": 3, "evaluate": 3, "forget": 1}
    spent = {s: found[f"fastfedul_stage_seconds_sum {s}"] for s in STAGES}
    assert all(seconds > 0 for seconds in spent.values())
    measured = metrics_file.read(tmp_path / "run" / "metrics.jsonl").values()
    assert spent["train"] < sum(one.seconds or 0 for one in measured)


def test_every_query_of_the_board_names_metrics_that_exist(tmp_path: Path) -> None:
    ledger = record(tmp_path / "ledger", 4)
    text = Metrics(ledger, StageTimes()).text("")[0].decode()
    # A metric may have no sample yet, such as the budget of a ledger without one.
    known = {
        *re.findall(r"^# TYPE (\S+)", text, re.M),
        *re.findall(r"^\w+", text, re.M),
    }
    board = json.loads(BOARD.read_text("utf-8"))
    queries = [t["expr"] for panel in board["panels"] for t in panel["targets"]]
    queries += [v["query"] for v in board["templating"]["list"]]
    named = {name for query in queries for name in re.findall(r"fastfedul_\w+", query)}
    assert len(named) > 10
    assert named <= known
    for stage in re.findall(r'stage="(\w+)"', "".join(queries)):
        assert stage in STAGES
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
