"""The comparison as a Markdown table."""

from __future__ import annotations

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
