"""Trainers and engines that come in from outside.

A run knows no framework. The metadata of this package names PyTorch and Flower as entry
points, as any other package may name its own; a run imports them when it asks for them.
A trainer may also be a function of the user's own.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, cast

from fastfedul.errors import InvalidInputError
from fastfedul.federation.own_functions import import_function, is_own_function
from fastfedul.federation.trainer import TrainerMaker
from fastfedul.federation.workers.pool import InProcess, Workers
from fastfedul.runs.config import RunConfig

TRAINERS = "fastfedul.trainers"
"""Entry points of functions that make a trainer, each a `TrainerMaker`."""

ENGINES = "fastfedul.engines"
"""Entry points of functions of a run's options and of workers in this process."""

IN_PROCESS = "in-process"
"""The engine of the package itself."""


def find_trainer(name: str) -> TrainerMaker:
    """Return the function that makes a trainer.

    Args:
        name: A name among the entry points, or `package.module:function`.

    Raises:
        InvalidInputError: If the function cannot be found.
    """
    if is_own_function(name):
        return import_function(name, "trainer")
    return cast("TrainerMaker", _load(TRAINERS, name))


def engine_maker(name: str) -> Callable[[RunConfig, InProcess], Workers]:
    """Return the function that makes workers on another engine.

    Raises:
        InvalidInputError: If there is no engine of that name.
    """
    return cast("Callable[[RunConfig, InProcess], Workers]", _load(ENGINES, name))


def check_engine(name: str) -> None:
    """Raise unless clients can be trained on this engine.

    Raises:
        InvalidInputError: If there is no engine of that name.
    """
    known = [IN_PROCESS, *sorted(entry_points(group=ENGINES).names)]
    if name not in known:
        raise InvalidInputError(
            f"unknown engine {name!r:.40}; choose {' or '.join(known)}"
        )


def _load(group: str, name: str) -> Any:
    found = entry_points(group=group)
    if name not in found.names:
        raise InvalidInputError(
            f"no installed package has {name!r:.40} among its {group}; there are "
            f"{', '.join(sorted(found.names)) or 'none'}"
        )
    return found[name].load()
