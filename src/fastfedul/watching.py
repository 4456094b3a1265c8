"""Metrics of a run or ledger in the format that Prometheus reads.

Each scrape looks at the ledger anew, as `fastfedul status` does: it takes no lock and
names no client. Only the times of the stages come from the process that trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from fastfedul.errors import (
    FastFedULError,
    InvalidInputError,
    NoLedgerError,
    require_extra,
)
from fastfedul.ledger.failures import OUTCOMES, TASKS, FailureCounter
from fastfedul.ledger.reader import LedgerReader
from fastfedul.limits import require_number
from fastfedul.runs.stages import StageTimes
from fastfedul.runs.status import Status, age_of, status_in

with require_extra("watch", "metrics need prometheus_client"):
    from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import choose_encoder

HOST = "127.0.0.1"


class Metrics:
    """Metrics of a run or ledger, made anew for each scrape.

    Args:
        path: A run, or a ledger; it may come into being later.
        stages: Times of the training in this process; None if it does not train.
    """

    def __init__(self, path: Path, stages: StageTimes | None = None) -> None:
        self._path, self._stages = path, stages
        self._failures: FailureCounter | None = None
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def text(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics and their media type, for an `Accept` of a request."""
        encode, kind = choose_encoder(accept)
        return encode(self.registry), kind

    def collect(self) -> Iterable[Metric]:
        """Return the metrics as Prometheus' client asks for them."""
        found = [] if self._stages is None else [_stage_seconds(self._stages)]
        readable = True
        try:
            found += self._of_ledger()
        except NoLedgerError:
            # A training has its metrics before it has a ledger.
            pass
        except (FastFedULError, OSError):
            readable = False
        what = "Whether the ledger could be read; 1 also before its first round."
        return [*found, _gauge("ledger_readable", what, readable)]

    def _of_ledger(self) -> list[Metric]:
        with LedgerReader(self._path) as ledger:
            status = status_in(ledger, self._path)
        if self._failures is None:
            self._failures = FailureCounter(status.path)
        return [*_of_status(status), _failures(self._failures)]


@contextmanager
def served_metrics(
    path: Path, port: int, stages: StageTimes | None = None
) -> Iterator[int]:
    """Serve metrics on this machine for the time of a `with` block; yield the port.

    Args:
        path: A run, or a ledger; it may come into being later.
        port: Port on the loopback address; 0 for any that is free.
        stages: Times of the training in this process.

    Raises:
        InvalidInputError: If the port is taken.
    """
    require_number("metrics port", port, least=0, most=65535, whole=True)
    try:
        server, thread = start_http_server(port, HOST, Metrics(path, stages).registry)
    except OSError as error:
        raise InvalidInputError(
            f"cannot serve metrics on port {port}: {error.strerror or error}; choose "
            "another port"
        ) from None
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _of_status(found: Status) -> list[Metric]:
    clients = GaugeMetricFamily(
        "fastfedul_clients", "Clients in each state.", labels=["state"]
    )
    for state, count in found.clients.items():
        clients.add_metric([state], count)
    measured, noted = found.metrics, found.verified
    ages = [age_of(one.asked).total_seconds() for one in found.waiting]
    return [
        CounterMetricFamily("fastfedul_rounds", "Recorded rounds.", found.rounds),
        _gauge("rounds_planned", "Rounds that the run is to have.", found.planned),
        clients,
        _gauge("round_clients", "Participants of the last round.", found.last_clients),
        _gauge(
            "accuracy",
            "Accuracy after the last measured round.",
            measured.main if measured else None,
        ),
        _gauge(
            "attack_success",
            "Attack success after the last measured round.",
            measured.backdoor if measured else None,
        ),
        _gauge("ledger_bytes", "Bytes of the array files.", found.num_bytes),
        _gauge("budget_bytes", "Bytes that they may take.", found.budget),
        _gauge("disk_free_bytes", "Free bytes of the ledger's disk.", found.free_bytes),
        _gauge("requests_waiting", "Requests that wait.", len(found.waiting)),
        _gauge(
            "oldest_request_age_seconds",
            "Age of the oldest request that waits; 0 without one.",
            max(ages, default=0),
        ),
        _gauge(
            "certificates_missing",
            "Certificates that are missing or not signed.",
            found.missing + found.unsigned,
        ),
        _gauge(
            "last_change_timestamp_seconds",
            "Time of the ledger's last change.",
            datetime.fromisoformat(found.changed).timestamp(),
        ),
        _gauge(
            "verified_timestamp_seconds",
            "Time of the last verification.",
            datetime.fromisoformat(noted.time).timestamp() if noted else None,
        ),
        _gauge(
            "verification_problems",
            "Problems that the last verification found.",
            len(noted.problems) if noted else None,
        ),
    ]


def _gauge(name: str, what: str, value: float | None) -> Metric:
    """Return a metric; without a value it has its name and no sample."""
    return GaugeMetricFamily(
        f"fastfedul_{name}", what, None if value is None else float(value)
    )


def _failures(counter: FailureCounter) -> Metric:
    found = CounterMetricFamily(
        "fastfedul_failures",
        "Replies of clients that a round left out or capped.",
        labels=["task", "outcome"],
    )
    counts = counter.count()
    for task in TASKS:
        for outcome in OUTCOMES:
            found.add_metric([task, outcome], counts[task, outcome])
    return found


def _stage_seconds(stages: StageTimes) -> Metric:
    found = SummaryMetricFamily(
        "fastfedul_stage_seconds",
        "Seconds that the stages took in this process.",
        labels=["stage"],
    )
    for stage, (count, seconds) in stages.taken().items():
        found.add_metric([stage], count, seconds)
    return found
