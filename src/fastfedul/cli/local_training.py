"""How clients trained: as options of a command, and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Annotated

import typer

from fastfedul.errors import InvalidInputError
from fastfedul.records import LocalSGD, RoundEntry

_PANEL = "Local training"
_SHOWN = 3
"""How many changes of local training are shown; --json has all."""

LearningRate = Annotated[
    float | None,
    typer.Option(help="Learning rate of the clients' SGD.", rich_help_panel=_PANEL),
]
Momentum = Annotated[
    float | None,
    typer.Option(
        help="Momentum of the clients' SGD, 0 to below 1.", rich_help_panel=_PANEL
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(help="Examples of one SGD step.", rich_help_panel=_PANEL),
]
Epochs = Annotated[
    float | None,
    typer.Option(
        help="How often a client went through its examples in a round.",
        rich_help_panel=_PANEL,
    ),
]


def chosen_training(
    lr: float | None,
    momentum: float | None,
    batch_size: int | None,
    epochs: float | None,
) -> LocalSGD | None:
    """Return the local training that the options name; None if they name none.

    Raises:
        InvalidInputError: If only some of the options are given, or a number is wrong.
    """
    given = {
        "--lr": lr,
        "--momentum": momentum,
        "--batch-size": batch_size,
        "--epochs": epochs,
    }
    missing = [option for option, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if lr is None or momentum is None or batch_size is None or epochs is None:
        raise InvalidInputError(
            "local training is --lr, --momentum, --batch-size and --epochs; add "
            f"{', '.join(missing)}, or give none of the four"
        )
    return LocalSGD(lr=lr, momentum=momentum, batch_size=batch_size, epochs=epochs)


@dataclass(frozen=True, slots=True)
class TrainingSpan:
    """Rounds in a row whose clients trained alike.

    Attributes:
        first_round: Number of the first round.
        last_round: Number of the last round.
        training: How the clients trained; None if that is not recorded.
    """

    first_round: int
    last_round: int
    training: LocalSGD | None


def training_spans(rounds: Sequence[RoundEntry]) -> list[TrainingSpan]:
    """Return how the clients of all rounds trained, a new span for each change."""
    found = []
    for training, own in groupby(rounds, key=attrgetter("local")):
        indices = [round_.index for round_ in own]
        found.append(TrainingSpan(indices[0], indices[-1], training))
    return found


def show_training(spans: Sequence[TrainingSpan]) -> str:
    """Return how the clients trained in words, on one line."""
    known = [(span, span.training) for span in spans if span.training is not None]
    if not known:
        return "not recorded" if spans else "no round yet"
    if len({training for _, training in known}) == 1:
        parts = [_words(known[0][1])]
    else:
        shown = known[:_SHOWN]
        parts = [f"{_words(training)} in {_rounds(span)}" for span, training in shown]
    if len(parts) > 1 and len(known) > _SHOWN:
        parts.append("more changes in --json")
    unknown = sum(_length(span) for span in spans if span.training is None)
    if unknown:
        total = sum(map(_length, spans))
        parts.append(f"not recorded in {unknown} of {total} rounds")
    return "; ".join(parts)


def _words(training: LocalSGD) -> str:
    epochs = "1 epoch" if training.epochs == 1 else f"{training.epochs:g} epochs"
    return (
        f"lr {training.lr:g}, momentum {training.momentum:g}, "
        f"batches of {training.batch_size}, {epochs}"
    )


def _rounds(span: TrainingSpan) -> str:
    if _length(span) == 1:
        return f"round {span.first_round}"
    return f"rounds {span.first_round} to {span.last_round}"


def _length(span: TrainingSpan) -> int:
    return span.last_round - span.first_round + 1
