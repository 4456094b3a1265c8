"""How methods are found: built in, in installed packages, or in a module named.

A package offers a method by an entry point of the group `fastfedul.methods`. A module
that is no package's is named in full, as `package.module:Class`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from fastfedul.errors import FastFedULError, InvalidInputError
from fastfedul.methods.cdp import CDP
from fastfedul.methods.fast_fedul.variants import VARIANTS
from fastfedul.methods.federaser import FedAccum, FedEraser
from fastfedul.methods.fedrecover import FedRecover
from fastfedul.methods.kd import KD
from fastfedul.methods.pga import PGA
from fastfedul.methods.protocol import (
    Method,
    Needs,
    RunFacts,
    method_note,
)
from fastfedul.methods.retrain import Retrain

GROUP = "fastfedul.methods"
"""Entry points of methods: a class, or a function of the settings."""

_CLASSES = (Retrain, FedEraser, FedAccum, CDP, PGA, KD, FedRecover)

BUILT_IN: dict[str, Callable[..., Method]] = {
    **{method.name: method for method in _CLASSES},
    **VARIANTS,
}
"""Name to what makes the method from its settings."""

SHOWN_BY_DEFAULT = tuple(VARIANTS)
"""Methods that a comparison shows if none is named: they need the server alone."""

DEFAULT_METHOD = SHOWN_BY_DEFAULT[0]
"""Name of the method that forgets if none is named."""


@dataclass(frozen=True, slots=True)
class MethodEntry:
    """A method as lists show it.

    Attributes:
        name: Name by which `compare --methods` and `forget --method` find it.
        note: What the method does, in one line.
        needs: What it cannot do without; None if it cannot be made without settings.
        settings: Names of its settings.
        is_retraining: Whether it gives the retrained model itself.
        problem: Why it cannot be used; None if it can.
    """

    name: str
    note: str
    needs: Needs | None
    settings: tuple[str, ...]
    is_retraining: bool
    problem: str | None = None

    @property
    def needs_help(self) -> bool:
        """Whether it needs clients or images, besides the history."""
        found = self.needs
        return found is None or found.target or found.others or found.server_data


def method_names() -> tuple[str, ...]:
    """Return the names of all methods: those built in, then those of other packages."""
    others = sorted(set(entry_points(group=GROUP).names) - set(BUILT_IN))
    return (*BUILT_IN, *others)


def list_methods() -> tuple[MethodEntry, ...]:
    """Return all methods; one that cannot be loaded is listed with the reason."""
    return tuple(describe_method(name) for name in method_names())


def describe_method(name: str) -> MethodEntry:
    """Return a method as lists show it."""
    try:
        make = _maker(name)
        settings = tuple(_parameters(make))
        retraining = bool(getattr(make, "is_retraining", False))
        note = method_note(make)
        try:
            needs = make().needs
        except Exception:  # Whatever another package's method needs to be made.
            needs = None
    except FastFedULError as error:
        return MethodEntry(name, "", None, (), False, str(error))
    return MethodEntry(name, note, needs, settings, retraining)


def find_method(
    name: str,
    settings: Mapping[str, Any] | None = None,
    facts: RunFacts | None = None,
) -> Method:
    """Return a method by name, with its settings.

    Args:
        name: A name of `method_names`, or `package.module:Class`.
        settings: Settings of the method, by name.
        facts: What a run can tell; settings that are given win over it.

    Raises:
        InvalidInputError: If there is no such method, or it has no such setting.
    """
    make = _maker(name)
    defaults = getattr(make, "defaults", None)
    usual = defaults(facts) if callable(defaults) and facts is not None else {}
    given = dict(settings or {})
    known = _parameters(make)
    unknown = [key for key in given if key not in known]
    if unknown:
        raise InvalidInputError(
            f"{name} has no such setting: {unknown[0]!s:.40}; choose from "
            f"{', '.join(known) or 'none'}"
        )
    try:
        found = make(**{**usual, **given})
    except FastFedULError:
        raise
    except Exception as error:
        said = ", ".join(f"{key}={value!r:.40}" for key, value in given.items())
        raise InvalidInputError(
            f"a setting of {name} is of the wrong kind: {said or 'none was given'} "
            f"({type(error).__name__})"
        ) from None
    return require_method(found)


def has_default(name: str, setting: str) -> bool:
    """Return whether a method has such a setting, and a value for it by default."""
    found = inspect.signature(_maker(name)).parameters.get(setting)
    return found is not None and found.default not in (None, inspect.Parameter.empty)


def require_method(found: object) -> Method:
    """Return what was handed in as a method.

    Raises:
        InvalidInputError: If it is none.
    """
    wanted = ("name", str), ("needs", Needs)
    missing = [n for n, kind in wanted if not isinstance(getattr(found, n, None), kind)]
    if missing or not callable(found) or isinstance(found, type):
        what = f"it has no {missing[0]}" if missing else "it cannot be called"
        if isinstance(found, type):
            what = "it is a class; make one, as in FastFedUL()"
        raise InvalidInputError(f"{found!r:.60} is no method: {what}")
    return found  # type: ignore[return-value]


def _maker(name: str) -> Callable[..., Method]:
    """Return what makes a method from its settings."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" in name:
        return _imported(name)
    found = entry_points(group=GROUP)
    if name not in found.names:
        raise InvalidInputError(
            f"unknown method {name!r:.40}; choose from {', '.join(method_names())}, or "
            "name your own as package.module:Class"
        )
    try:
        make = found[name].load()
    except Exception as error:  # A package of anybody's may fail in any way.
        raise InvalidInputError(
            f"the method {name!r:.40} cannot be loaded from {found[name].value!r:.80}: "
            f"{type(error).__name__}: {error}"
        ) from None
    return _callable(name, make)


def _imported(name: str) -> Callable[..., Method]:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # A module of anybody's may fail in any way.
        raise InvalidInputError(
            f"the method {name!r:.80} cannot be loaded: {type(error).__name__}: {error}"
        ) from None
    return _callable(name, found)


def _callable(name: str, found: object) -> Callable[..., Method]:
    if not callable(found):
        raise InvalidInputError(
            f"the method {name!r:.80} is {type(found).__name__}, not a class"
        )
    return found


def _parameters(make: Callable[..., Method]) -> tuple[str, ...]:
    """Return the names of the settings; what is set by the program is none."""
    try:
        found = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in found if p.name != "progress")
