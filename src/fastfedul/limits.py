"""Checks of a caller's values: a wrong type or size is refused in one line."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fastfedul.errors import InvalidInputError

Place = str | os.PathLike[str]
"""A path, or a run that `train` returned; `path_of` has the path."""

_LONGEST_SHOWN = 60


def show(value: object) -> str:
    """Return a value as a message quotes it: short, whatever the value is.

    >>> show("x" * 100)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…"
    """
    try:
        text = repr(value)
    except Exception:  # An integer of 5,000 digits has no text; a class may fail.
        return f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 1]}…"


def machine_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def require_number(
    what: str,
    value: object,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    whole: bool = False,
    unset: bool = False,
) -> None:
    """Raise unless a value is a finite number within limits.

    Args:
        what: Name of the value in the message, such as `batch size`.
        value: The value.
        least: Smallest number allowed.
        above: Number that the value must exceed.
        most: Largest number allowed.
        below: Number that the value must stay below.
        whole: Whether only whole numbers are allowed.
        unset: Whether None is allowed.

    Raises:
        InvalidInputError: If it is not.

    >>> require_number("size", 0, least=1)
    Traceback (most recent call last):
        ...
    fastfedul.errors.InvalidInputError: the size is 0; choose a number of 1 or more
    """
    if value is None and unset:
        return
    # Comparisons alone: functions of `math` fail for very large integers.
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and -math.inf < value < math.inf
        and (least is None or value >= least)
        and (above is None or value > above)
        and (most is None or value <= most)
        and (below is None or value < below)
        and (not whole or isinstance(value, int))
    ):
        return
    ends = (
        (least, "from {:g}" if most is not None else "of {:g} or more"),
        (above, "above {:g}"),
        (most, "to {:g}" if least is not None else "up to {:g}"),
        (below, "below {:g}"),
    )
    given = [text.format(end) for end, text in ends if end is not None]
    limits = (" " if least is not None and most is not None else " and ").join(given)
    kind = "whole number" if whole else "number"
    plain = " of Python's own" if isinstance(value, np.generic) else ""
    raise InvalidInputError(
        f"the {what} is {show(value)}; choose a {kind}{plain} {limits}".rstrip()
    )


def require_choice(what: str, value: object, choices: Sequence[str]) -> None:
    """Raise unless a value is one of some texts.

    Raises:
        InvalidInputError: If it is not.
    """
    if not (isinstance(value, str) and value in choices):
        names = " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))
        raise InvalidInputError(f"the {what} is {show(value)}; choose {names}")


def require_type(
    what: str, value: object, kinds: type | tuple[type, ...], wanted: str
) -> None:
    """Raise unless a value is of a type.

    Args:
        what: Subject of the message, such as `the reason of a request`.
        value: The value.
        kinds: The types that are allowed.
        wanted: The allowed values in words, such as `text`.

    Raises:
        InvalidInputError: If it is not.
    """
    if not isinstance(value, kinds):
        raise InvalidInputError(f"{what} is {wanted}, not {show(value)}")


def path_of(place: object) -> Path:
    """Return the path of a place: text, a path, or a run that `train` returned.

    Raises:
        InvalidInputError: If it is no path, or has characters that no path has.
    """
    wanted = "text, a pathlib.Path, or what fastfedul.train returned"
    require_type("a path", place, (str, os.PathLike), wanted)
    text = os.fspath(place)  # type: ignore[call-overload]
    require_type("a path", text, str, wanted)
    if not text or "\0" in text or any("\ud800" <= c <= "\udbff" for c in text):
        raise InvalidInputError(f"{show(text)} is no path; name a file or a folder")
    return Path(text)
