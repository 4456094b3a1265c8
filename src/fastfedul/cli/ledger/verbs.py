"""The verbs of `fastfedul ledger`."""

from __future__ import annotations

import typer

from fastfedul.cli.ledger.compaction import compact
from fastfedul.cli.ledger.contents import clients, info, lineage
from fastfedul.cli.ledger.copies import backup, import_models, restore
from fastfedul.cli.ledger.sizes import estimate_ledger
from fastfedul.cli.ledger.verification import verify_ledger
from fastfedul.cli.options import Command

app = typer.Typer(no_args_is_help=True)
_VERBS: dict[str, Command] = {
    "info": info,
    "lineage": lineage,
    "clients": clients,
    "estimate": estimate_ledger,
    "verify": verify_ledger,
    "compact": compact,
    "import": import_models,
    "backup": backup,
    "restore": restore,
}
for _name, _verb in _VERBS.items():
    app.command(_name)(_verb)
