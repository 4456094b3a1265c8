"""JSON in one form only, so that it can be signed: RFC 8785, and a strict reader."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

from fastfedul.errors import InvalidInputError

_LARGEST_WHOLE = 2**53
_WIDEST = 21
"""Digits beyond which RFC 8785, that is ECMAScript, writes an exponent."""


def encode(value: Any) -> bytes:
    """Return a JSON value in the canonical form of RFC 8785.

    >>> encode({"b": [1.0, 2.5e-7, None], "a": "é"}).decode()
    '{"a":"é","b":[1,2.5e-7,null]}'
    """
    return _text(value).encode()


def parse(text: str) -> Any:
    """Return the value of a JSON text that can be understood in one way only.

    Raises:
        InvalidInputError: If it is not JSON, names a member twice, or holds a number
            that has no canonical form.
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_without_doubles,
            parse_constant=_refuse,
            parse_int=_whole,
        )
        encode(value)
    except RecursionError:
        raise InvalidInputError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise InvalidInputError("it is not valid Unicode") from None
    except ValueError as error:
        raise InvalidInputError(f"it is not valid JSON: {error}") from None
    return value


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int):
        if abs(value) > _LARGEST_WHOLE:
            raise InvalidInputError("a whole number is beyond 2^53")
        return str(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, dict):
        # By UTF-16 code units, as the standard has it.
        ordered = sorted(value.items(), key=lambda item: item[0].encode("utf-16-be"))
        return "{" + ",".join(f"{_text(k)}:{_text(v)}" for k, v in ordered) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_text, value)) + "]"
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _number(value: float) -> str:
    """Return a number as ECMAScript prints it."""
    if not math.isfinite(value):
        raise InvalidInputError(f"{value} is no number of JSON")
    if value == 0:
        return "0"
    sign, found, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int)
    digits = "".join(map(str, found))
    point = len(digits) + exponent
    if len(digits) <= point <= _WIDEST:
        text = digits + "0" * (point - len(digits))
    elif 0 < point <= _WIDEST:
        text = f"{digits[:point]}.{digits[point:]}"
    elif -6 < point <= 0:
        text = f"0.{'0' * -point}{digits}"
    else:
        fraction = f".{digits[1:]}" if len(digits) > 1 else ""
        text = f"{digits[0]}{fraction}e{point - 1:+d}"
    return f"-{text}" if sign else text


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a member comes twice")
    return found


def _whole(text: str) -> float:
    """Return a whole number; JSON's numbers are those of double precision."""
    number = float(text)
    return int(text) if abs(number) <= _LARGEST_WHOLE else number


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
