"""The living federation of a run, for methods that need the clients' help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastfedul.errors import InvalidInputError
from fastfedul.federation.clients import Federation
from fastfedul.methods.protocol import Method, needs_help
from fastfedul.runs.evaluation_source import run_at
from fastfedul.runs.preparation import federation_for, prepare, start_workers
from fastfedul.runs.training import load_config


@contextmanager
def open_federation(path: Path, method: Method) -> Iterator[Federation | None]:
    """Yield the clients of a run, if a method needs their help; else None.

    Args:
        path: A run, or a ledger.
        method: The method.

    Raises:
        InvalidInputError: If the method needs clients and there is no run to ask.
    """
    if not needs_help(method):
        yield None
        return
    run = run_at(path)
    if run is None:
        raise InvalidInputError(
            f"{method.name} needs the help of clients, and {path} is no run whose "
            "clients could be asked; use the default method"
        )
    prepared = prepare(load_config(run))
    with start_workers(prepared) as workers:
        yield federation_for(prepared, workers)
