"""`fastfedul ledger compact`, `train --keep sums` and `train --budget` on the line."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fastfedul import DiskLedger, LedgerReader, Model, Params
from tests.support.commands import COMMAND, run, run_json
from tests.support.rounds import random_round

NAMES = ("ann", "bob", "cyd")


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Six rounds of three clients."""
    rng = np.random.default_rng(5)
    start = Params.of({"w": np.zeros(500, np.float32)})
    with DiskLedger.create(tmp_path / "ledger", Model(start)) as made:
        for index in range(6):
            made.append(random_round(index, NAMES, start.layout, rng))
    return tmp_path / "ledger"


def history_of(path: Path) -> str:
    with LedgerReader(path) as ledger:
        return ledger.settings.history


def test_without_yes_and_without_a_terminal_nothing_happens(ledger: Path) -> None:
    found = run("ledger", "compact", ledger, code=2)
    assert "add --yes" in found.stderr
    assert "Losses:" in found.stdout
    assert history_of(ledger) == "rounds"
    facts = json.loads(run("ledger", "compact", ledger, "--dry-run", "--json").stdout)
    assert facts["dry_run"]
    assert facts["bytes_after"] < facts["bytes_before"]
    assert any("FedEraser" in text for text in facts["lost"])
    assert history_of(ledger) == "rounds"


def test_on_a_terminal_it_asks_first(ledger: Path) -> None:
    for answer, history, code in ((b"n\n", "rounds", 1), (b"y\n", "sums", 0)):
        ours, theirs = pty.openpty()
        asked = subprocess.Popen(
            [*COMMAND, "ledger", "compact", str(ledger)],
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        os.write(ours, answer)
        out, error = asked.communicate(timeout=100)
        os.close(ours)
        os.close(theirs)
        assert asked.returncode == code, error.decode()
        assert b"Losses:" in out
        assert b"Remove the rounds for good?" in error
        assert b"Traceback" not in error
        assert history_of(ledger) == history


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    """A ledger of sums in which bob misses every other round."""
    rng = np.random.default_rng(6)
    start = Params.of({"w": np.zeros(500, np.float32)})
    with DiskLedger.create(tmp_path / "u", Model(start), history="sums") as made:
        for index in range(6):
            here = NAMES if index % 2 else ("ann", "cyd")
            made.append(random_round(index, here, start.layout, rng))
    return tmp_path / "u"


def test_forget_says_beforehand_whose_sums_an_erasure_gives_up(uneven: Path) -> None:
    seen = run("forget", uneven, "bob", "--dry-run")
    told = " ".join(seen.stderr.split())
    assert "gives up the sums of 2 other clients ('ann', 'cyd')" in told
    assert "--keep-history keeps the sums" in told
    assert "2 other clients" in seen.stdout
    kept = run_json("forget", uneven, "bob", "--dry-run", "--keep-history")
    assert kept["given_up"] == []
    assert not any("gives up" in text for text in kept["warnings"])
    run("request", "add", uneven, "bob")
    [row] = run_json("request", "apply", uneven, "--dry-run")["requests"]
    assert row["given_up"] == ["ann", "cyd"]
    done = run_json("forget", uneven, "bob")
    assert done["given_up"] == ["ann", "cyd"]
    checked = run("certificate", "check", done["certificate"], code=3)
    assert "the sums of 2 other clients" in checked.stdout
    refused = run("forget", uneven, "ann", "--dry-run", code=1).stderr
    told = " ".join(refused.split())
    assert "gave up 6 of its updates, when it erased others" in told


def test_on_a_terminal_forget_asks_before_it_gives_up_sums(uneven: Path) -> None:
    for answer, state, code in ((b"n\n", "active", 1), (b"y\n", "erased", 0)):
        ours, theirs = pty.openpty()
        asked = subprocess.Popen(
            [*COMMAND, "forget", str(uneven), "bob"],
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        os.write(ours, answer)
        _, error = asked.communicate(timeout=100)
        os.close(ours)
        os.close(theirs)
        assert asked.returncode == code, error.decode()
        assert b"gives up the sums of 2 other clients" in b" ".join(error.split())
        assert b"Forget and erase?" in error
        with LedgerReader(uneven) as ledger:
            assert ledger.clients()["bob"].state == state


@pytest.mark.slow
def test_a_compacted_ledger_says_what_it_is_and_still_forgets(ledger: Path) -> None:
    before = run_json("forget", ledger, "bob", "--dry-run")
    facts = run_json("ledger", "compact", ledger, "--yes")
    assert facts["bytes_after"] == run_json("ledger", "info", ledger)["bytes"]
    info = run_json("ledger", "info", ledger)
    assert (info["history"], info["budget"]) == ("sums", None)
    assert [event["kind"] for event in info["events"]] == ["compact"]
    assert "a sum per client" in run("ledger", "info", ledger).stdout
    rows = run_json("ledger", "clients", ledger)["clients"]
    assert [(row["kept"], row["summed"]) for row in rows] == [(0, 6)] * 3
    assert run_json("ledger", "verify", ledger)["chain_covers_updates"] is False
    assert "not the updates" in run("ledger", "verify", ledger).stdout
    for options in (("--damping", 0.07), ("--skew", "none")):
        refused = run("forget", ledger, "bob", *options, code=1).stderr
        told = " ".join(refused.split())
        assert "needs the updates of rounds, and this ledger keeps sums" in told
        assert "the default method" in told
    after = run_json("forget", ledger, "bob", "--erase")
    assert (before["skew"], after["skew"]) == ("kronecker", "kronecker")
    # Which round a mark is of is lost, and all of the last one's does not go any more.
    assert 0.5 < after["delta_norm"] / before["delta_norm"] < 1
    assert 0 < after["used"]["updates"] <= 64
    assert after["coverage"] == 1
    assert after["bytes_read"] < before["bytes_read"]
    again = run("ledger", "compact", ledger, "--yes")
    assert "keeps sums already" in again.stdout


def test_only_clients_of_enough_rounds_get_a_sum(ledger: Path) -> None:
    refused = run("ledger", "compact", ledger, "--yes", "--keep", "top:2", code=2)
    assert "--keep is sums or sums:K here" in " ".join(refused.stderr.split())
    assert history_of(ledger) == "rounds"
    run("ledger", "compact", ledger, "--yes", "--keep", "sums:9")
    info = run_json("ledger", "info", ledger)
    assert (info["history"], info["sums_from"]) == ("sums", 9)
    told = run("ledger", "info", ledger).stdout
    assert "a sum per client of 9 rounds or more" in " ".join(told.split())
    with LedgerReader(ledger) as reader:
        assert reader.own_difference("bob").any()
        assert reader.head.num_parts == 18


def test_commands_say_what_the_budget_gave_up(ledger: Path) -> None:
    assert "given up" not in run("ledger", "info", ledger).stdout
    assert "given up" not in run("ledger", "clients", ledger).stdout
    rng = np.random.default_rng(6)
    with DiskLedger(ledger) as opened:
        opened.compact()
        size = opened.num_array_bytes() + opened.index.num_bytes()
        opened.set_budget(size - 12_000)
        layout = opened.settings.layout
        opened.append(random_round(6, ("ann", "bob"), layout, rng))
        lost = {n: e.num_dropped for n, e in opened.clients().items()}
        pairs = len(opened.pairs())
    assert sum(lost.values()) > 0
    info = run_json("ledger", "info", ledger)
    assert info["dropped"]["updates"] == sum(lost.values())
    assert info["dropped"]["pairs"] == 19 - pairs
    assert info["clients_with_drops"] == sum(n > 0 for n in lost.values())
    told = " ".join(run("ledger", "info", ledger).stdout.split())
    assert f"given up {sum(lost.values())} updates of" in told
    assert "for which the budget had no room" in told
    rows = run_json("ledger", "clients", ledger)["clients"]
    assert {row["client"]: row["dropped"] for row in rows} == lost
    assert "given up" in run("ledger", "clients", ledger).stdout
    gone = max(lost, key=lambda name: lost[name])
    refused = " ".join(run("forget", ledger, gone, code=1).stderr.split())
    assert "of its updates, for the budget" in refused


@pytest.fixture(scope="module")
def small_options() -> list[str]:
    pytest.importorskip("torch", reason="training needs the extra torch")
    return ["--clients", "4", "--epochs", "1", "--train-size", "300", "--workers", "1"]


@pytest.mark.slow
def test_a_run_with_sums_trains_resumes_and_forgets(
    small_options: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "run"
    planned = ["--forget", "client-2@3"]
    options = [*small_options, "--keep", "sums", "--rounds", 4, *planned]
    found = run("train", path, *options)
    assert f"fastfedul forget {path} client-0\n" in found.stdout
    with LedgerReader(path) as ledger:
        assert ledger.settings.history == "sums"
        assert ledger.clients()["client-2"].state == "erased"
    (path / "metrics.jsonl").unlink()
    assert run_json("train", path, "--resume", "--rounds", 5)["rounds"] == 5
    shown = run_json("compare", path, "--forget", "client-1")
    rows = [row["method"] for row in shown["rows"]]
    assert rows == ["before", "retrained", "fast-fedul"]
    assert shown["removed_by_layer"]
    assert "keeps sums" in json.dumps(shown)


@pytest.mark.slow
def test_a_run_keeps_its_budget_and_says_what_it_dropped(
    small_options: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "run"
    options = [*small_options, "--rounds", 12, "--budget", "4.2MB"]
    found = run("train", path, *options)
    assert "the budget had no room for" in " ".join(found.stderr.split())
    size = sum(p.stat().st_size for p in (path / "ledger").rglob("*") if p.is_file())
    assert size <= 4_200_000
    info = run_json("ledger", "info", path)
    assert info["budget"] == 4_200_000
    assert [event["kind"] for event in info["events"]] == ["drop"]
    assert "budget 4.0 MiB" in run("ledger", "info", path).stdout
    facts = run_json("train", path, "--resume", "--rounds", 13, "--budget", "1GB")
    assert facts["dropped"] == info["events"][0]["details"]["updates"]
    assert run_json("ledger", "info", path)["budget"] == 10**9


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--budget", "lots"], "write 500MB, 10GB or 2GiB"),
        (["--budget", "0"], "choose more"),
        (["--keep", "sums:0"], "1 or more"),
        (["--keep", "sums", "--keep-use", "aggregate"], "all of them must count"),
        (["--keep", "sum"], "sums or sums:3"),
    ],
)
def test_wrong_options_get_one_line(
    options: list[str], reason: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="training needs the extra torch")
    error = run("train", tmp_path / "run", *options, code=2).stderr
    assert reason in " ".join(error.split())
    assert not (tmp_path / "run" / "ledger").exists()
