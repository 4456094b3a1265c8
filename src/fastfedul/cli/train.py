"""`fastfedul train`: train a federation and record it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from fastfedul.cli.output import (
    JsonFlag,
    err,
    out,
    print_facts,
    print_json,
    show_seconds,
    warn,
)
from fastfedul.cli.request import answers_of, show_answers
from fastfedul.errors import FastFedULError, InvalidInputError
from fastfedul.ledger.store.codec import STORAGE_DTYPES

if TYPE_CHECKING:
    from fastfedul.records import ClientId
    from fastfedul.runs.metrics_file import RoundMetrics
    from fastfedul.runs.training import RunSummary

_DATA = "Data and clients"
_LOCAL = "Local training"
_ATTACK = "Attack"
_ROUNDS = "Rounds"
_RECORD = "Recording"


def _option(text: str, panel: str, metavar: str | None = None) -> Any:
    return typer.Option(
        help=text, rich_help_panel=panel, metavar=metavar, show_default=False
    )


def train_run(
    run: Annotated[
        Path, typer.Argument(help="Folder of the run; a new one.", metavar="RUN")
    ],
    config: Annotated[
        Path | None,
        typer.Option(help="Read options from this TOML file; those given here win."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run where it stopped.")
    ] = False,
    data: Annotated[
        str | None,
        _option("Data set, or an .npz file of your own. [digits]", _DATA, "NAME|FILE"),
    ] = None,
    train_size: Annotated[
        int | None, _option("Use so many training images. [all]", _DATA)
    ] = None,
    clients: Annotated[int | None, _option("How many clients. [10]", _DATA)] = None,
    partition: Annotated[
        str | None,
        _option("How images are split. [iid]", _DATA, "iid|dirichlet:B|level:R"),
    ] = None,
    server_images: Annotated[
        int | None,
        _option("Clean images set aside for the server before splitting. [0]", _DATA),
    ] = None,
    rounds: Annotated[int | None, _option("How many rounds. [20]", _ROUNDS)] = None,
    per_round: Annotated[
        int | None, _option("Draw so many clients for each round. [all]", _ROUNDS)
    ] = None,
    weighting: Annotated[
        str | None, _option("What shares go by. [size]", _ROUNDS, "size|equal")
    ] = None,
    dropout: Annotated[
        float | None, _option("Probability to miss a round. [0]", _ROUNDS)
    ] = None,
    forget: Annotated[
        list[str] | None,
        _option(
            "Forget a client once so many rounds are trained, 1 or more, and train on "
            "without it. Can be repeated.",
            _ROUNDS,
            "CLIENT@ROUNDS",
        ),
    ] = None,
    epochs: Annotated[int | None, _option("Epochs of a round. [2]", _LOCAL)] = None,
    batch_size: Annotated[int | None, _option("Batch size. [32]", _LOCAL)] = None,
    lr: Annotated[float | None, _option("Learning rate. [0.05]", _LOCAL)] = None,
    momentum: Annotated[float | None, _option("Momentum. [0.9]", _LOCAL)] = None,
    weight_decay: Annotated[float | None, _option("Weight decay. [0]", _LOCAL)] = None,
    model: Annotated[
        str | None,
        _option(
            "Network: auto, digits-cnn, mnist-cnn, cifar-cnn, or a function of image "
            "shape (height, width, channels) and number of classes. [auto]",
            _LOCAL,
            "NAME|MODULE:FUNCTION",
        ),
    ] = None,
    attack: Annotated[
        str | None,
        _option(
            "What attackers do: none, pixel, edge-case or label-flip. [none]",
            _ATTACK,
            "KIND",
        ),
    ] = None,
    attackers: Annotated[
        str | None,
        _option("How many, or names with commas. [1]", _ATTACK, "COUNT|NAMES"),
    ] = None,
    poison_ratio: Annotated[
        float | None,
        _option("Share of poison. [usual for the attack]", _ATTACK),
    ] = None,
    target_label: Annotated[
        int | None,
        _option("Class the attackers want. [usual for the attack]", _ATTACK),
    ] = None,
    attack_scale: Annotated[
        float | None, _option("Attackers multiply their updates. [1]", _ATTACK)
    ] = None,
    keep: Annotated[
        str | None,
        _option(
            "Updates the ledger keeps of a round: all, optimal:M, top:M or uniform:M; "
            "or sums: one sum per client and some differences of two, which stays "
            "small however long it trains. [all]",
            _RECORD,
            "KEEP",
        ),
    ] = None,
    keep_use: Annotated[
        str | None,
        _option(
            "Whether updates that are not kept count. [store]",
            _RECORD,
            "store|aggregate",
        ),
    ] = None,
    store: Annotated[
        str | None,
        _option(
            f"How updates are stored: {', '.join(STORAGE_DTYPES)}. [float32]",
            _RECORD,
            "DTYPE",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        _option(
            "Bytes the ledger may take, such as 500MB or 10GB. When a round would "
            "exceed them, the oldest stored updates are dropped, small ones first. "
            "[any number]",
            _RECORD,
            "BYTES",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything. [0]")] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Processes; the result is the same. [as many as pay]"),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="Where clients are trained: in-process, or flower-simulation by "
            "Flower's engine. The result is the same.",
            metavar="ENGINE",
        ),
    ] = "in-process",
    json: JsonFlag = False,
) -> None:
    """Train a federation on real data and record it in a ledger.

    The folder gets config.toml, ledger/, metrics.jsonl and the models. A run that was
    stopped, in whatever way, goes on with **--resume** and ends with the same bytes;
    clients forgotten in the meantime stay out. With --resume only --rounds, --workers,
    --engine, --budget and --forget may change. While it runs, **fastfedul request add**
    asks for a client to be forgotten; that happens before the next round.

    Examples: `fastfedul train my-run`,
    `fastfedul train my-run --data mnist --attack pixel --rounds 30`,
    `fastfedul train my-run --resume`,
    `fastfedul train my-run --engine flower-simulation`
    """
    given = {
        name: value
        for name, value in locals().items()
        if name not in ("run", "config", "resume", "engine", "json")
        and value is not None
        and value != []
    }
    if "forget" in given:
        given["forget"] = tuple(given["forget"])
    _train(run, config, given, engine, go_on=resume, only_json=json)


def _train(
    run: Path,
    config: Path | None,
    given: dict[str, Any],
    engine: Any,
    *,
    go_on: bool,
    only_json: bool,
) -> None:
    # Not at the top, so that other commands start without what training needs.
    from fastfedul.runs import training as experiment
    from fastfedul.runs.config import RunConfig, read_options

    if go_on and config is not None:
        raise InvalidInputError(
            "--resume goes by the run's own config.toml; leave out --config"
        )
    if go_on:
        num_rounds = given.get("rounds") or experiment.load_config(run).rounds
        with (
            _saying_how_to_go_on(run),
            training_progress(num_rounds, only_json) as show,
        ):
            summary = experiment.resume(run, given, show, engine=engine)
    else:
        options = read_options(config) if config is not None else {}
        settings = RunConfig(**{**options, **given})
        with (
            _saying_how_to_go_on(run),
            training_progress(settings.rounds, only_json) as show,
        ):
            summary = experiment.train(run, settings, show, engine=engine)
    if only_json:
        print_json(_facts(summary))
    else:
        _show(summary)


@contextmanager
def _saying_how_to_go_on(run: Path) -> Iterator[None]:
    """Tell somebody who stops a run, on standard error, how it goes on."""
    from fastfedul.ledger.reader import LedgerReader
    from fastfedul.runs.config import CONFIG

    try:
        yield
    except KeyboardInterrupt:
        # Without these there is nothing to go on with, and nothing to say.
        with suppress(FastFedULError, OSError):
            if (run / CONFIG).is_file():
                with LedgerReader(run) as ledger:
                    done = ledger.num_rounds
                rounds = "1 round" if done == 1 else f"{done} rounds"
                command = f"fastfedul train {shlex.quote(str(run))} --resume"
                err().print(
                    f"stopped after {rounds}; go on with: {command}",
                    markup=False,
                    soft_wrap=True,
                )
        raise


@contextmanager
def training_progress(num_rounds: int, hidden: bool) -> Iterator[Any]:
    """Show round, accuracy, rate and time left on standard error."""
    with Progress(
        TextColumn("round"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=err(),
        transient=True,
        disable=hidden or not err().is_terminal,
    ) as bar:
        task = bar.add_task("round", total=num_rounds, start=False, state="starting")

        def show(metrics: RoundMetrics) -> None:
            if not bar.tasks[0].started:
                # From where a run is taken up, or the time left would be far too short.
                bar.reset(task, completed=metrics.round)
            bar.update(task, completed=metrics.round + 1, state=_state(metrics))

        yield show


def _state(metrics: RoundMetrics) -> str:
    parts = []
    if metrics.main is not None:
        parts.append(f"accuracy {metrics.main:.1%}")
    if metrics.backdoor is not None:
        parts.append(f"attack {metrics.backdoor:.1%}")
    if metrics.seconds:
        parts.append(f"{1 / metrics.seconds:.2g} rounds/s")
    return ", ".join(parts)


def _facts(summary: RunSummary) -> dict[str, Any]:
    return {
        "path": str(summary.path),
        "rounds": summary.rounds,
        "main": summary.main,
        "backdoor": summary.backdoor,
        "chain": summary.chain,
        "seconds": summary.seconds,
        "clients": list(summary.clients),
        "attackers": list(summary.attackers),
        "requests": answers_of(summary.answered),
        "dropped": summary.dropped,
    }


def _show(summary: RunSummary) -> None:
    states = _states(summary.path)
    num_gone = sum(state != "active" for state in states.values())
    gone = f", {num_gone} of them forgotten" if num_gone else ""
    rows = [
        ("rounds", str(summary.rounds)),
        ("clients", f"{len(summary.clients)}{gone}"),
        ("accuracy", _percent(summary.main)),
    ]
    if summary.attackers:
        rows += [
            ("attackers", ", ".join(summary.attackers)),
            ("attack succeeds", _percent(summary.backdoor)),
        ]
    rows += [("time", show_seconds(summary.seconds)), ("chain", summary.chain)]
    print_facts(f"Trained {summary.path}", rows)
    show_answers(summary.answered)
    if summary.dropped:
        warn(
            f"the budget had no room for {summary.dropped} updates; "
            f"`fastfedul ledger info {summary.path}` says which"
        )
    left = [name for name in summary.clients if states.get(name) == "active"]
    attacking = [name for name in left if name in summary.attackers]
    if left:
        path = shlex.quote(str(summary.path))
        command = f"fastfedul forget {path} {(attacking or left)[0]}"
        out().print(
            f"Take a client out with: {command}",
            markup=False,
            soft_wrap=True,
        )


def _states(run: Path) -> dict[ClientId, str]:
    """Return what became of every client that took part in a round."""
    from fastfedul.ledger.reader import LedgerReader

    with LedgerReader(run) as ledger:
        return {name: entry.state for name, entry in ledger.clients().items()}


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"
