"""`fastfedul request`, run as a user runs it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    LedgerReader,
    Model,
    Params,
    Round,
)
from fastfedul.rng import stream
from tests.support.commands import COMMAND, one_line, run, run_json

pytest.importorskip("cryptography")

pytestmark = pytest.mark.usefixtures("own_configuration")

NAMES = ("ann", "bob", "cyd")


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """A bare ledger; of `cyd`'s updates only one in ten was kept."""
    start = Params.of({"w": np.zeros(30, np.float32)})
    path = tmp_path / "history"
    with DiskLedger.create(path, Model(start)) as made:
        for index in range(10):
            rng = stream(4, "cli", index)
            updates = tuple(
                ClientUpdate(
                    name,
                    1 / 3,
                    Params(start.layout, rng.normal(size=30).astype(np.float32)),
                    keep_probability=1.0 if name != "cyd" else 0.1,
                    kept=name != "cyd" or index == 0,
                )
                for name in NAMES
            )
            made.append(Round(index, updates))
    return path


def await_that(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not what():
        assert process.poll() is None, "the training ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_client_leaves_a_training_that_runs(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    folder = tmp_path / "run"
    public = run_json("key", "new")["public_path"]
    options = ("--train-size", 200, "--clients", 4, "--epochs", 1, "--workers", 1)
    metrics = folder / "metrics.jsonl"
    with subprocess.Popen(
        [*COMMAND, "train", str(folder), *map(str, options), "--rounds", "5000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            await_that(lambda: metrics.exists() and bool(metrics.read_text()), process)
            asked = run_json(
                "request", "add", folder, "client-2", "--reason", "why not"
            )
            assert asked["state"] == "waiting"
            assert "is writing to" in one_line(run("request", "apply", folder, code=1))

            def state() -> str:
                with LedgerReader(folder) as ledger:
                    return ledger.requests()[0].state

            await_that(lambda: state() == "applied", process)
            at = metrics.read_text().count("\n")
            # Two rounds further on.
            await_that(lambda: metrics.read_text().count("\n") > at + 2, process)
        finally:
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "request 1, client-2: applied" in errors
    with LedgerReader(folder) as reader:
        client = reader.clients()["client-2"]
        assert client.state == "erased"
        assert client.forgotten_at is not None
        assert client.forgotten_at < reader.num_rounds - 1
        done = reader.num_rounds
        others = {"client-0", "client-1", "client-3"}
        for index in range(done):
            assert {u.client for u in reader.updates_in(index)} == others
    certificate = folder / "certificates" / "1.json"
    found = run_json("certificate", "check", certificate, "--public-key", public)
    assert found["ok"] is True
    assert found["certificate"]["requests"][0]["reason"] == "why not"
    assert found["certificate"]["rounds"]["recorded"] == client.forgotten_at
    assert run_json("ledger", "verify", folder)["ok"] is True
    # What is asked while nobody trains is applied first when training goes on.
    run("request", "add", folder, "client-0")
    resumed = run_json("train", folder, "--resume", "--rounds", done + 1)
    assert [row["state"] for row in resumed["requests"]] == ["applied"]
    assert resumed["requests"][0]["signed"] is True
    with LedgerReader(folder) as reader:
        names = {u.client for u in reader.updates_in(done)}
        assert names == {"client-1", "client-3"}
    second = resumed["requests"][0]["certificate"]
    assert run_json("certificate", "check", second, "--public-key", public)["ok"]
    assert run_json("ledger", "verify", folder)["ok"] is True


def test_requests_are_filed_listed_cancelled_applied_and_refused(ledger: Path) -> None:
    assert "There is no request" in run("request", "list", ledger).stdout
    run("request", "add", ledger, "cyd", "--reason", "moved [bold]away[/bold]")
    assert "Request 2" in run("request", "add", ledger, "bob").stdout
    run("request", "add", ledger, "ann")
    assert run_json("request", "cancel", ledger, 3)["state"] == "cancelled"
    shown = run("request", "apply", ledger)
    assert "only 10% of what client 'cyd'" in shown.stdout
    assert "key new" in shown.stderr
    listed = run_json("request", "list", ledger)["requests"]
    assert [row["state"] for row in listed] == ["refused", "applied", "cancelled"]
    assert "only 10%" in listed[0]["answer"]
    # Inside a ledger that is not called `ledger`, where no writer sweeps it.
    certificate = ledger / "certificates" / "2.json"
    assert listed[1]["certificate"] == str(certificate)
    table = run("request", "list", ledger).stdout
    assert "moved [bold]away[/bold]" in table
    DiskLedger(ledger).close()
    assert certificate.exists()
    unsigned = run_json("certificate", "check", certificate, code=3)
    assert unsigned["ok"] is unsigned["signed"] is False
    assert {check["verdict"] for check in unsigned["checks"]} == {
        "holds",
        "not checked",
    }
    assert "No request is waiting" in run("request", "apply", ledger).stdout


def test_apply_says_which_certificates_it_signed(ledger: Path) -> None:
    run("forget", ledger, "ann")
    run("key", "new")
    run("request", "add", ledger, "bob")
    certificates = ledger / "certificates"
    assert run("request", "apply", ledger).stdout.splitlines() == [
        f"Wrote {certificates / 'event-1.json'}, signed",
        f"Request 1, bob: applied; certificate {certificates / '1.json'}, signed",
    ]
    (certificates / "1.json").unlink()
    found = run_json("request", "apply", ledger)
    assert found == {"requests": [], "written": [str(certificates / "1.json")]}


@pytest.mark.slow
def test_bad_requests_get_one_line_that_says_what_to_do(
    ledger: Path, tmp_path: Path
) -> None:
    run("request", "add", ledger, "bob")
    again = one_line(run("request", "add", ledger, "bob", code=1))
    assert "waiting already; to ask otherwise, cancel request 1 first" in again
    near = one_line(run("request", "add", ledger, "anne", code=2))
    assert "did you mean 'ann'" in near
    run("forget", ledger, "ann", "--keep-history")
    gone = run("request", "add", ledger, "ann").stdout
    assert gone.startswith("Nothing to do: client 'ann' is forgotten already")
    assert run_json("request", "add", ledger, "ann")["already"] is True
    nowhere = one_line(run("request", "add", tmp_path / "none", "ann", code=2))
    assert "nothing at" in nowhere
    assert "no request 7" in one_line(run("request", "cancel", ledger, 7, code=2))
    run("request", "cancel", ledger, 1)
    closed = run("request", "cancel", ledger, 1).stdout
    assert "Nothing to do: request 1 was cancelled at" in closed
    decided = run_json("request", "cancel", ledger, 1)["decided"]
    assert f"cancelled at {decided}" in run("request", "list", ledger).stdout
    run("request", "add", ledger, "bob")
    run("forget", ledger, "bob")
    assert "was applied at" in one_line(run("request", "cancel", ledger, 2, code=1))
    run("request", "cancel", ledger, "one", code=2)
    run("request", "add", ledger, code=2)
    assert "0 to 1" in one_line(run("request", "apply", ledger, "--damping", 3, code=2))


def test_a_request_is_applied_as_forget_would_do_it(
    ledger: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ledger, copy)
    direct = run_json("forget", copy, "bob")
    run("request", "add", ledger, "bob")
    run("request", "apply", ledger)
    with LedgerReader(ledger) as one, LedgerReader(copy) as other:
        settings: Any = one.events()[-1].details["settings"]
        assert settings["skew"] == direct["skew"] == "kronecker"
        assert (one.final.params.flat == other.final.params.flat).all()


def test_a_broken_key_stops_everything_before_anything_is_forgotten(
    ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("request", "add", ledger, "bob")
    monkeypatch.setenv("FASTFEDUL_KEY", str(tmp_path / "missing.pem"))
    assert "key new" in one_line(run("request", "apply", ledger, code=2))
    assert "key new" in one_line(run("forget", ledger, "bob", code=2))
    (tmp_path / "missing.pem").write_text("nonsense")
    assert "chmod 600" in one_line(run("request", "apply", ledger, code=2))
    (tmp_path / "missing.pem").chmod(0o600)
    assert "no Ed25519" in one_line(run("request", "apply", ledger, code=2))
    assert run_json("request", "list", ledger)["requests"][0]["state"] == "waiting"


def test_a_request_names_the_papers_damping(ledger: Path) -> None:
    asked = run_json("request", "add", ledger, "ann", "--damping", 0.07)
    assert (asked["method"], asked["settings"]) == ("fast-fedul", {"damping": 0.07})
    [done] = run_json("request", "apply", ledger)["requests"]
    assert done["state"] == "applied"
    with LedgerReader(ledger) as reader:
        [event] = reader.events()
    assert "scalar" in str(event.details["settings"])
    said = one_line(run("request", "add", ledger, "bob", "--method", "x:y", code=2))
    assert "fastfedul methods" in said
