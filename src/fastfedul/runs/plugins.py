"""Trainers and engines that come in from outside, by entry points.

A run knows no framework. PyTorch and Flower are named in the metadata of this package,
as those of any other package may be, and are imported when a run asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, cast

from fastfedul.errors import InvalidInputError
from fastfedul.federation.trainer import ImageTrainer
from fastfedul.federation.workers.pool import InProcess, Workers
from fastfedul.runs.config import RunConfig

TRAINERS = "fastfedul.trainers"
"""Entry points of functions of `image_shape`, `num_classes`, `model` and `local`."""

ENGINES = "fastfedul.engines"
"""Entry points of functions of a run's options and of workers in this process."""

PYTORCH = "torch"
IN_PROCESS = "in-process"
"""The engine of the package itself."""


def trainer_maker(name: str = PYTORCH) -> Callable[..., ImageTrainer]:
    """Return what makes a trainer for images.

    Raises:
        InvalidInputError: If there is none of that name.
    """
    return cast("Callable[..., ImageTrainer]", _load(TRAINERS, name))


def engine_maker(name: str) -> Callable[[RunConfig, InProcess], Workers]:
    """Return what makes workers that train on another engine.

    Raises:
        InvalidInputError: If there is none of that name.
    """
    return cast("Callable[[RunConfig, InProcess], Workers]", _load(ENGINES, name))


def check_engine(name: str) -> None:
    """Raise unless clients can be trained on this engine.

    Raises:
        InvalidInputError: If there is none of that name.
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
