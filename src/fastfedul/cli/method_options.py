"""Options of the method that forgets, the same for every command that has them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from fastfedul.errors import InvalidInputError
from fastfedul.methods.fast_fedul.method import FastFedUL
from fastfedul.methods.fast_fedul.skews import PAPERS_DAMPING
from fastfedul.methods.protocol import Method
from fastfedul.methods.registry import find_method

_PANEL = "Method"

MethodName = Annotated[
    str,
    typer.Option(
        "--method",
        help="How to forget; `fastfedul methods` lists them. Your own: "
        "package.module:Class.",
        metavar="METHOD",
        rich_help_panel=_PANEL,
    ),
]
SkewName = Annotated[
    str | None,
    typer.Option(
        help="How much the others' training pulled back by itself. kronecker: most "
        "where their updates differ most. scalar: the same part of everything in "
        "every round, as in the paper. none: nothing. "
        "[default: kronecker; scalar with --damping]",
        metavar="SKEW",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
DampingNumber = Annotated[
    float | None,
    typer.Option(
        help="Damping of skew scalar: the part that a round pulls back, 0 to 1; the "
        "paper's alpha with a minus. More keeps accuracy, less removes more. "
        f"[default: {PAPERS_DAMPING}]",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
MinimumCoverage = Annotated[
    float | None,
    typer.Option(
        help="Refuse if less of a client's share in the model was kept. [default: 0.2]",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
SettingTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Another setting of the method, such as interval=4; may be repeated.",
        rich_help_panel=_PANEL,
    ),
]
USUAL_METHOD = FastFedUL.name


def method_choice(
    name: str = USUAL_METHOD,
    skew: str | None = None,
    damping: float | None = None,
    minimum_coverage: float | None = None,
    texts: Sequence[str] = (),
) -> tuple[str, dict[str, Any]]:
    """Return the name and the settings of the method that the options name.

    Raises:
        InvalidInputError: If a setting cannot be read.
    """
    settings: dict[str, Any] = {}
    for text in texts:
        setting, equals, value = text.partition("=")
        if not (equals and setting.isidentifier()):
            raise InvalidInputError(
                f"cannot read the setting {text!r:.60}; write NAME=VALUE, such as "
                "interval=4"
            )
        settings[setting] = read_value(value)
    options = {"skew": skew, "damping": damping, "minimum_coverage": minimum_coverage}
    settings |= {key: value for key, value in options.items() if value is not None}
    return name, settings


def chosen_method(
    name: str = USUAL_METHOD,
    skew: str | None = None,
    damping: float | None = None,
    minimum_coverage: float | None = None,
    texts: Sequence[str] = (),
) -> Method:
    """Return the method that the options name.

    Raises:
        InvalidInputError: If there is no such method, or it has no such setting.
    """
    return find_method(*method_choice(name, skew, damping, minimum_coverage, texts))


def read_value(text: str) -> Any:
    """Return a setting's value: JSON, else text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_settings(texts: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Return settings written as METHOD.NAME=VALUE, by method and name."""
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        place, equals, value = text.partition("=")
        method, dot, name = place.rpartition(".")
        if not (equals and dot and method and name.isidentifier()):
            raise InvalidInputError(
                f"cannot read the setting {text!r:.60}; write METHOD.NAME=VALUE, such "
                "as federaser.interval=4"
            )
        found.setdefault(method, {})[name] = read_value(value)
    return dict(found)
