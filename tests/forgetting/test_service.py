"""One forgetting, whoever asks for it: the same files exist afterwards and agree."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from safetensors.numpy import load_file

import fastfedul as ff
from fastfedul.errors import (
    AlreadyForgottenError,
    FastFedULError,
    InvalidInputError,
    UnlearnRefusedError,
)
from fastfedul.forgetting.certificates import read_certificate
from fastfedul.forgetting.checking import audit
from fastfedul.forgetting.folder import bring_up_to_date, write_run_model
from fastfedul.forgetting.service import NOBODY_STAYS
from fastfedul.methods.protocol import Needs, UnlearnRequest, UnlearnResult
from fastfedul.rng import stream
from tests.support.rounds import random_round

CLIENTS = ("ann", "bob", "cyd")
START = ff.Params.of({"w": np.zeros((8, 5), np.float32)})


@pytest.fixture(autouse=True)
def _no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTFEDUL_KEY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A trained run: a ledger, the options, and the model that people deploy."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text("# fastfedul run\n")
    with ff.DiskLedger.create(folder / "ledger", ff.Model(START)) as ledger:
        record(ledger)
        write_run_model(ledger, folder / "model.safetensors")
    return folder


def record(ledger: ff.DiskLedger | ff.MemoryLedger) -> None:
    for index in range(4):
        rng = stream(3, "service", index)
        ledger.append(random_round(index, CLIENTS, START.layout, rng))


def by_python(run: Path) -> None:
    with ff.DiskLedger(run) as ledger:
        done = ff.forget(ledger, ["bob"])
        assert done.certificate == run / "certificates" / "event-1.json"
        assert done.erased
        assert done.committed


def by_request(run: Path) -> None:
    ff.add_request(run, "bob")
    with ff.DiskLedger(run) as ledger:
        [done] = ff.apply_requests(ledger)
        assert done.certificate == run / "certificates" / "1.json"


def by_command(run: Path) -> None:
    command = [sys.executable, "-m", "fastfedul", "forget", str(run), "bob", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["model"] == str(run / "model.safetensors")


def by_flower(run: Path) -> None:
    """A server that goes on with the run's ledger answers what was asked before."""
    pytest.importorskip("flwr")
    from flwr.app import Array, ArrayRecord
    from flwr.serverapp.strategy import FedAvg

    from fastfedul.integrations.flower import Recorded

    ff.add_request(run, "bob")
    with Recorded(FedAvg(), run / "ledger") as strategy:
        arrays = ArrayRecord({"w": Array(np.zeros((8, 5), np.float32))})
        strategy._run.open(arrays)


WAYS = (by_python, by_request, by_command, by_flower)


def test_the_log_of_flower_has_the_warnings_of_an_answered_request(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("flwr")
    with caplog.at_level("WARNING", logger="flwr"):
        by_flower(run)
    assert "request 1: how clients train is not recorded" in caplog.text


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_forget_leaves_the_same_files(
    way: Callable[[Path], None], run: Path, tmp_path: Path
) -> None:
    reference = tmp_path / "reference"
    shutil.copytree(run, reference)
    by_python(reference)
    old = load_file(run / "model.safetensors")["w"]
    way(run)
    assert {p.name for p in run.iterdir() if not p.name.startswith(".")} >= {
        "certificates",
        "config.toml",
        "ledger",
        "model.safetensors",
    }
    with ff.LedgerReader(run) as ledger, ff.LedgerReader(reference) as other:
        assert ledger.clients()["bob"].state == "erased"
        assert ledger.updates_of("bob") == ()
        assert ledger.chain == other.chain
        [event] = ledger.events()
        assert event.kind == "forget and erase"
        assert event.details["settings"] == other.events()[0].details["settings"]
        new = load_file(run / "model.safetensors")["w"]
        np.testing.assert_array_equal(new, ledger.final.params["w"])
        np.testing.assert_array_equal(new, other.final.params["w"])
        assert not np.array_equal(new, old)
        [certificate] = (run / "certificates").iterdir()
        found = audit(read_certificate(certificate), ledger)
        assert found.failed == ()
        assert "holds" in {c.verdict for c in found.checks if c.name == "log"}


def test_a_preview_changes_nothing_and_tells_what_forgetting_gives(run: Path) -> None:
    before = sorted((p, p.stat().st_mtime_ns) for p in run.rglob("*"))
    with ff.LedgerReader(run) as ledger:
        seen = ff.preview(ledger, ["bob"])
    assert sorted((p, p.stat().st_mtime_ns) for p in run.rglob("*")) == before
    assert (seen.committed, seen.erased, seen.certificate) == (False, False, None)
    assert (seen.coverage, seen.rounds) == (1.0, 4)
    with ff.DiskLedger(run) as writer:
        done = ff.forget(writer, ["bob"])
    np.testing.assert_array_equal(done.model.params.flat, seen.model.params.flat)
    assert done.delta_norm == seen.delta_norm


def test_a_ledger_in_memory_is_forgotten_from_without_files() -> None:
    ledger = ff.MemoryLedger.create(ff.Model(START))
    record(ledger)
    done = ff.forget(ledger, ["bob"])
    assert done.certificate is None
    assert ledger.clients()["bob"].state == "erased"


def test_forgetting_everybody_is_warned_about(run: Path) -> None:
    with ff.LedgerReader(run) as ledger:
        assert NOBODY_STAYS in ff.preview(ledger, CLIENTS).warnings
        assert NOBODY_STAYS not in ff.preview(ledger, CLIENTS[:2]).warnings


@pytest.mark.parametrize("lost", ["model", "certificate", "both", "stale model"])
def test_what_a_crash_left_undone_is_done_by_the_next_call(
    run: Path, lost: str
) -> None:
    old = (run / "model.safetensors").read_bytes()
    by_python(run)
    certificate = run / "certificates" / "event-1.json"
    expected = (run / "model.safetensors").read_bytes(), certificate.read_bytes()
    if lost in ("both", "stale model"):
        (run / "model.safetensors").write_bytes(old)
    if lost == "model":
        (run / "model.safetensors").write_bytes(b"half a file")
    if lost in ("both", "certificate"):
        certificate.unlink()
    with ff.DiskLedger(run) as ledger, pytest.raises(AlreadyForgottenError):
        ff.forget(ledger, ["bob"])
    assert (run / "model.safetensors").read_bytes() == expected[0]
    assert certificate.read_bytes() == expected[1]
    with ff.DiskLedger(run) as ledger:
        assert bring_up_to_date(ledger, None) == ()


def test_a_model_file_that_cannot_be_replaced_is_told(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Path, target: Path) -> Path:
        raise PermissionError(1, "Operation not permitted", str(self))

    with ff.DiskLedger(run) as ledger:
        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", fail)
            with pytest.raises(
                FastFedULError, match=r"still holds the old model.*repeat"
            ):
                ff.forget(ledger, ["bob"])
        with pytest.raises(AlreadyForgottenError):
            ff.forget(ledger, ["bob"])
        new = load_file(run / "model.safetensors")["w"]
        np.testing.assert_array_equal(new, ledger.final.params["w"])


def test_a_model_file_of_somebody_else_is_left_alone(run: Path) -> None:
    (run / "config.toml").unlink()
    before = (run / "model.safetensors").read_bytes()
    by_python(run)
    assert (run / "model.safetensors").read_bytes() == before


@dataclass(frozen=True)
class Zeros:
    """Gives a model of zeros, whoever is forgotten."""

    depth: int = 3
    name: ClassVar[str] = "zeros"
    needs: ClassVar[Needs] = Needs()

    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        zeros = ff.Params.zeros(request.ledger.settings.layout)
        return UnlearnResult(params=zeros, clients=tuple(request.forget))


def test_any_method_can_be_used_and_is_named_in_log_and_certificate(run: Path) -> None:
    ff.add_request(run, "bob")
    with ff.DiskLedger(run) as ledger:
        [done] = ff.apply_requests(ledger, method=Zeros(5))
        assert not ledger.final.params.flat.any()
        details = ledger.events()[0].details
        assert (details["method"], details["settings"]) == ("zeros", {"depth": 5})
        assert done.certificate is not None
        certificate = read_certificate(done.certificate)
        method = certificate.predicate.method
        assert method is not None
        assert (method.name, method.settings) == ("zeros", {"depth": 5})
        found = audit(certificate, ledger)
    assert found.failed == ()


def test_a_method_that_needs_clients_leaves_requests_waiting(run: Path) -> None:
    from fastfedul.methods.retrain import Retrain

    ff.add_request(run, "bob")
    with ff.DiskLedger(run) as ledger:
        with pytest.raises(InvalidInputError, match="the requests still wait"):
            ff.apply_requests(ledger, method=Retrain())
        assert ledger.requests()[0].state == "waiting"
        with pytest.raises(UnlearnRefusedError, match="needs the help of"):
            ff.forget(ledger, ["bob"], Retrain())
        assert ledger.clients()["bob"].state == "active"


@pytest.mark.parametrize(
    ("method", "said"),
    [(Zeros, "it is a class"), ("fast-fedul", "no method"), (3, "no method")],
)
def test_what_is_no_method_is_refused_before_anything_happens(
    run: Path, method: object, said: str
) -> None:
    with ff.DiskLedger(run) as ledger:
        with pytest.raises(InvalidInputError, match=said):
            ff.forget(ledger, ["bob"], method)  # type: ignore[arg-type]
        assert ledger.clients()["bob"].state == "active"


def test_a_result_shows_itself_in_a_notebook_with_names_as_text() -> None:
    ledger = ff.MemoryLedger.create(ff.Model(START))
    name = "<script>alert(1)</script>"
    rng = stream(3, "notebook")
    ledger.append(random_round(0, (name, "ann"), START.layout, rng))
    shown = ff.preview(ledger, [name])._repr_html_()
    assert "&lt;script&gt;" in shown
    assert "<script>" not in shown
