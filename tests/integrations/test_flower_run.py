"""The ledger of a run under Flower: what an existing one is gone on with, and how."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

if os.environ.get("CI") != "true":
    pytest.importorskip("flwr", reason="needs the extra flower")

from fastfedul import ClientUpdate, DiskLedger, Model, Params, Round
from fastfedul.errors import InvalidInputError, LedgerError
from fastfedul.integrations.flower.arrays import buffer_rule, to_record
from fastfedul.integrations.flower.rounds import RoundSettings
from fastfedul.integrations.flower.run import Answering, RecordedRun
from fastfedul.ledger.keeping import Keep
from fastfedul.methods.fast_fedul.method import FastFedUL
from fastfedul.params import Array
from fastfedul.records import KeepUse
from fastfedul.runs import metrics_file
from fastfedul.runs.evaluation_source import EvaluationSource, source_of
from tests.support.s3_server import S3Server, reached, server

__all__ = ["reached", "server"]

START = Model(Params.of({"w": np.zeros(3, np.float32)}))


def go_on(
    path: Path,
    keep: str,
    use: KeepUse = "store",
    arrays: str | None = None,
    budget: int | None = None,
    num_rounds: int = 1,
    evaluate: EvaluationSource | None = None,
) -> None:
    """Record one more round of `a` and `b`."""
    settings = RoundSettings(
        keep=Keep.parse(keep, use=use), arrays=arrays, budget=budget
    )
    answering = Answering(
        method=FastFedUL(), erase=True, certificates=path / "certificates", key=None
    )
    rule = buffer_rule(None)
    run = RecordedRun(path, settings, answering, rule, "Two of us", evaluate)
    run.open(to_record(START, ("w",)), num_rounds)
    delta = Params.of({"w": np.ones(3, np.float32)})
    updates = (ClientUpdate("a", 0.5, delta), ClientUpdate("b", 0.5, delta))
    try:
        run.append(settings.keep(Round(run.num_rounds, updates)))
    finally:
        run.close()


def test_a_ledger_of_rounds_does_not_go_on_with_sums(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    go_on(path, "all")
    with pytest.raises(LedgerError, match=f"`fastfedul ledger compact {path}` first"):
        go_on(path, "sums")
    go_on(path, "all")
    with DiskLedger(path) as ledger:
        assert [update.kept for update in ledger.updates_of("a")] == [True, True]
        assert ledger.settings.federation == "Two of us"


@pytest.mark.parametrize("keep", ["all", "sums", "uniform:1"])
def test_a_compacted_ledger_goes_on_with_sums_whatever_is_kept(
    keep: str, tmp_path: Path
) -> None:
    path = tmp_path / "ledger"
    go_on(path, "all")
    with DiskLedger(path) as ledger:
        ledger.compact()
    go_on(path, keep)
    with DiskLedger(path) as ledger:
        assert (ledger.num_rounds, ledger.settings.history) == (2, "sums")
        assert all(update.summed for update in ledger.updates_of("a"))


def test_a_ledger_of_sums_goes_on_with_sums_of_as_many_rounds(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    go_on(path, "sums:3")
    for wrong in ("sums", "sums:4"):
        with pytest.raises(LedgerError, match='keep="sums:3"'):
            go_on(path, wrong)
    go_on(path, "sums:3")
    with DiskLedger(path) as ledger:
        assert (ledger.num_rounds, ledger.settings.sums_from) == (2, 3)
        assert ledger.head.num_parts == 4


def test_a_ledger_of_sums_does_not_go_on_with_a_sample_in_the_model(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger"
    go_on(path, "sums")
    with pytest.raises(LedgerError, match=r'go on with keep_use="store"'):
        go_on(path, "uniform:1", "aggregate")


def test_a_budget_without_room_for_every_step_is_refused_before_there_is_a_ledger(
    tmp_path: Path,
) -> None:
    path, budget = tmp_path / "ledger", 200_000
    with pytest.raises(InvalidInputError, match="fewer rounds, or keep sums"):
        go_on(path, "all", budget=budget, num_rounds=100_000)
    assert list(tmp_path.iterdir()) == []
    go_on(path, "sums", budget=budget, num_rounds=100_000)


@pytest.mark.slow
def test_array_files_lie_on_a_store(tmp_path: Path, server: S3Server) -> None:
    bucket, path = server.bucket(), tmp_path / "ledger"
    address = f"s3://{bucket}/federation"
    go_on(path, "all", arrays=address)
    go_on(path, "all", arrays=address)
    with DiskLedger(path) as ledger:
        assert (ledger.files.address, ledger.num_rounds) == (address, 2)
    assert any("/arrays/" in key for key in server.objects(bucket))


def test_a_round_is_measured_and_other_processes_are_told_how(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    module = "tests.integrations.test_flower_run"
    own = EvaluationSource(model="x", trainer=f"{module}:make", test=f"{module}:asked")
    go_on(path, "all")
    go_on(path, "all", evaluate=own)
    assert source_of(path) == own
    [found] = metrics_file.read(metrics_file.metrics_of(path)).values()
    assert (found.round, found.main, found.backdoor) == (1, 0.5, None)
    with pytest.raises(InvalidInputError, match="cannot load the trainer"):
        go_on(path, "all", evaluate=replace(own, trainer="no.such:maker"))
    broken = replace(own, trainer=f"{module}:make_broken")
    go_on(path, "all", evaluate=broken)
    with DiskLedger(path) as ledger:
        assert ledger.num_rounds == 3
    assert list(metrics_file.read(metrics_file.metrics_of(path))) == [1]
    with pytest.raises(InvalidInputError, match="an EvaluationSource"):
        go_on(path, "all", evaluate="x")  # type: ignore[arg-type]


def asked() -> tuple[list[list[float]], list[int]]:
    return [[1.0], [1.0]], [0, 1]


class _Always:
    """Says class 0, or fails after the first answer."""

    layout = START.params.layout

    def __init__(self, fails: bool) -> None:
        self.fails, self.answered = fails, 0

    def predict(self, model: Model, inputs: Array) -> Array:
        self.answered += 1
        if self.fails and self.answered > 1:
            raise RuntimeError("lost its data")
        return np.tile(np.array([1.0, 0.0], np.float32), (len(inputs), 1))


def make(**_: object) -> _Always:
    return _Always(fails=False)


def make_broken(**_: object) -> _Always:
    return _Always(fails=True)
