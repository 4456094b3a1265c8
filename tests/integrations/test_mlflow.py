"""MLflow on an SQLite store: trainings, forgettings, versions and the alias."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

# MLflow reads it while it is imported.
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
pytest.importorskip("mlflow", reason="needs the extra mlflow")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import mlflow

from fastfedul import DiskLedger, LedgerReader, forget
from fastfedul.errors import InvalidInputError
from fastfedul.forgetting.certificates import read_certificate
from fastfedul.integrations.mlflow import log_forgetting, log_training
from fastfedul.ledger.store.model_files import holds_model
from fastfedul.runs import metrics_file
from fastfedul.runs.metrics_file import RoundMetrics
from tests.support.disk_ledgers import record

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[mlflow.MlflowClient]:
    """A store of its own, with an experiment that keeps its artifacts there."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("FASTFEDUL_KEY", raising=False)
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_experiment(
        experiment_id=mlflow.create_experiment(
            "federation", artifact_location=str(tmp_path / "artifacts")
        )
    )
    yield mlflow.MlflowClient()
    mlflow.set_tracking_uri(before)


def forgotten(ledger: Path, name: str) -> Path:
    """Forget a client; return the certificate."""
    with DiskLedger(ledger) as opened:
        found = forget(opened, [name]).certificate
    assert found is not None
    return found


def test_training_and_forgetting_are_runs_and_the_alias_moves(
    client: mlflow.MlflowClient, tmp_path: Path
) -> None:
    ledger = record(tmp_path / "ledger", 3)
    metrics_file.write(
        metrics_file.metrics_beside(ledger),
        [RoundMetrics(0, 0.5, None, 2.0), RoundMetrics(2, 0.75, 0.1, None)],
    )
    trained = log_training(ledger, register_as="digits", alias="champion")
    steps = client.get_metric_history(trained, "accuracy")
    assert [(one.step, one.value) for one in steps] == [(0, 0.5), (2, 0.75)]
    clients = client.get_metric_history(trained, "clients")
    assert [(one.step, one.value) for one in clients] == [(0, 4), (1, 4), (2, 4)]
    before = client.get_model_version_by_alias("digits", "champion")
    assert (int(before.version), before.run_id) == (1, trained)

    certificate = forgotten(ledger, "a")
    page = tmp_path / "report.html"
    page.write_text("<p>a page</p>")
    number = log_forgetting(
        ledger, certificate, report=page, register_as="digits", alias="champion"
    )
    run = client.get_run(number)
    said = read_certificate(certificate).predicate
    assert run.info.status == "FINISHED"
    assert run.data.params["clients"] == "a"
    assert said.method is not None
    assert run.data.params["method"] == said.method.name
    assert set(run.data.params) >= {f"method.{n}" for n in said.method.settings or {}}
    assert run.data.metrics["moved_by"] == said.model.moved_by
    assert run.data.metrics["coverage"] == said.coverage.all == 1
    logged = Path(mlflow.artifacts.download_artifacts(run_id=number))
    copy = logged / "certificate" / certificate.name
    assert copy.read_bytes() == certificate.read_bytes()
    assert (logged / "report" / "report.html").read_text() == "<p>a page</p>"

    after = client.get_model_version_by_alias("digits", "champion")
    assert (int(after.version), after.run_id) == (2, number)
    folder = Path(mlflow.artifacts.download_artifacts("models:/digits@champion"))
    old = Path(mlflow.artifacts.download_artifacts("models:/digits/1"))
    with LedgerReader(ledger) as opened:
        assert holds_model(folder / "model.safetensors", opened.final)
        assert not holds_model(old / "model.safetensors", opened.final)
        of_ledger = f"tags.`fastfedul.ledger` = '{opened.ledger_id}'"
    found = mlflow.search_runs(filter_string=of_ledger, output_format="list")
    assert {one.info.run_id for one in found} == {trained, number}


def test_a_model_that_is_not_the_certificates_is_refused_and_no_run_begins(
    client: mlflow.MlflowClient, tmp_path: Path
) -> None:
    ledger = record(tmp_path / "ledger", 3)
    certificate = forgotten(ledger, "a")
    with pytest.raises(InvalidInputError, match="another ledger"):
        log_forgetting(record(tmp_path / "other", 3), certificate)
    with pytest.raises(InvalidInputError, match="no report"):
        log_forgetting(ledger, certificate, report=tmp_path / "none.html")
    with pytest.raises(InvalidInputError, match="register_as"):
        log_forgetting(ledger, certificate, alias="champion")
    forgotten(ledger, "b")
    with pytest.raises(InvalidInputError, match="is not the one after"):
        log_forgetting(ledger, certificate, register_as="digits")
    assert mlflow.search_runs(output_format="list") == []
    assert client.search_registered_models() == []


def test_a_callers_own_run_stays_open(
    client: mlflow.MlflowClient, tmp_path: Path
) -> None:
    ledger = record(tmp_path / "ledger", 1)
    with mlflow.start_run() as own:
        number = log_training(ledger)
        active = mlflow.active_run()
        assert active is not None
        assert active.info.run_id == own.info.run_id
    assert client.get_run(number).data.tags["mlflow.parentRunId"] == own.info.run_id
