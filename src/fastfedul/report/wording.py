"""Numbers and names as people read them; names come from strangers."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence

from fastfedul.report.content import Count, Interval

NOTHING = "–"
# Controls, marks that turn the direction of writing, lone surrogates, non-characters.
_UNSHOWABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff0-\ufffb\ufffe\uffff]"
)


def tidy(text: str) -> str:
    r"""Return the text on one line, with a sign for each character without a shape.

    >>> tidy("two\nlines")
    'two�lines'
    """
    return _UNSHOWABLE.sub("\ufffd", text)


def tidy_lines(text: str) -> str:
    """Return the text like `tidy`, with its line breaks and tabs left alone."""
    kept = re.split(r"(\n|\t)", text.replace("\r\n", "\n"))
    return "".join(part if part in ("\n", "\t") else tidy(part) for part in kept)


def shorten(text: str, width: int = 60) -> str:
    """Return the tidy text, cut to so many columns; wide characters take two.

    >>> shorten("client-12345", 8)
    'client-…'
    """
    shown = tidy(text[: width + 1])
    room, used = width, 0
    for place, character in enumerate(shown):
        used += 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if used > room:
            return shown[: max(place - 1, 1)] + "…"
    return shown


def show_name(name: str) -> str:
    r"""Return a client name that is safe to show on one line, and to tell apart.

    >>> show_name("a\u202eb")
    "'a\\u202eb'"
    """
    shown = name if name.isprintable() else repr(name)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def show_share(value: float | None) -> str:
    """Return a share as a percentage with one digit."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value * 100:.1f} %"


def describe_shares(main: float, backdoor: float | None) -> str:
    """Return both shares in words, for a description of a chart."""
    attack = "" if backdoor is None else f", attack success {show_share(backdoor)}"
    return f"accuracy {show_share(main)}{attack}"


def show_count(count: Count | None) -> str:
    """Return a count out of a total."""
    return f"{count[0]:,} of {count[1]:,}" if count else ""


def show_interval(interval: Interval | None) -> str:
    """Return the two ends as percentages; empty if there is no interval."""
    if interval is None or not all(map(math.isfinite, interval)):
        return ""
    low, high = interval
    return f"{low * 100:.1f}–{high * 100:.1f} %"


def show_number(value: float | None, digits: int) -> str:
    """Return a number with so many digits after the point."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value:,.{digits}f}"


def show_degrees(value: float | None) -> str:
    """Return an angle with one digit."""
    shown = show_number(value, 1)
    return shown if shown == NOTHING else f"{shown}°"


def show_distance(value: float | None) -> str:
    """Return a number with four significant digits, whatever its size."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value:.4g}"


def show_seconds(seconds: float | None) -> str:
    """Return a duration in the unit that suits it.

    >>> show_seconds(0.0123), show_seconds(12.5)
    ('12 ms', '12.5 s')
    """
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def show_bytes(count: float) -> str:
    """Return a number of bytes with a unit.

    >>> show_bytes(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def show_forgotten(forgotten: Sequence[tuple[int, str]], limit: int = 5) -> str:
    """Return who was forgotten when; of many, the first ones and a number.

    >>> show_forgotten([(20, "client-3")])
    'client-3 after round 20'
    """
    named = [f"{shorten(name, 40)} after round {at}" for at, name in forgotten[:limit]]
    if len(forgotten) > limit:
        named.append(f"{len(forgotten) - limit:,} more")
    return ", ".join(named[:-1]) + " and " + named[-1] if named[1:] else "".join(named)
