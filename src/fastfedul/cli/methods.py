"""`fastfedul methods`: which ways to forget there are."""

from __future__ import annotations

from fastfedul.cli.output import JsonFlag, out, print_json, print_table
from fastfedul.methods.protocol import Needs
from fastfedul.methods.registry import list_methods


def show_methods(json: JsonFlag = False) -> None:
    """List the methods with their effect, and with their needs besides the ledger.

    Methods of other installed packages are listed too; docs/methods.md says how to
    write one.
    """
    found = list_methods()
    if json:
        print_json(
            {
                "methods": [
                    {
                        "name": entry.name,
                        "note": entry.note,
                        "needs": _needs(entry.needs),
                        "settings": list(entry.settings),
                        "problem": entry.problem,
                    }
                    for entry in found
                ]
            }
        )
        return
    print_table(
        "Methods",
        ["method", "needs besides the ledger", "what it does"],
        [
            [
                entry.name,
                ", ".join(_needs(entry.needs) or ["nothing"]),
                entry.problem or entry.note,
            ]
            for entry in found
        ],
    )
    out().print(
        "Use one with `fastfedul forget --method`, or several with `fastfedul compare "
        "--methods`.",
        markup=False,
    )


def _needs(needs: Needs | None) -> list[str]:
    if needs is None:
        return ["its settings"]
    asked = {
        "the leaving client": needs.target,
        "the other clients": needs.others,
        "images of the server": needs.server_data,
    }
    return [name for name, wanted in asked.items() if wanted]
