"""The comparison as JSON values."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fastfedul.report.content import Row


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


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _count(count: Sequence[int] | None) -> list[int] | None:
    return None if count is None else [int(part) for part in count]


def _interval(interval: Sequence[float] | None) -> list[float | None] | None:
    return None if interval is None else [_number(end) for end in interval]
