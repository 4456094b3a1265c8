"""Methods by name: built-in methods, methods of installed packages, a user's own.

A package offers a method by an entry point of the group `fastfedul.methods`. A user
names a class of his own as `package.module:Class`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from fastfedul.errors import FastFedULError, InvalidInputError
from fastfedul.federation.own_functions import import_function, is_own_function
from fastfedul.limits import require_type, show
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
"""Classes and functions that make a method from its settings, by name."""

SHOWN_BY_DEFAULT = tuple(VARIANTS)
"""Methods of a comparison that names none; they need the server alone."""

DEFAULT_METHOD = SHOWN_BY_DEFAULT[0]
"""Name of the method that forgets if none is named."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a method.

    Attributes:
        name: Name by which `--set` gives it.
        default: Default value; where the signature has None, the value that the note
            names as `[default: VALUE]`. None if there is no default.
        note: Meaning, from the docstring of the method; empty if it does not say.
    """

    name: str
    default: object
    note: str


@dataclass(frozen=True, slots=True)
class MethodEntry:
    """A method as lists show it.

    Attributes:
        name: Name by which `compare --methods` and `forget --method` find it.
        note: Description of one line.
        needs: Needs of the method; None if its settings have no defaults.
        settings: Settings of the method.
        is_retraining: Whether the method gives the retrained model itself.
        problem: Reason why the method cannot be used; None if it can.
    """

    name: str
    note: str
    needs: Needs | None
    settings: tuple[Setting, ...]
    is_retraining: bool
    problem: str | None = None

    @property
    def needs_help(self) -> bool:
        """Whether the method needs clients or images besides the ledger."""
        return self.needs is None or bool(self.needs.helpers)


def method_names() -> tuple[str, ...]:
    """Return the names of all installed methods, built-in methods first."""
    others = sorted(set(entry_points(group=GROUP).names) - set(BUILT_IN))
    return (*BUILT_IN, *others)


def list_methods() -> tuple[MethodEntry, ...]:
    """Return all installed methods; a method that fails to load has the reason."""
    return tuple(describe_method(name) for name in method_names())


def describe_method(name: str) -> MethodEntry:
    """Return a method as lists show it."""
    try:
        make = _maker(name)
        notes = _setting_notes(make)
        settings = tuple(
            _setting(own, notes.get(own.name, "")) for own in _parameters(make).values()
        )
        retraining = bool(getattr(make, "is_retraining", False))
        note = method_note(make)
        try:
            needs = make().needs
        except Exception:  # A class of another package may fail in any way.
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
        facts: Facts of a run that defaults depend on; given settings win over them.

    Raises:
        InvalidInputError: If no method has this name, or it lacks a setting.
    """
    require_type("the name of a method", name, str, "text")
    require_type(
        "settings", {} if settings is None else settings, Mapping, "a mapping by name"
    )
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


def find_installed(name: str, settings: Mapping[str, Any] | None = None) -> Method:
    """Return an installed method by a name that comes from a file, with its settings.

    A file must not name code to import, so `package.module:Class` is refused.

    Raises:
        InvalidInputError: If no installed method has this name.
    """
    if not (isinstance(name, str) and name in method_names()):
        raise InvalidInputError(
            f"no installed method is called {show(name)}; `fastfedul methods` lists all"
        )
    return find_method(name, settings)


def has_setting(name: str, setting: str) -> bool:
    """Return whether a method has a setting."""
    return setting in _parameters(_maker(name))


def require_method(found: object) -> Method:
    """Return the given object, which must be a method.

    Raises:
        InvalidInputError: If it is none.
    """
    wanted = ("name", str), ("needs", Needs)
    missing = [n for n, kind in wanted if not isinstance(getattr(found, n, None), kind)]
    if missing or not callable(found) or isinstance(found, type):
        what = f"it has no {missing[0]}" if missing else "it cannot be called"
        if isinstance(found, type):
            what = "it is a class; make an object, as in FastFedUL()"
        raise InvalidInputError(f"{show(found)} is no method: {what}")
    return found  # type: ignore[return-value]


def _maker(name: str) -> Callable[..., Method]:
    """Return the class or function that makes a method from its settings."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if is_own_function(name):
        return import_function(name, "method")
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
    if not callable(make):
        raise InvalidInputError(
            f"the method {name!r:.80} is {type(make).__name__}, not a class"
        )
    return make  # type: ignore[no-any-return]


def _parameters(make: Callable[..., Method]) -> dict[str, inspect.Parameter]:
    """Return the settings by name; `progress` is the program's own."""
    try:
        found = inspect.signature(make).parameters.items()
    except (TypeError, ValueError):
        return {}
    return {name: own for name, own in found if name != "progress"}


def _setting(own: inspect.Parameter, note: str) -> Setting:
    """Return a setting; None in the signature may stand for another default."""
    default = None if own.default is own.empty else own.default
    told = re.fullmatch(r"(.*) \[default: (.*)\]", note)
    if told is None:
        return Setting(own.name, default, note)
    note, text = told.groups()
    if default is None:
        try:
            default = json.loads(text)
        except ValueError:
            default = text
    return Setting(own.name, default, note)


def _setting_notes(make: Callable[..., Method]) -> dict[str, str]:
    """Return the meaning of settings, from `Args` or `Attributes` of the docstring."""
    _, _, listed = re.split(
        r"(?m)^(Args|Attributes):$", f"{inspect.getdoc(make)}\nArgs:", maxsplit=1
    )
    found = re.findall(r"(?m)^    (\w+): (.*(?:\n {8}.*)*)", listed)
    return {name: " ".join(note.split()) for name, note in found}
