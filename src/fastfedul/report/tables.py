"""The rows of a comparison as JSON values and as a Markdown table."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from fastfedul.report.content import Count, Interval, Row
from fastfedul.report.wording import (
    shorten,
    show_bytes,
    show_count,
    show_distance,
    show_interval,
    show_number,
    show_seconds,
    show_share,
)

_HEADS = (
    "Method",
    "Right answers",
    "Attack works",
    "Membership AUC",
    "Distance",
    "Angle (°)",
    "Time",
    "Client calls",
    "History read",
)


def rows_to_json(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Return one object per row; a number that JSON cannot hold becomes None.

    A count is a list of successes and total, an interval one of low and high.
    """
    return [
        {
            "method": row.method,
            "main": _number(row.main),
            "backdoor": _number(row.backdoor),
            "main_count": _count(row.main_count),
            "backdoor_count": _count(row.backdoor_count),
            "main_interval": _interval(row.main_interval),
            "backdoor_interval": _interval(row.backdoor_interval),
            "mia_auc": _number(row.mia_auc),
            "distance": _number(row.distance),
            "angle_degrees": _number(row.angle_degrees),
            "seconds": _number(row.seconds),
            "client_calls": int(row.client_calls),
            "history_bytes": int(row.history_bytes),
        }
        for row in rows
    ]


def render_markdown(rows: Sequence[Row]) -> str:
    """Return the rows as a table, shares with their counts and 95 % intervals.

    >>> row = Row("before", 0.5, (1, 2), (0.1, 0.9))
    >>> print(render_markdown([row]).splitlines()[2][:45])
    | before | 50.0 % (1 of 2; 10.0–90.0 %) | – |
    """
    lines = [_line(_HEADS), "|---" + "|---:" * (len(_HEADS) - 1) + "|"]
    for row in rows:
        cells = (
            _escape(shorten(row.method)),
            _share(row.main, row.main_count, row.main_interval),
            _share(row.backdoor, row.backdoor_count, row.backdoor_interval),
            show_number(row.mia_auc, 3),
            show_distance(row.distance),
            show_number(row.angle_degrees, 1),
            show_seconds(row.seconds),
            f"{row.client_calls:,}",
            show_bytes(row.history_bytes),
        )
        lines.append(_line(cells))
    return "\n".join(lines).replace("\u00a0", " ") + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _share(value: float | None, count: Count | None, interval: Interval | None) -> str:
    known = "; ".join(filter(None, (show_count(count), show_interval(interval))))
    return show_share(value) + (f" ({known})" if known else "")


def _escape(text: str) -> str:
    """Return text that Markdown shows as it is."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|~&$:@])", r"\\\1", text)


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _count(count: Sequence[int] | None) -> list[int] | None:
    return None if count is None else [int(part) for part in count]


def _interval(interval: Sequence[float] | None) -> list[float | None] | None:
    return None if interval is None else [_number(end) for end in interval]
