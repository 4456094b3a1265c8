"""MLflow: a run for each training and each forgetting, and models as versions.

Needs the extra `mlflow`. The functions read a ledger and its files, so they may be
called at any time, in any process, and for a Flower server's ledger too:

```python
import mlflow
from fastfedul.integrations.mlflow import log_forgetting, log_training

mlflow.set_tracking_uri("sqlite:///mlflow.db")
log_training("my-run", register_as="digits", alias="champion")
done = ff.forget("my-run", ["client-3"])
log_forgetting("my-run", done.certificate, register_as="digits", alias="champion")
```

A registered version holds `model.safetensors`, which needs no unpickling.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fastfedul.errors import InvalidInputError, require_extra
from fastfedul.forgetting.certificates import read_certificate
from fastfedul.forgetting.folder import RUN_MODEL, write_run_model
from fastfedul.ledger.reader import LedgerReader
from fastfedul.limits import path_of
from fastfedul.runs import metrics_file
from fastfedul.runs.config import CONFIG
from fastfedul.runs.evaluation_source import run_at
from fastfedul.runs.metrics_file import RoundMetrics
from fastfedul.runs.training import load_config

with require_extra("mlflow", "this needs MLflow"):
    import mlflow
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException

MODEL = "model"
"""Folder of the model among the artifacts of an MLflow run."""

_BATCH = 1000
"""Metrics that MLflow takes at once."""

_LONGEST = 6000
"""Characters of a parameter that MLflow takes."""


def log_training(
    run: Path | str, *, register_as: str | None = None, alias: str | None = None
) -> str:
    """Return the id of a new MLflow run about a training.

    It has the options as parameters and, with the number of the round as step, the
    metrics `accuracy`, `attack_success`, `seconds` and `clients`, as far as they are
    known. The configuration and the model now are artifacts.

    Args:
        run: A run, or a ledger outside a run.
        register_as: Registered model that gets the model now as a new version; made if
            there is none.
        alias: Alias that moves to this version, such as `champion`.
    """
    path = path_of(run)
    _require_name(register_as, alias)
    own = run_at(path)
    measured = metrics_file.read(metrics_file.metrics_of(path))
    with LedgerReader(path) as ledger, ledger.snapshot():
        rounds, settings = ledger.num_rounds, ledger.settings
        options: dict[str, object] = {
            "aggregation": settings.aggregation,
            "dtype": settings.update_dtype,
            "federation": settings.federation,
            "optimizer": settings.optimizer,
        }
        if own is not None:
            options |= load_config(own).to_options()
        with _mlflow_run("training", ledger, options) as number:
            steps: list[Metric] = []
            for index in range(rounds):
                one = measured.get(index, RoundMetrics(index, None, None, None))
                facts = {
                    "clients": len(ledger.updates_in(index)),
                    "accuracy": one.main,
                    "attack_success": one.backdoor,
                    "seconds": one.seconds,
                }
                steps += _metrics(facts, index)
            for start in range(0, len(steps), _BATCH):
                mlflow.MlflowClient().log_batch(
                    number, metrics=steps[start : start + _BATCH]
                )
            if own is not None:
                mlflow.log_artifact(str(own / CONFIG))
            _log_model(ledger, number, register_as, alias)
    return number


def log_forgetting(
    run: Path | str,
    certificate: Path | str,
    *,
    report: Path | str | None = None,
    register_as: str | None = None,
    alias: str | None = None,
) -> str:
    """Return the id of a new MLflow run about a forgetting.

    It has clients, method and settings as parameters; coverage, movement and rounds as
    metrics; certificate, report and cleaned model as artifacts.

    Args:
        run: A run, or a ledger outside a run.
        certificate: Certificate of the forgetting.
        report: A page about it, such as one of `fastfedul report`.
        register_as: Registered model that gets the cleaned model as a new version.
        alias: Alias that moves to this version, such as `champion`.

    Raises:
        InvalidInputError: If the certificate is of another ledger, or if the ledger's
            model is not the one that the certificate names: somebody trained or forgot
            since then.
    """
    path, file = path_of(run), path_of(certificate)
    _require_name(register_as, alias)
    page = None if report is None else path_of(report)
    if page is not None and not page.is_file():
        raise InvalidInputError(f"there is no report at {page}; check the path")
    statement = read_certificate(file).statement
    said = statement.predicate
    with LedgerReader(path) as ledger, ledger.snapshot():
        if said.ledger.id != ledger.ledger_id:
            raise InvalidInputError(
                f"{file} is a certificate of another ledger than {path}; check both"
            )
        if statement.after.blake3 != ledger.model_digest:
            raise InvalidInputError(
                f"the model of {path} is not the one after {file} any more; log a "
                "forgetting before training goes on or another client is forgotten"
            )
        settings = said.method.settings if said.method else None
        options: dict[str, object] = {
            "clients": ", ".join(said.clients),
            "action": said.action,
            "method": said.method.name if said.method else None,
            **{f"method.{name}": value for name, value in (settings or {}).items()},
        }
        facts = {
            "coverage": said.coverage.all,
            "moved_by": said.model.moved_by,
            "rounds": said.rounds.recorded,
            "rounds_taken_part": said.rounds.taken_part,
        }
        with _mlflow_run("forgetting", ledger, options) as number:
            metrics = _metrics(facts, said.rounds.recorded)
            mlflow.MlflowClient().log_batch(number, metrics=metrics)
            mlflow.log_artifact(str(file), "certificate")
            if page is not None:
                mlflow.log_artifact(str(page), "report")
            _log_model(ledger, number, register_as, alias)
    return number


def _require_name(register_as: str | None, alias: str | None) -> None:
    if alias is not None and register_as is None:
        raise InvalidInputError(
            "an alias belongs to a registered model; name it with register_as"
        )


@contextmanager
def _mlflow_run(
    kind: str, ledger: LedgerReader, options: Mapping[str, object]
) -> Iterator[str]:
    """Begin an MLflow run in the user's experiment; yield its id."""
    tags = {"fastfedul.kind": kind, "fastfedul.ledger": ledger.ledger_id}
    # Nested, so that a caller may have a run of its own open.
    with mlflow.start_run(run_name=kind, nested=True, tags=tags) as own:
        given = {n: str(v)[:_LONGEST] for n, v in options.items() if v is not None}
        mlflow.log_params(given)
        yield own.info.run_id


def _metrics(facts: Mapping[str, float | None], step: int) -> list[Metric]:
    now = int(time.time() * 1000)
    return [
        Metric(name, float(value), now, step)
        for name, value in facts.items()
        if value is not None
    ]


def _log_model(
    ledger: LedgerReader, number: str, register_as: str | None, alias: str | None
) -> None:
    """Log the ledger's model, and register it if there is a name."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / RUN_MODEL
        write_run_model(ledger, file)
        mlflow.log_artifact(str(file), MODEL)
    if register_as is None:
        return
    client = mlflow.MlflowClient()
    try:
        client.get_registered_model(register_as)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        client.create_registered_model(register_as)
    version = client.create_model_version(
        register_as, mlflow.get_artifact_uri(MODEL), run_id=number
    )
    if alias is not None:
        client.set_registered_model_alias(register_as, alias, version.version)
