"""A reader of JSON from strangers that accepts a text only if it has one meaning.

`json` alone accepts repeated members, NaN, and numbers that a double cannot hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from fastfedul.errors import InvalidInputError

_FIRST_UNSAFE_INTEGER = 2**53
"""From here on, two integers may share a double (RFC 7493, section 2.2)."""


def finite_values(value: Any) -> Any:
    """Return JSON values with None for NaN and infinity, and lists for tuples.

    >>> finite_values({"share": float("nan"), "ends": (0.5, 1.0)})
    {'share': None, 'ends': [0.5, 1.0]}
    """
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_values(item) for item in value]
    return value


def parse(text: str) -> Any:
    """Return the value of a JSON text that has one meaning only.

    Raises:
        InvalidInputError: If the text is not JSON, names a member twice, or holds NaN,
            infinity, a number beyond double precision or half a surrogate pair.

    >>> parse('{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_build_object,
            parse_constant=_refuse_constant,
            parse_float=_parse_double,
            parse_int=_parse_integer,
        )
        # Half a surrogate pair is no text: it has no bytes.
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise InvalidInputError("the JSON text is nested too deeply") from None
    except ValueError as error:
        raise InvalidInputError(f"the text is not valid JSON: {error}") from None
    return value


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a member of an object comes twice")
    return found


def _parse_double(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text:.20} is no number of double precision")
    return number


def _parse_integer(text: str) -> float:
    """Return an integer, or from 2^53 on the double that JSON numbers are."""
    number = _parse_double(text)
    return int(text) if abs(number) < _FIRST_UNSAFE_INTEGER else number


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
