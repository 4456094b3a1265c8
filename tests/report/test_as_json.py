"""Rows as JSON: the keys scripts rely on, and only what JSON can hold."""

from __future__ import annotations

import json
import math

import numpy as np

from fastfedul.report.as_json import rows_to_json
from fastfedul.report.content import Row

KEYS = {
    *("method", "main", "backdoor", "main_count", "backdoor_count", "mia_auc"),
    *("distance", "angle_degrees", "seconds", "client_calls", "history_bytes"),
    *("main_interval", "backdoor_interval"),
}


def test_every_row_has_exactly_these_keys(rows: tuple[Row, ...]) -> None:
    found = rows_to_json(rows)
    assert [row["method"] for row in found] == [row.method for row in rows]
    assert all(set(row) == KEYS for row in found)
    assert found[0]["main_count"] == [351, 360]
    assert found[0]["backdoor_interval"] == [0.896, 0.953]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_what_json_cannot_hold_becomes_null() -> None:
    row = Row("x", math.nan, (0, 0), (math.nan, math.nan), distance=math.inf)
    [found] = rows_to_json([row])
    assert found["main"] is found["distance"] is found["backdoor_count"] is None
    assert found["main_interval"] == [None, None]
    assert json.dumps(found, allow_nan=False)


def test_numpy_numbers_become_plain_ones() -> None:
    counts = (int(np.int64(1)), int(np.int64(2)))
    row = Row("x", float(np.float32(0.5)), counts, (0.1, 0.9), seconds=np.float64(2))
    assert json.dumps(rows_to_json([row]))


def test_no_rows_are_an_empty_list() -> None:
    assert rows_to_json(()) == []
