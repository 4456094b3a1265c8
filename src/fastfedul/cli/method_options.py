"""Options of the method that forgets, the same for every command that has them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from fastfedul.errors import InvalidInputError
from fastfedul.federation.clients import Federation
from fastfedul.methods.protocol import Method, needs_help
from fastfedul.methods.registry import DEFAULT_METHOD, find_method
from fastfedul.runs import help_texts

_PANEL = "Method"


def _option(kind: Any, *names: str, text: str, **more: Any) -> Any:
    shown = typer.Option(
        *names, help=text, show_default=False, rich_help_panel=_PANEL, **more
    )
    return Annotated[kind, shown]


DampingNumber = Annotated[
    float | None,
    typer.Option(
        help=f"{help_texts.DAMPING} [default: {help_texts.DAMPING_DEFAULT}]",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
EraseFlag = Annotated[bool, typer.Option(help_texts.ERASE_FLAGS, help=help_texts.ERASE)]


def method_options(
    about: str = help_texts.METHOD_OR_OWN, default: str = DEFAULT_METHOD
) -> dict[str, Any]:
    """Return the options that choose a method, for `with_options`.

    Args:
        about: Help of the option that names the method.
        default: Words for its default.
    """
    return {
        "method": _option(
            str | None, text=f"{about} [default: {default}]", metavar="METHOD"
        ),
        "skew": _option(
            str | None,
            text=f"{help_texts.SKEW} [default: {help_texts.SKEW_DEFAULT}]",
            metavar="SKEW",
        ),
        "damping": DampingNumber,
        "minimum_coverage": _option(
            float | None,
            text="Of the methods fast-fedul...: refuse if less of a client's share in "
            "the model was kept. [default: 0.2]",
        ),
        "set_": _option(
            list[str] | None,
            "--set",
            text=help_texts.SETTING,
            metavar=help_texts.SETTING_FORM,
        ),
    }


def method_choice(options: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Return the name and the settings that the options give; None for no name.

    Raises:
        InvalidInputError: If a setting cannot be read, or is given twice.
    """
    settings = named_settings(options["set_"] or ())
    names = ("skew", "damping", "minimum_coverage")
    named = {name: options[name] for name in names if options[name] is not None}
    for name in sorted(settings.keys() & named.keys()):
        raise InvalidInputError(
            f"{name} is given twice, as --{name.replace('_', '-')} and with --set; "
            "leave out one of them"
        )
    settings |= named
    return options["method"], settings


def named_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Return settings of one method, written as NAME=VALUE.

    Raises:
        InvalidInputError: If a setting cannot be read.
    """
    form, example = help_texts.SETTING_FORM, help_texts.SETTING_EXAMPLE
    return dict(_read_setting(text, form, example)[1:] for text in texts)


def chosen_method(options: Mapping[str, Any]) -> Method:
    """Return the method that the options name.

    Raises:
        InvalidInputError: If no method has that name, or the method lacks a setting.
    """
    name, settings = method_choice(options)
    return find_method(DEFAULT_METHOD if name is None else name, settings)


def read_settings(texts: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Return settings written as METHOD.NAME=VALUE, by method and name."""
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        method, name, value = _read_setting(
            text, "METHOD.NAME=VALUE", "federaser.interval=4"
        )
        found.setdefault(method, {})[name] = value
    return dict(found)


def _read_setting(text: str, form: str, example: str) -> tuple[str, str, Any]:
    """Return the method, the name and the value: JSON, else text."""
    place, equals, value = text.partition("=")
    method, _, name = place.rpartition(".")
    if not (equals and name.isidentifier() and bool(method) == ("." in form)):
        raise InvalidInputError(
            f"cannot read the setting {text!r:.60}; write {form}, such as {example}"
        )
    try:
        return method, name, json.loads(value)
    except ValueError:
        return method, name, value


def federation_of(
    path: Path, method: Method
) -> AbstractContextManager[Federation | None]:
    """Return a context with the clients of a run, if the method needs their help."""
    if not needs_help(method):
        return nullcontext()
    # A server that forgets by itself needs no package for training.
    from fastfedul.runs.federation import open_federation

    return open_federation(path, method)
