"""Options of the method that forgets, the same for every command that has them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from fastfedul.errors import InvalidInputError
from fastfedul.methods.fast_fedul.method import FastFedUL
from fastfedul.methods.protocol import Method
from fastfedul.methods.registry import find_method
from fastfedul.runs import help_texts

_PANEL = "Method"

MethodName = Annotated[
    str,
    typer.Option(
        "--method",
        help=help_texts.METHOD_OR_OWN,
        metavar="METHOD",
        rich_help_panel=_PANEL,
    ),
]
SkewName = Annotated[
    str | None,
    typer.Option(
        help=f"{help_texts.SKEW} [default: {help_texts.SKEW_DEFAULT}]",
        metavar="SKEW",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
DampingNumber = Annotated[
    float | None,
    typer.Option(
        help=f"{help_texts.DAMPING} [default: {help_texts.DAMPING_DEFAULT}]",
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
EraseFlag = Annotated[bool, typer.Option(help_texts.ERASE_FLAGS, help=help_texts.ERASE)]
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
        InvalidInputError: If no method has that name, or the method lacks a setting.
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
