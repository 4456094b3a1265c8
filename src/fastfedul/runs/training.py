"""A whole run: data, federation and ledger put together, in a folder of its own.

The folder has `config.toml`, `ledger/`, `metrics.jsonl` with a line per round, and the
models `initial.safetensors` and, when the last round is done, `model.safetensors`;
also `certificates/` once a client was forgotten. Requests to forget, which any process
may file at any time, are applied between two rounds.
The ledger decides what has happened: whatever else a killed run left behind is brought
in line with it when the run is taken up again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastfedul.errors import FastFedULError, InvalidInputError
from fastfedul.federation.rounds import advance
from fastfedul.federation.workers.pool import Workers
from fastfedul.forgetting.certificates import certificates_folder, write_certificates
from fastfedul.forgetting.requests import AppliedRequest, apply_requests, has_waiting
from fastfedul.forgetting.service import forget_as_planned
from fastfedul.forgetting.signing import SigningKey, find_key
from fastfedul.ledger.disk import DiskLedger
from fastfedul.ledger.protocol import params_at, vector
from fastfedul.ledger.shrinking import num_dropped
from fastfedul.ledger.store.folder import INDEX
from fastfedul.ledger.store.model_files import model_written
from fastfedul.params import Params
from fastfedul.records import ClientId, Model, VectorRef
from fastfedul.runs import metrics_file
from fastfedul.runs.config import (
    CONFIG,
    LAST_OPTION,
    RunConfig,
    findable,
    read_options,
)
from fastfedul.runs.metrics_file import RoundMetrics
from fastfedul.runs.model_file import FINAL
from fastfedul.runs.plugins import IN_PROCESS
from fastfedul.runs.preparation import (
    Prepared,
    prepare,
    retrain,
    rounds_of,
    score,
    start_workers,
)

__all__ = [
    "Prepared",
    "RoundMetrics",
    "RunConfig",
    "RunSummary",
    "load_config",
    "prepare",
    "resume",
    "retrain",
    "score",
    "start_workers",
    "train",
]

LEDGER = "ledger"
METRICS = "metrics.jsonl"
INITIAL = "initial.safetensors"

Progress = Callable[[RoundMetrics], None]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a run ended.

    Attributes:
        path: Its folder.
        rounds: Recorded rounds.
        main: Accuracy on the test images.
        backdoor: Success rate of the attack; None without one.
        chain: The ledger's chain digest in hexadecimal.
        seconds: What this call took.
        clients: Names of all clients.
        attackers: Names of the attackers.
        answered: Requests to forget that were applied or refused on the way.
        dropped: Updates for which the ledger's budget had no room.
    """

    path: Path
    rounds: int
    main: float | None
    backdoor: float | None
    chain: str
    seconds: float
    clients: tuple[ClientId, ...]
    attackers: tuple[ClientId, ...]
    answered: tuple[AppliedRequest, ...] = ()
    dropped: int = 0


def train(
    folder: Path | str,
    config: RunConfig,
    progress: Progress | None = None,
    *,
    engine: str = IN_PROCESS,
) -> RunSummary:
    """Train a federation into a new folder.

    Args:
        folder: Does not exist yet, or is empty.
        config: The options.
        progress: Called after every round.
        engine: Where clients are trained; the run is the same, byte for byte.

    Raises:
        InvalidInputError: If the folder is taken, or an option is of no use.
    """
    path = Path(folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InvalidInputError(
            f"{path} exists already; add --resume to go on, or choose another folder"
        )
    config = replace(config, data=findable(config.data))
    return _run(path, config, None, progress, engine)


def resume(
    folder: Path | str,
    changes: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    *,
    engine: str = IN_PROCESS,
) -> RunSummary:
    """Take up a run where its ledger ends, and finish it.

    Clients that were forgotten in the meantime stay out of all later rounds, and
    requests that were filed are applied first.

    Args:
        folder: The run.
        changes: Options to change: `rounds` to train longer, `workers`, `budget`, and
            `forget`, which adds to what was planned. Any other must be as it was.
        progress: Called after every round.
        engine: Where clients are trained; it need not be the one of before.
    """
    path = Path(folder)
    config = load_config(path)
    return _run(path, _changed(config, changes or {}), config, progress, engine)


def load_config(folder: Path) -> RunConfig:
    """Return the options of a run."""
    if not (folder / CONFIG).is_file():
        raise InvalidInputError(f"there is no run at {folder}; it has no {CONFIG}")
    options = read_options(folder / CONFIG)
    if LAST_OPTION not in options:
        raise InvalidInputError(
            f"{folder / CONFIG} is damaged: its end is missing; restore it from a "
            "backup"
        )
    return RunConfig(**options)


def _run(
    path: Path,
    config: RunConfig,
    before: RunConfig | None,
    progress: Progress | None,
    engine: str,
) -> RunSummary:
    """Train until all rounds are recorded; `before` has the options as they were."""
    started = time.perf_counter()
    prepared = prepare(config)
    with (
        _explained(path),
        start_workers(prepared, engine) as workers,
        _open(path, config, workers) as ledger,
    ):
        _adopt(path, config, before, ledger)
        _align_metrics(path, prepared, workers, ledger)
        last: RoundMetrics | None = None
        answered: list[AppliedRequest] = []
        while True:
            done = _answer(ledger)
            answered += done
            if _forget_due(ledger, config) or done:
                last = None
            if ledger.num_rounds >= config.rounds:
                break
            last = _run_until_forgetting(path, prepared, workers, ledger, progress)
        final = ledger.final
        scores = (last.main, last.backdoor) if last else None
        main, attack = scores or score(prepared, workers, final)
        with model_written(path / FINAL, final):
            pass
        return RunSummary(
            path=path,
            rounds=ledger.num_rounds,
            main=main,
            backdoor=attack,
            chain=ledger.chain.hex(),
            seconds=time.perf_counter() - started,
            clients=config.names,
            attackers=prepared.attack.attackers,
            answered=tuple(answered),
            dropped=num_dropped(ledger),
        )


def _answer(ledger: DiskLedger) -> tuple[AppliedRequest, ...]:
    """Apply the requests that wait, and write what certificates are missing."""
    if not ledger.requests() and not ledger.events():
        return ()
    folder = certificates_folder(ledger.path)
    return apply_requests(ledger, certificates=folder, key=_key())


def _key() -> SigningKey | None:
    """Return the key if it can be used.

    Training does not stop for a key: what is not signed now can be signed later.
    """
    try:
        return find_key()
    except FastFedULError:
        return None


def _run_until_forgetting(
    path: Path,
    prepared: Prepared,
    workers: Workers,
    ledger: DiskLedger,
    progress: Progress | None,
) -> RoundMetrics | None:
    """Train and record rounds as long as nobody else is to be forgotten.

    A run that is taken up at any round goes on in the same way, so stopping here for a
    request changes nothing but what the request changes.
    """
    config, start, model = prepared.config, ledger.num_rounds, ledger.final
    stop = min([config.rounds, *(r for r in config.forgetting.values() if r > start)])
    absent = _absent(ledger, config)
    metrics: RoundMetrics | None = None
    began = time.perf_counter()
    for round_ in rounds_of(prepared, workers, model, start, stop, absent):
        ledger.append(round_)
        model = advance(model, round_)
        main, attack = score(prepared, workers, model)
        now = time.perf_counter()
        metrics = RoundMetrics(round_.index, main, attack, now - began)
        began = now
        metrics_file.append(path / METRICS, metrics)
        if progress is not None:
            progress(metrics)
        if has_waiting(ledger):
            break
    return metrics


def _open(path: Path, config: RunConfig, workers: Workers) -> DiskLedger:
    """Return the run's ledger; if it has none yet, begin the run."""
    folder = path / LEDGER
    if (folder / INDEX).is_file():
        return _with_budget(DiskLedger(folder), config)
    if folder.exists() and (path / METRICS).exists():
        raise FastFedULError(
            f"{folder} is damaged: it has no {INDEX}; restore it from a backup"
        )
    initial = workers.initial(config.seed)
    path.mkdir(parents=True, exist_ok=True)
    config.save(path / CONFIG)
    with model_written(path / INITIAL, initial):
        pass
    dtype: Any = config.store
    return DiskLedger.create(
        folder,
        initial,
        update_dtype=dtype,
        history="sums" if config.keep == "sums" else "rounds",
        budget=config.budget_bytes,
    )


def _with_budget(ledger: DiskLedger, config: RunConfig) -> DiskLedger:
    """Return the ledger with the budget of the options."""
    if ledger.settings.budget != config.budget_bytes:
        try:
            ledger.set_budget(config.budget_bytes)
        except BaseException:
            ledger.close()
            raise
    return ledger


def _changed(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Return the options with changes that leave what was done as it is."""
    changes = dict(changes)
    if "data" in changes:
        changes["data"] = findable(changes["data"])
    added = [text for text in changes.pop("forget", ()) if text not in config.forget]
    for name, value in changes.items():
        may_change = name in ("rounds", "workers", "budget")
        if not may_change and value != getattr(config, name):
            raise InvalidInputError(
                f"the run began with {name.replace('_', '-')} "
                f"{getattr(config, name)!r}, which cannot change; start a new run"
            )
    return replace(config, **changes, forget=(*config.forget, *added))


def _adopt(
    path: Path, config: RunConfig, before: RunConfig | None, ledger: DiskLedger
) -> None:
    """Check changed options against what has happened, and keep them."""
    if before is None or before == config:
        return
    now = ledger.num_rounds
    if config.rounds < now:
        raise InvalidInputError(
            f"{now} rounds are recorded already; choose --rounds {now} or more"
        )
    for client, round_ in config.forgetting.items():
        if round_ < now and client not in before.forgetting:
            raise InvalidInputError(
                f"round {round_} is over, so {client} cannot be forgotten before it; "
                f"choose {client}@{now} or later"
            )
    config.save(path / CONFIG)


def _where(error: OSError) -> str:
    return f"{Path(error.filename2 or error.filename).name}: " if error.filename else ""


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FastFedULError(
            f"the run at {path} had to stop: {_where(error)}{error.strerror or error}; "
            "see to it and go on with --resume"
        ) from error


def _forget_due(ledger: DiskLedger, config: RunConfig) -> bool:
    """Forget whom the options say, unless that has been done; return if anybody."""
    now, known = ledger.num_rounds, ledger.clients()
    due = [
        client
        for client, before in sorted(config.forgetting.items())
        if before <= now and client in known and known[client].state == "active"
    ]
    if due:
        for client in due:
            forget_as_planned(ledger, client)
        write_certificates(ledger, certificates_folder(ledger.path), _key())
    return bool(due)


def _absent(ledger: DiskLedger, config: RunConfig) -> frozenset[ClientId]:
    """Return who is left out from now on, also if the ledger never saw them."""
    now = ledger.num_rounds
    gone = {c for c, entry in ledger.clients().items() if entry.state != "active"}
    return frozenset(gone | {c for c, b in config.forgetting.items() if b <= now})


def _align_metrics(
    path: Path, prepared: Prepared, workers: Workers, ledger: DiskLedger
) -> None:
    """Make the metrics those of the recorded rounds, scoring anew what is missing.

    Only the parameters of earlier models are known, not their buffers: where a model
    has buffers, a line that was lost stays without numbers unless it is the last. A
    ledger of sums knows no earlier models at all.
    """
    found = metrics_file.read(path / METRICS)
    num_rounds, final = ledger.num_rounds, ledger.final
    sums_only = ledger.settings.history == "sums"
    moved = {client.forgotten_at for client in ledger.clients().values()}
    for index in range(num_rounds):
        if index in found:
            continue
        scores: tuple[float | None, float | None] = (None, None)
        if sums_only:
            # Of the models of rounds only the last is known, unless it was moved.
            if index == num_rounds - 1 and index + 1 not in moved:
                scores = score(prepared, workers, final)
        elif not final.buffers or index == num_rounds - 1:
            flat = params_at(ledger, index).flat + vector(ledger, VectorRef(index))
            model = Model(Params(ledger.settings.layout, flat), final.buffers)
            scores = score(prepared, workers, model)
        found[index] = RoundMetrics(index, *scores, None)
    metrics_file.write(path / METRICS, [found[i] for i in range(num_rounds)])
