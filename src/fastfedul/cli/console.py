"""`fastfedul console`: pages about a run or ledger, for the operator's browser."""

from __future__ import annotations

from typing import Annotated

import typer

from fastfedul.cli.options import RunPath
from fastfedul.cli.output import JsonFlag, out, print_json, say

USUAL_PORT = 8765


def open_console(
    path: RunPath,
    port: Annotated[
        int,
        typer.Option(
            help="Port on this machine; 0 for any that is free.", metavar="PORT"
        ),
    ] = USUAL_PORT,
    json: JsonFlag = False,
) -> None:
    """Serve pages about a run or ledger: look, forget, trace, verify.

    Open the printed link. Its token lets this browser change something; without it, a
    browser may only look. The console listens on this machine alone and asks no other
    machine for anything. It follows a training that goes on, and takes no lock to look.
    Ctrl-C ends it.

    Example: `fastfedul console my-run`
    """
    from fastfedul.console.server import serve

    def ready(link: str, place: str) -> None:
        if json:
            print_json({"link": link, "read_only": place})
            return
        out().print(f"Open {link}", markup=False, soft_wrap=True)
        say("Ctrl-C ends the console.")

    serve(path, port, ready)
