"""Arguments and options that commands share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer

Command = Callable[..., None]

LedgerPath = Annotated[
    Path, typer.Argument(help="A ledger, or a run that contains one.", metavar="PATH")
]
RunPath = Annotated[Path, typer.Argument(help="A run, or a ledger.", metavar="RUN")]


def with_options(added: Mapping[str, Any]) -> Callable[[Command], Command]:
    """Return a decorator that gives a command further options.

    The command takes them as keywords. An option that nobody gave is None.

    Args:
        added: Annotated type of each option, by the name of its keyword.
    """

    def decorate(command: Command) -> Command:
        own = signature(command, eval_str=True)
        kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        more = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in added.items()
        ]
        command.__signature__ = own.replace(parameters=[*kept, *more])  # type: ignore[attr-defined]
        return command

    return decorate
