"""`fastfedul train`: train a federation and record it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from fastfedul.cli.method_options import named_settings
from fastfedul.cli.options import with_options
from fastfedul.cli.output import (
    JsonFlag,
    err,
    out,
    print_facts,
    print_json,
    say,
    show_name,
    show_seconds,
    warn,
)
from fastfedul.cli.request import answers_of, certificate_text, show_answers
from fastfedul.cli.stopping import telling_how_to_go_on
from fastfedul.errors import FastFedULError, InvalidInputError
from fastfedul.runs.config import CONFIG, RunConfig, read_options
from fastfedul.runs.options import OptionField, option_fields, plain_type
from fastfedul.runs.plugins import IN_PROCESS

if TYPE_CHECKING:
    from fastfedul.forgetting.requests import AppliedRequest
    from fastfedul.records import ClientId
    from fastfedul.runs.metrics_file import RoundMetrics
    from fastfedul.runs.stages import StageTimes
    from fastfedul.runs.training import PlannedForgetting, RunSummary

_NARROW = 80
"""Columns below which the progress leaves its bar and the rate out."""


def _typed(place: OptionField) -> Any:
    """Return the type and the help of an option, from its field."""
    kind, metavar = plain_type(place.field.annotation), place.shown.metavar
    if get_origin(kind) is Literal:
        kind, metavar = str, metavar or "|".join(get_args(kind))
    elif get_origin(kind) in (tuple, dict):
        kind = list[str]
    shown = typer.Option(
        *([place.shown.flags] if place.shown.flags else []),
        help=f"{place.field.description}{_default_of(place)}",
        rich_help_panel=place.panel,
        metavar=metavar,
        show_default=False,
    )
    return Annotated[kind | None, shown]


def _default_of(place: OptionField) -> str:
    default = place.field.default
    if default in ((), {}):
        return ""
    if isinstance(default, bool):
        yes, no = (place.shown.flags or "/").split("/")
        return f" [{(yes if default else no).removeprefix('--')}]"
    shown = f"{default:g}" if isinstance(default, float) else default
    return f" [{place.shown.unset if default is None else shown}]"


@with_options({name: _typed(place) for name, place in option_fields(RunConfig).items()})
def train_run(
    run: Annotated[
        Path, typer.Argument(help="Folder of the run; a new one.", metavar="RUN")
    ],
    *,
    config: Annotated[
        Path | None,
        typer.Option(help="Read options from this TOML file; the command line wins."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run where it stopped.")
    ] = False,
    engine: Annotated[
        str,
        typer.Option(
            help="Where clients are trained: in-process, or flower-simulation by "
            "Flower's engine. The result is the same. [in-process]",
            metavar="ENGINE",
            show_default=False,
        ),
    ] = "in-process",
    metrics_port: Annotated[
        int | None,
        typer.Option(
            help="Serve metrics for Prometheus on this port of 127.0.0.1 while "
            "training; 0 for any that is free.",
            metavar="PORT",
        ),
    ] = None,
    json: JsonFlag = False,
    **options: Any,
) -> None:
    """Train a federation on real data and record it in a ledger.

    The folder gets config.toml, ledger/, metrics.jsonl and the models. A run that was
    stopped, in whatever way, goes on with **--resume** and ends with the same bytes;
    clients forgotten in the meantime stay out. With --resume only --rounds, --workers,
    --engine, --budget and the options of forgetting may change. While it runs,
    **fastfedul request add** asks for a client to be forgotten; that happens before the
    next round.

    Examples: `fastfedul train my-run`,
    `fastfedul train my-run --data mnist --attack pixel --rounds 30`,
    `fastfedul train my-run --forget client-0@10 --skew scalar --damping 0.07`,
    `fastfedul train my-run --resume`,
    `fastfedul train my-run --engine flower-simulation`
    """
    given = {k: v for k, v in options.items() if v is not None and v != []}
    if "set" in given:
        given["set"] = named_settings(given["set"])
    with _watched(run, metrics_port) as stages:
        _train(run, config, given, engine, stages, go_on=resume, only_json=json)


@contextmanager
def _watched(run: Path, port: int | None) -> Iterator[StageTimes | None]:
    """Serve the metrics of a training, if somebody gave a port for them."""
    if port is None:
        yield None
        return
    from fastfedul.runs.stages import StageTimes
    from fastfedul.watching import served_metrics

    stages = StageTimes()
    with served_metrics(run, port, stages) as own:
        say(f"metrics at http://127.0.0.1:{own}/metrics", port=own)
        yield stages


def _train(
    run: Path,
    config: Path | None,
    given: dict[str, Any],
    engine: Any,
    stages: StageTimes | None,
    *,
    go_on: bool,
    only_json: bool,
) -> None:
    # Not at the top: `train --help` does not need it.
    from fastfedul.runs import training

    if go_on and config is not None:
        raise InvalidInputError(
            "--resume reads the run's own config.toml; leave out --config"
        )
    if go_on:
        num_rounds = given.get("rounds") or training.load_config(run).rounds
        with (
            telling_how_to_go_on(lambda: how_to_resume(run)),
            training_progress(num_rounds, only_json) as lines,
        ):
            _tell_start(engine, lines)
            summary = training.resume(
                run, given, **lines.callbacks, engine=engine, stages=stages
            )
    else:
        options = read_options(config) if config is not None else {}
        settings = RunConfig.from_options({**options, **given})
        with (
            telling_how_to_go_on(lambda: how_to_resume(run)),
            training_progress(settings.rounds, only_json) as lines,
        ):
            _tell_start(engine, lines)
            summary = training.train(
                settings, run, **lines.callbacks, engine=engine, stages=stages
            )
    if only_json:
        print_json(_facts(summary))
    else:
        _show(summary)


def _tell_start(engine: str, lines: TrainingLines) -> None:
    """Say what the first round waits for, where it waits long."""
    if engine != IN_PROCESS:
        lines.say(f"starting {engine}")


def _request_line(done: AppliedRequest) -> str:
    request = done.request
    answer = f"; {request.answer}" if request.answer else ""
    return (
        f"request {request.number}, {show_name(request.client)}: {request.state}"
        f"{answer}"
    )


def _forgotten_line(done: PlannedForgetting) -> str:
    found = done.forgetting
    rounds = "1 round" if done.rounds == 1 else f"{done.rounds} rounds"
    return (
        f"Forgot {show_name(done.client)} after {rounds}: {found.coverage:.1%} of its "
        f"share was kept, the model moved by {found.delta_norm:.4g}; "
        f"{certificate_text(found.certificate, found.signed)}"
    )


def how_to_resume(run: Path) -> str | None:
    """Return how to go on with a run that stopped; None if it has not begun."""
    from fastfedul.ledger.reader import LedgerReader

    with suppress(FastFedULError, OSError):
        if (run / CONFIG).is_file():
            with LedgerReader(run) as ledger:
                done = ledger.num_rounds
            rounds = "1 round" if done == 1 else f"{done} rounds"
            command = f"fastfedul train {shlex.quote(str(run))} --resume"
            return f"stopped after {rounds}; go on with: {command}"
    return None


@dataclass(frozen=True, slots=True)
class TrainingLines:
    """The lines about a training on standard error.

    Attributes:
        show: Shows a round.
        say: Prints a sentence between two rounds.
    """

    show: Callable[[RoundMetrics], None]
    say: Callable[[str], None]

    @property
    def callbacks(self) -> dict[str, Callable[[Any], None]]:
        """The functions that a training calls, by the names of its arguments."""
        return {
            "progress": self.show,
            "answered": lambda done: self.say(_request_line(done)),
            "forgot": lambda done: self.say(_forgotten_line(done)),
        }


@contextmanager
def training_progress(num_rounds: int, hidden: bool) -> Iterator[TrainingLines]:
    """Show rounds done, accuracy and time left on standard error.

    A terminal shows one line that changes. Elsewhere every round gets a line of its
    own, so that a file or a log says how far the run is.
    """
    console = err()
    if hidden:
        yield TrainingLines(lambda metrics: None, lambda text: None)
    elif not console.is_terminal:
        yield TrainingLines(_print_rounds(num_rounds), say)
    else:
        with _changing_line(num_rounds, console) as show:
            # This console alone knows the line that changes.
            tell = partial(console.print, markup=False, soft_wrap=True)
            yield TrainingLines(show, tell)


def _print_rounds(num_rounds: int) -> Callable[[RoundMetrics], None]:
    taken: list[float] = []

    def show(metrics: RoundMetrics) -> None:
        seconds, done = metrics.seconds or 0.0, metrics.round + 1
        taken.append(seconds)
        left = sum(taken) / len(taken) * (num_rounds - done)
        parts = [*_accuracies(metrics), show_seconds(seconds)]
        rest = timedelta(seconds=round(left))
        say(
            f"{done} of {num_rounds} rounds: {', '.join(parts)}, {rest} left",
            **asdict(metrics),
        )

    return show


@contextmanager
def _changing_line(
    num_rounds: int, console: Console
) -> Iterator[Callable[[RoundMetrics], None]]:
    narrow = console.width < _NARROW
    with Progress(
        TextColumn("rounds"),
        MofNCompleteColumn(),
        *([] if narrow else [BarColumn()]),
        # On a very narrow terminal this column gives way, not the others.
        TextColumn(
            "{task.fields[state]}",
            table_column=Column(overflow="ellipsis"),
        ),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("rounds", total=num_rounds, start=False, state="starting")

        def show(metrics: RoundMetrics) -> None:
            if not bar.tasks[0].started:
                # From where a run is taken up, or the time left would be far too short.
                bar.reset(task, completed=metrics.round)
            state = _accuracies(metrics, digits=0 if narrow else 1)
            if metrics.seconds and not narrow:
                state.append(f"{1 / metrics.seconds:.2g} rounds/s")
            bar.update(task, completed=metrics.round + 1, state=", ".join(state))

        yield show


def _accuracies(metrics: RoundMetrics, digits: int = 1) -> list[str]:
    parts = []
    if metrics.main is not None:
        parts.append(f"accuracy {metrics.main:.{digits}%}")
    if metrics.backdoor is not None:
        parts.append(f"attack success {metrics.backdoor:.{digits}%}")
    return parts


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
        "forgotten": [
            {
                "client": done.client,
                "rounds": done.rounds,
                "coverage": done.forgetting.coverage,
                "delta_norm": done.forgetting.delta_norm,
                "erased": done.forgetting.erased,
                "certificate": str(done.forgetting.certificate),
                "signed": done.forgetting.signed,
            }
            for done in summary.forgotten
        ],
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
            ("attack success", _percent(summary.backdoor)),
        ]
    rows += [("time", show_seconds(summary.seconds)), ("chain", summary.chain)]
    print_facts(f"Trained {summary.path}", rows)
    show_answers(summary.answered)
    for done in summary.forgotten:
        out().print(_forgotten_line(done), markup=False, soft_wrap=True)
    if summary.dropped:
        warn(
            f"the budget had no room for {summary.dropped} updates; "
            f"`fastfedul ledger clients {summary.path}` says whose"
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
    """Return the state of every client that took part in a round."""
    from fastfedul.ledger.reader import LedgerReader

    with LedgerReader(run) as ledger:
        return {name: entry.state for name, entry in ledger.clients().items()}


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"
