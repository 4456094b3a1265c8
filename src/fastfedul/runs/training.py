"""Trains a whole run: data, federation and ledger in a folder of its own.

The folder has `config.toml`, `ledger/`, `metrics.jsonl` with a line per round, and,
when the last round is done, `model.safetensors`; also `certificates/` once a client was
forgotten. Any process may file a request to forget at any time; the run applies it
between two rounds.
The ledger decides which rounds count. When a killed run is resumed, the run brings
everything else in line with the ledger.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastfedul.errors import FastFedULError, InvalidInputError, UnlearnRefusedError
from fastfedul.federation.rounds import TrainedRound
from fastfedul.federation.workers.pool import Workers
from fastfedul.forgetting.folder import RUN_MODEL, require_newest, write_run_model
from fastfedul.forgetting.requests import AppliedRequest, apply_requests, has_waiting
from fastfedul.forgetting.service import Forgetting, forget
from fastfedul.forgetting.signing import SigningKey, find_key
from fastfedul.ledger.anchor import Anchor
from fastfedul.ledger.changes.drop import dropped_by
from fastfedul.ledger.disk import DiskLedger
from fastfedul.ledger.estimate import require_room
from fastfedul.ledger.failures import FailureEntry, note_failures
from fastfedul.ledger.protocol import now, params_at
from fastfedul.ledger.server_replay import server_steps
from fastfedul.ledger.settings import LedgerSettings
from fastfedul.ledger.store.folder import INDEX
from fastfedul.ledger.store.places import new_place
from fastfedul.limits import path_of
from fastfedul.methods.protocol import (
    Method,
    coverage_of,
    method_settings,
    needs_help,
)
from fastfedul.notebook import facts_to_html
from fastfedul.params import Params
from fastfedul.records import ClientId, Model
from fastfedul.runs import metrics_file
from fastfedul.runs.config import CONFIG, RunConfig, findable
from fastfedul.runs.metrics_file import METRICS, RoundMetrics
from fastfedul.runs.options import flag_of, option_fields
from fastfedul.runs.plugins import IN_PROCESS
from fastfedul.runs.preparation import (
    Prepared,
    prepare,
    retrain,
    rounds_of,
    score,
    start_workers,
)
from fastfedul.runs.stages import StageTimes

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

Progress = Callable[[RoundMetrics], None]
Answered = Callable[[AppliedRequest], None]


@dataclass(frozen=True, slots=True)
class PlannedForgetting:
    """A client that the run forgot because its options name the client.

    Attributes:
        client: The client.
        rounds: Rounds that were trained before.
        forgetting: The forgetting, done.
    """

    client: ClientId
    rounds: int
    forgetting: Forgetting


Forgot = Callable[[PlannedForgetting], None]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a run ended.

    Attributes:
        path: Folder of the run.
        rounds: Recorded rounds.
        main: Accuracy on the test examples.
        backdoor: Attack success; None without an attack.
        chain: The ledger's chain digest in hexadecimal.
        seconds: Time this call took.
        clients: Names of all clients.
        attackers: Names of the attackers.
        answered: Requests to forget that the run applied or refused.
        forgotten: Clients that the run forgot because its options name them.
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
    forgotten: tuple[PlannedForgetting, ...] = ()
    dropped: int = 0

    def __fspath__(self) -> str:
        """Return the folder, so that a run can stand wherever a path can."""
        return str(self.path)

    def _repr_html_(self) -> str:
        def share(value: float | None) -> str:
            return "not measured" if value is None else f"{value:.1%}"

        attacked = {"attack success": share(self.backdoor)}
        facts = {
            "rounds": self.rounds,
            "clients": len(self.clients),
            "accuracy": share(self.main),
            **(attacked if self.attackers else {}),
            "attackers": ", ".join(self.attackers) or "none",
            "forgotten": ", ".join(one.client for one in self.forgotten) or "nobody",
            "seconds": f"{self.seconds:.1f}",
            "chain": self.chain,
        }
        return facts_to_html(f"Run {self.path}", facts)


def train(
    config: RunConfig | None = None,
    folder: Path | str | None = None,
    progress: Progress | None = None,
    *,
    engine: str = IN_PROCESS,
    answered: Answered | None = None,
    forgot: Forgot | None = None,
    stages: StageTimes | None = None,
) -> RunSummary:
    """Train a federation into a new folder; return how the run ended.

    Args:
        config: The configuration; None for the defaults.
        folder: A folder that does not exist yet, or is empty. None for the first of
            `run-1`, `run-2`, ... that is free in the working folder.
        progress: Called after every round.
        engine: Where clients are trained; the run is the same, byte for byte.
        answered: Called with every request that the run applies or refuses.
        forgot: Called with every client that the run forgets by its options.
        stages: Gets the times of the stages, for whoever watches them.

    Raises:
        InvalidInputError: If the folder is taken, or an option cannot be used.
    """
    if not isinstance(config, RunConfig | None):
        raise InvalidInputError(
            f"a configuration is a RunConfig, not {config!r:.60}; make one, such as "
            "RunConfig(rounds=5)"
        )
    _check_callables(progress=progress, answered=answered, forgot=forgot)
    path = _free_folder() if folder is None else path_of(folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InvalidInputError(
            f"{path} exists already; add --resume to go on, or choose another folder"
        )
    config = config or RunConfig()
    config = config.with_options(data=findable(config.data.source))
    return _run(path, config, None, progress, engine, answered, forgot, stages)


def _check_callables(**given: object) -> None:
    for name, value in given.items():
        if value is not None and not callable(value):
            raise InvalidInputError(f"{name} is a function, not {value!r:.60}")


def _free_folder() -> Path:
    places = (Path(f"run-{number}") for number in itertools.count(1))
    return next(place for place in places if not place.exists())


def resume(
    folder: Path | str,
    changes: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    *,
    engine: str = IN_PROCESS,
    answered: Answered | None = None,
    forgot: Forgot | None = None,
    stages: StageTimes | None = None,
) -> RunSummary:
    """Take up a run where its ledger ends, and finish it.

    Clients that were forgotten in the meantime stay out of all later rounds, and
    requests that were filed are applied first.

    Args:
        folder: The run.
        changes: Options to change, by their flat names: `rounds` to train longer,
            `workers`, `budget`, how to forget from now on (`method`, `skew`,
            `damping`, `erase`), and `forget`, which adds to the plan. Any other option
            must be as it was.
        progress: Called after every round.
        engine: Where clients are trained; it may be another engine than before.
        answered: Called with every request that the run applies or refuses.
        forgot: Called with every client that the run forgets by its options.
        stages: Gets the times of the stages, for whoever watches them.
    """
    _check_callables(progress=progress, answered=answered, forgot=forgot)
    path = path_of(folder)
    config = load_config(path)
    changed = _changed(config, changes or {})
    return _run(path, changed, config, progress, engine, answered, forgot, stages)


def load_config(folder: Path) -> RunConfig:
    """Return the configuration of a run."""
    if not (folder / CONFIG).is_file():
        raise InvalidInputError(
            f"there is no run at {folder}, because it has no {CONFIG}; check the path"
        )
    return RunConfig.load(folder / CONFIG)


def _run(
    path: Path,
    config: RunConfig,
    before: RunConfig | None,
    progress: Progress | None,
    engine: str,
    tell: Answered | None,
    forgot: Forgot | None,
    given: StageTimes | None,
) -> RunSummary:
    """Train until all rounds are recorded; `before` is the configuration so far."""
    started = time.perf_counter()
    stages = given or StageTimes()
    method = _forgetting_method(config)
    prepared = prepare(config)
    with (
        _explained(path),
        start_workers(prepared, engine) as workers,
        _open(path, config, workers) as ledger,
    ):
        _adopt(path, config, before, ledger, prepared.names)
        _align_metrics(path, prepared, workers, ledger)
        last: RoundMetrics | None = None
        answered: list[AppliedRequest] = []
        forgotten: list[PlannedForgetting] = []
        while True:
            done = _answer(ledger, config, method, stages)
            answered += done
            for one in done:
                if tell is not None:
                    tell(one)
            due = _forget_due(ledger, config, method, forgot, stages)
            forgotten += due
            if due or done:
                last = None
            if ledger.num_rounds >= config.rounds:
                break
            last = _run_until_forgetting(
                path, prepared, workers, ledger, progress, stages
            )
        final = ledger.final
        scores = (last.main, last.backdoor) if last else None
        main, attack = scores or score(prepared, workers, final)
        write_run_model(ledger, path / RUN_MODEL)
        return RunSummary(
            path=path,
            rounds=ledger.num_rounds,
            main=main,
            backdoor=attack,
            chain=ledger.chain.hex(),
            seconds=time.perf_counter() - started,
            clients=prepared.names,
            attackers=prepared.attack.attackers,
            answered=tuple(answered),
            forgotten=tuple(forgotten),
            dropped=dropped_by(ledger).updates,
        )


def _forgetting_method(config: RunConfig) -> Method:
    """Return the method that forgets clients while the run trains.

    Raises:
        InvalidInputError: If the method needs the clients, who are training.
    """
    method = config.forgetting.make_method()
    if needs_help(method):
        raise InvalidInputError(
            f"--method {config.forgetting.method} cannot forget while a run trains, "
            "because it needs clients or images; use the default method"
        )
    return method


def _answer(
    ledger: DiskLedger, config: RunConfig, method: Method, stages: StageTimes
) -> tuple[AppliedRequest, ...]:
    """Apply the requests that wait, and write the certificates that are missing."""
    if not ledger.requests() and not ledger.events():
        return ()
    apply = apply_requests
    if has_waiting(ledger):
        apply = stages.timed("forget", apply_requests)
    return apply(ledger, method=method, key=_key(), erase=config.forgetting.erase)


def _key() -> SigningKey | None:
    """Return the key if it can be used.

    Training does not stop for a key: `request apply` signs certificates later.
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
    stages: StageTimes,
) -> RoundMetrics | None:
    """Train and record rounds as long as nobody else is to be forgotten.

    A run that is taken up at any round goes on in the same way, so stopping here for a
    request changes nothing besides the request's own effect.
    """
    config, start, model = prepared.config, ledger.num_rounds, ledger.final
    planned = config.forget_plan.values()
    stop = min([config.rounds, *(r for r in planned if r > start)])
    absent = _absent(ledger, config)
    metrics: RoundMetrics | None = None
    append = stages.timed("record", ledger.append)
    measure = stages.timed("evaluate", score)
    began = time.perf_counter()
    trained = rounds_of(
        prepared,
        workers,
        model,
        start,
        stop,
        absent,
        record=lambda _, round_: append(round_),
        stages=stages,
    )
    for one in trained:
        _note_failures(ledger, one)
        main, attack = measure(prepared, workers, one.model)
        now = time.perf_counter()
        metrics = RoundMetrics(one.round.index, main, attack, now - began)
        began = now
        metrics_file.append(path / METRICS, metrics)
        if progress is not None:
            progress(metrics)
        if has_waiting(ledger):
            break
    return metrics


def _note_failures(ledger: DiskLedger, trained: TrainedRound) -> None:
    """Note the clients that a round left out."""
    time, number = now(), trained.round.index + 1
    note_failures(
        ledger.path,
        [
            FailureEntry(time, number, "train", one.client, "left out", one.reason)
            for one in trained.quarantined
        ],
    )


def _open(path: Path, config: RunConfig, workers: Workers) -> DiskLedger:
    """Return the run's ledger; if it has none yet, begin the run."""
    folder = path / LEDGER
    if (folder / INDEX).is_file():
        ledger = DiskLedger(folder)
        try:
            require_newest(ledger)
            return _with_budget(ledger, config)
        except BaseException:
            ledger.close()
            raise
    if folder.exists() and (path / METRICS).exists():
        raise FastFedULError(
            f"{folder} is damaged: it has no {INDEX}; restore it from a backup"
        )
    initial = workers.initial(config.seed)
    recording = config.recording
    settings = LedgerSettings(
        layout=initial.params.layout,
        history=config.keep_policy.history,
        budget=recording.budget_bytes,
    )
    # Before the run's folder is made: a wrong budget, address or anchor leaves nothing.
    require_room(settings, config.rounds)
    Anchor.find()
    new_place(recording.arrays)
    path.mkdir(parents=True, exist_ok=True)
    config.save(path / CONFIG)
    return new_ledger(folder, config, initial, arrays=recording.arrays)


def new_ledger(
    folder: Path, config: RunConfig, initial: Model, *, arrays: str | None = None
) -> DiskLedger:
    """Return a new ledger that keeps what a run's configuration says.

    Args:
        folder: Folder of the ledger.
        config: The configuration.
        initial: The model that training starts from.
        arrays: Where the array files lie; None for the folder itself.
    """
    recording, keep = config.recording, config.keep_policy
    return DiskLedger.create(
        folder,
        initial,
        aggregation=config.aggregation,
        update_dtype=recording.dtype,
        history=keep.history,
        sums_from=keep.sums_from,
        budget=recording.budget_bytes,
        arrays=arrays,
        federation=recording.federation,
        optimizer=config.server.make_optimizer(),
    )


def _with_budget(ledger: DiskLedger, config: RunConfig) -> DiskLedger:
    """Return the ledger with the budget of the options."""
    budget = config.recording.budget_bytes
    if ledger.settings.budget != budget:
        try:
            ledger.set_budget(budget)
        except BaseException:
            ledger.close()
            raise
    return ledger


def _changed(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with changes that leave the past as it is."""
    changes, before = dict(changes), config.to_options()
    if "data" in changes:
        changes["data"] = findable(changes["data"])
    if {"method", "skew"} & set(changes):
        # The damping and settings so far belong to the method and skew so far.
        changes = {"damping": None, "set": {}, **changes}
    planned = config.forgetting.forget
    added = [text for text in changes.pop("forget", ()) if text not in planned]
    for name, place in option_fields(RunConfig).items():
        changed = name in changes and changes[name] != before[name]
        if changed and not place.shown.later:
            raise InvalidInputError(
                f"the run began with {flag_of(name)} {before[name]!r}, which cannot "
                "change; start a new run"
            )
    return config.with_options(**changes, forget=(*planned, *added))


def _adopt(
    path: Path,
    config: RunConfig,
    before: RunConfig | None,
    ledger: DiskLedger,
    names: Sequence[ClientId],
) -> None:
    """Check changed options against the recorded rounds and clients; keep them."""
    if before is None or before == config:
        return
    now = ledger.num_rounds
    if config.rounds < now:
        raise InvalidInputError(
            f"{now} rounds are recorded already; choose --rounds {now} or more"
        )
    gone = {c for c, entry in ledger.clients().items() if entry.state != "active"}
    if config.rounds > now and not set(names) - gone:
        raise InvalidInputError("no client is left to train with")
    for client, round_ in config.forget_plan.items():
        if round_ < now and client not in before.forget_plan:
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


def _forget_due(
    ledger: DiskLedger,
    config: RunConfig,
    method: Method,
    forgot: Forgot | None,
    stages: StageTimes,
) -> list[PlannedForgetting]:
    """Return the clients that are due, after the run has forgotten them."""
    now, known = ledger.num_rounds, ledger.clients()
    due = [
        client
        for client, before in sorted(config.forget_plan.items())
        if before <= now and client in known and known[client].state == "active"
    ]
    done = []
    for client in due:
        erase = config.forgetting.erase
        take_out = stages.timed("forget", forget_as_planned)
        found = take_out(ledger, client, method, erase=erase)
        done.append(PlannedForgetting(client, now, found))
        if forgot is not None:
            forgot(done[-1])
    return done


def forget_as_planned(
    ledger: DiskLedger,
    client: ClientId,
    method: Method,
    *,
    erase: bool = True,
) -> Forgetting:
    """Return the forgetting of a client that the options name, done.

    Args:
        ledger: A ledger open for writing.
        client: Client to forget.
        method: The method with its settings.
        erase: Whether to erase the client's updates from the ledger too.

    Raises:
        UnlearnRefusedError: If the method refuses, with its reason. If too little of
            the client was kept, the error also says how the run can go on.
    """
    try:
        return forget(ledger, [client], method, erase=erase, key=_key())
    except UnlearnRefusedError as error:
        advice = ""
        least = method_settings(method).get("minimum_coverage", 0.0)
        if coverage_of(ledger.updates_of(client)) < float(str(least)):
            advice = (
                ": forget it with `fastfedul forget` and --minimum-coverage 0, then go "
                "on with --resume"
            )
        raise UnlearnRefusedError(
            f"{client!r:.80} was to be forgotten now: {error}; the rounds so far are "
            f"recorded{advice}"
        ) from None


def _absent(ledger: DiskLedger, config: RunConfig) -> frozenset[ClientId]:
    """Return the clients that stay out, also clients that the ledger never saw."""
    now = ledger.num_rounds
    gone = {c for c, entry in ledger.clients().items() if entry.state != "active"}
    return frozenset(gone | {c for c, b in config.forget_plan.items() if b <= now})


def _align_metrics(
    path: Path, prepared: Prepared, workers: Workers, ledger: DiskLedger
) -> None:
    """Give every recorded round its line of metrics; score models that lack one.

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
            step = next(itertools.islice(server_steps(ledger), index, None))
            flat = params_at(ledger, index).flat + step
            model = Model(Params(ledger.settings.layout, flat), final.buffers)
            scores = score(prepared, workers, model)
        found[index] = RoundMetrics(index, *scores, None)
    metrics_file.write(path / METRICS, [found[i] for i in range(num_rounds)])
