"""The models of a comparison as mappings: one for each, and means over the seeds."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fastfedul.evaluate.comparison import Evaluation
from fastfedul.report.content import Interval, Row
from fastfedul.report.of_run import row_of
from fastfedul.runs.comparison import Comparison
from fastfedul.strict_json import finite_values

ModelRow = Mapping[str, Any]
"""One model, with the keys that `fastfedul compare --json` shows."""

MEASURES = (
    *("main", "backdoor", "mia_auc", "mia_tpr_at_1_fpr", "distance"),
    *("angle_degrees", "last_layer_angle_degrees", "kl", "prediction_change"),
    *("seconds", "client_calls", "history_bytes"),
)
"""Numbers of a row that have a mean over the seeds."""

_PARTS = {"count": ("successes", "total"), "interval": ("low", "high")}
"""Names of the two numbers of a list where each has a column of its own."""

COLUMNS: dict[str, type] = {
    "seed": int,
    "method": str,
    "main": float,
    "main_low": float,
    "main_high": float,
    "main_successes": int,
    "main_total": int,
    "backdoor": float,
    "backdoor_low": float,
    "backdoor_high": float,
    "backdoor_successes": int,
    "backdoor_total": int,
    "mia_auc": float,
    "mia_auc_low": float,
    "mia_auc_high": float,
    "mia_tpr_at_1_fpr": float,
    "distance": float,
    "angle_degrees": float,
    "last_layer_angle_degrees": float,
    "kl": float,
    "prediction_change": float,
    "seconds": float,
    "client_calls": int,
    "history_bytes": int,
    "settings": str,
}
"""Columns of a flat row, in their order."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A number over the seeds.

    Attributes:
        mean: Its mean.
        std: Standard deviation over the seeds, with n - 1; None of a single seed.
        num: How many seeds have the number.
    """

    mean: float
    std: float | None
    num: int

    @property
    def ends(self) -> Interval | None:
        """The mean less and plus the standard deviation."""
        if self.std is None:
            return None
        return self.mean - self.std, self.mean + self.std


@dataclass(frozen=True, slots=True)
class ModelMeans:
    """One kind of model over the seeds.

    Attributes:
        method: How the models came about.
        seeds: Seeds that have a model of this kind; None for a ledger outside a run.
        measures: A spread for each of `MEASURES`; None where no seed has the number.
    """

    method: str
    seeds: tuple[int | None, ...]
    measures: Mapping[str, Spread | None]

    def to_json(self) -> dict[str, Any]:
        """Return the means as JSON values."""
        found: dict[str, Any] = {"method": self.method, "seeds": list(self.seeds)}
        for name, spread in self.measures.items():
            found[name] = spread and {"mean": spread.mean, "std": spread.std}
        return found


def rows_of(comparison: Comparison) -> tuple[ModelRow, ...]:
    """Return a mapping of JSON values for each model of a comparison."""
    return tuple(_model_row(comparison, found) for found in comparison.rows)


def _model_row(comparison: Comparison, found: Evaluation) -> ModelRow:
    near, member = found.closeness, found.membership
    row: dict[str, Any] = finite_values(
        {
            **asdict(row_of(found)),
            "last_layer_angle_degrees": near.last_layer_angle_degrees if near else None,
            "mia_tpr_at_1_fpr": member.tpr_at_1_fpr if member else None,
            "mia_auc_interval": member.auc_interval if member else None,
            "kl": found.kl,
            "prediction_change": found.change,
            "seed": comparison.seed,
            "settings": dict(comparison.used.get(found.method, {})),
        }
    )
    return row


def flat_row(row: ModelRow) -> dict[str, Any]:
    """Return a row with one number or text for each of `COLUMNS`."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        measure, _, kind = name.rpartition("_")
        if kind in _PARTS:
            values = (None, None) if value is None else value
            for part, number in zip(_PARTS[kind], values, strict=True):
                found[f"{measure}_{part}"] = number
        else:
            found[name] = value
    found["settings"] = json.dumps(row["settings"]) if row["settings"] else None
    return {name: found[name] for name in COLUMNS}


def means_of(rows: Sequence[ModelRow]) -> tuple[ModelMeans, ...]:
    """Return the means over the seeds, one for each kind of model in its order."""
    kinds = dict.fromkeys(row["method"] for row in rows)
    found = []
    for method in kinds:
        own = [row for row in rows if row["method"] == method]
        found.append(
            ModelMeans(
                method,
                tuple(row["seed"] for row in own),
                {name: _spread([row[name] for row in own]) for name in MEASURES},
            )
        )
    return tuple(found)


def bars_of(rows: Sequence[ModelRow]) -> tuple[Row, ...]:
    """Return the rows of a bar chart: intervals of one seed, else means and spreads."""
    found = []
    for means in means_of(rows):
        own = next(row for row in rows if row["method"] == means.method)
        main, attack = means.measures["main"], means.measures["backdoor"]
        alone = len(means.seeds) == 1
        mean = main.mean if main else math.nan
        if alone:
            interval, attacked = own["main_interval"], own["backdoor_interval"]
        else:
            interval = main.ends if main else None
            attacked = attack.ends if attack else None
        found.append(
            Row(
                method=means.method,
                main=mean,
                main_count=tuple(own["main_count"]),
                main_interval=_within(interval) or (mean, mean),
                backdoor=attack.mean if attack else None,
                backdoor_interval=_within(attacked),
            )
        )
    return tuple(found)


def _within(interval: Sequence[float] | None) -> Interval | None:
    """Return the part of an interval that lies from 0 to 1."""
    if interval is None:
        return None
    return max(0.0, interval[0]), min(1.0, interval[1])


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = [v for v in values if v is not None and math.isfinite(v)]
    if not known:
        return None
    std = statistics.stdev(known) if len(known) > 1 else None
    return Spread(statistics.fmean(known), std, len(known))
