"""`fastfedul methods`: which ways to forget there are, and their settings."""

from __future__ import annotations

import json as json_text
from typing import Annotated, Any

import typer

from fastfedul.cli.output import JsonFlag, out, print_facts, print_json, print_table
from fastfedul.errors import InvalidInputError
from fastfedul.methods.protocol import Needs
from fastfedul.methods.registry import MethodEntry, describe_method, list_methods


def show_methods(
    name: Annotated[
        str | None,
        typer.Argument(help="A method, to see its settings.", metavar="METHOD"),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """List the methods, or show the settings of one.

    The list has the effect of each method and its needs besides the ledger, also for
    methods of other installed packages; docs/methods.md says how to write one.

    Examples: `fastfedul methods`, `fastfedul methods fast-fedul`
    """
    if name is not None:
        found = describe_method(name)
        if found.problem is not None:
            raise InvalidInputError(found.problem)
        if json:
            print_json(_facts(found))
        else:
            _show(found)
        return
    every = list_methods()
    if json:
        print_json({"methods": [_facts(entry) for entry in every]})
        return
    print_table(
        "Methods",
        ["method", "needs besides the ledger", "what it does"],
        [[entry.name, _asked(entry), entry.problem or entry.note] for entry in every],
    )
    out().print(
        "See the settings of one with `fastfedul methods METHOD`. Use one with "
        "`fastfedul forget --method`, or several with `fastfedul compare --methods`.",
        markup=False,
    )


def _facts(entry: MethodEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "note": entry.note,
        "needs": _needs(entry.needs),
        "settings": [
            {"name": own.name, "default": _plain(own.default), "note": own.note}
            for own in entry.settings
        ],
        "problem": entry.problem,
    }


def _show(entry: MethodEntry) -> None:
    facts = [("what it does", entry.note), ("needs besides the ledger", _asked(entry))]
    print_facts(entry.name, facts)
    if not entry.settings:
        return
    rows = [
        [own.name, _default_text(own.default), own.note or "-"]
        for own in entry.settings
    ]
    print_table("Settings, for --set", ["setting", "default", "meaning"], rows)


def _default_text(value: object) -> str:
    return "-" if value is None else json_text.dumps(_plain(value)).strip('"')


def _plain(value: object) -> Any:
    """Return a default as a JSON value; a package's own objects become text."""
    return json_text.loads(json_text.dumps(value, default=str))


def _asked(entry: MethodEntry) -> str:
    return ", ".join(_needs(entry.needs) or ["nothing"])


def _needs(needs: Needs | None) -> list[str]:
    if needs is None:
        return ["its settings"]
    asked = {
        "the leaving client": needs.target,
        "the other clients": needs.others,
        "images of the server": needs.server_data,
    }
    return [name for name, wanted in asked.items() if wanted]
