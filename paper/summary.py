"""Summaries of a line over its seeds, beside the paper's figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from fastfedul.evaluate.intervals import Mean, Proportion, mean_interval
from paper import published
from paper.cells import CellStore, Kind
from paper.experiments import Line
from paper.method_settings import show_settings
from paper.storage import Storage, storage_of

WIDE_DEGREES = 20.0
"""From this angle on, an output unit counts as turned."""

_NAMES = {"oct-retina-subset": "retinal subset (paper: OCTMNIST)"}
Result = Mapping[str, Any]
Table = tuple[str, str, str]
"""Attack, data and split."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """Lemma 3 over the rounds of all seeds.

    Attributes:
        attacker: Mean probability that the attacker's update is kept.
        honest: Mean probability that an honest client's update is kept.
        num_rounds: Rounds in which the attacker took part.
        more_likely: Rounds in which the attacker's update is the likelier one.
        largest: Rounds in which the attacker's contribution is the largest.
        features: Features of pairs that fulfil the lemma's condition.
        pairs: Pairs whose features all fulfil it.
    """

    attacker: float
    honest: float
    num_rounds: int
    more_likely: int
    largest: int
    features: Proportion
    pairs: Proportion


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One line of a table over its seeds; None is what nobody measured.

    Attributes:
        data: Data set, by the paper's name where it has one.
        source: The data that were really trained on.
        attack: The attack.
        label: What the table calls the method.
        method: The method.
        partition: How the data are split.
        parameter: What varies in a figure: level, damping or budget.
        kind: Whether the cleaned model was measured, or every iteration.
        seeds_done: Seeds with a result, refusals among them.
        seeds_wanted: Seeds asked for.
        num_refused: Seeds on which the method refused.
        refused: Why it refused first.
        main: Main accuracy over seeds; of iterations, after the last.
        backdoor: How often the attack works, likewise.
        main_pooled: Counts of all seeds together.
        backdoor_pooled: Likewise.
        sevens: How often the attack works on all ARDIS sevens that no client has.
        sevens_pooled: Counts of all seeds together.
        settings: The method's settings, in words.
        storage: Bytes of history, as published and at the least.
        paper: The paper's main and backdoor accuracy.
        main_difference: Ours minus the paper's, in points of a hundred.
        backdoor_difference: Likewise.
        keeping: Measures of Lemma 3; None for other lines.
        seconds: Mean time to forget; this and the next ones are means over seeds.
        client_calls: How often a client had to work.
        bytes_read: History read.
        stored_bytes: History that must be kept.
        peak_bytes: Most memory above the memory before.
        mia_auc: Success of guessing which images took part.
        distance: To the retrained model.
        bound: Theorem 1's bound of that distance.
        lipschitz: The constant K of the bound.
        class_ratio: Most by least frequent class of a client, where it was searched.
        concentration: The concentration that gives that ratio.
        angle_degrees: Between all parameters and the retrained model's.
        unit_angles: Angles of the output units, in degrees, of all seeds.
        main_iterations: Mean main accuracy after each iteration.
        backdoor_iterations: Likewise; None where there is no attack.
        warnings: What the method warned of, each once.
        software: Versions that computed the results.
    """

    data: str
    source: str
    attack: str
    label: str
    method: str
    partition: str
    parameter: float | None
    kind: Kind
    seeds_done: int
    seeds_wanted: int
    num_refused: int = 0
    refused: str | None = None
    main: Mean | None = None
    backdoor: Mean | None = None
    main_pooled: Proportion | None = None
    backdoor_pooled: Proportion | None = None
    sevens: Mean | None = None
    sevens_pooled: Proportion | None = None
    settings: str = ""
    storage: Storage | None = None
    keeping: Keeping | None = None
    paper: published.Scores | None = None
    main_difference: float | None = None
    backdoor_difference: float | None = None
    seconds: float | None = None
    client_calls: float | None = None
    bytes_read: float | None = None
    stored_bytes: float | None = None
    peak_bytes: float | None = None
    mia_auc: float | None = None
    distance: float | None = None
    bound: float | None = None
    lipschitz: float | None = None
    class_ratio: float | None = None
    concentration: float | None = None
    angle_degrees: float | None = None
    unit_angles: tuple[float, ...] = ()
    main_iterations: tuple[float | None, ...] = ()
    backdoor_iterations: tuple[float | None, ...] = ()
    warnings: tuple[str, ...] = ()
    software: tuple[str, ...] = ()

    @property
    def data_name(self) -> str:
        """The data as a reader may call them; a stand-in is named as one."""
        return _NAMES.get(self.source, self.source)

    @property
    def num_measured(self) -> int:
        """Seeds with numbers."""
        return self.seeds_done - self.num_refused

    @property
    def mean_unit_angle(self) -> float | None:
        """Mean angle of the output units, in degrees."""
        return _mean(self.unit_angles)

    @property
    def max_unit_angle(self) -> float | None:
        """Largest angle of an output unit, in degrees."""
        return max(self.unit_angles, default=None)

    @property
    def wide_share(self) -> float | None:
        """Share of the output units above `WIDE_DEGREES`."""
        return _mean([float(angle > WIDE_DEGREES) for angle in self.unit_angles])


def summarize(lines: Sequence[Line], store: CellStore) -> tuple[Summary, ...]:
    """Return a summary of each line; a cell without a result is a missing seed."""
    return tuple(_summary(line, store) for line in lines)


def by_table(summaries: Iterable[Summary]) -> dict[Table, list[Summary]]:
    """Return the lines of each table, in their order, by attack, data and split."""
    found: dict[Table, list[Summary]] = {}
    for line in summaries:
        found.setdefault((line.attack, line.source, line.partition), []).append(line)
    return found


def papers_scores(line: Line) -> published.Scores | None:
    """Return the paper's main and backdoor accuracy of a line, if it has them."""
    first = line.cells[0]
    if line.partition != "iid" or line.parameter is not None or first.kind != "model":
        return None
    found = published.MAIN_TABLES.get(line.attack, {}).get(line.data, {})
    if line.data == "mnist":
        found = {**found, **published.VARIANTS.get(line.attack, {})}
    return found.get(line.label)


def _summary(line: Line, store: CellStore) -> Summary:
    first = line.cells[0]
    done = [found for cell in line.cells if (found := store.read(cell)) is not None]
    refusals = [str(result["refused"]) for result in done if "refused" in result]
    results = [result for result in done if "refused" not in result]
    main, backdoor = _over_seeds("main", results), _over_seeds("backdoor", results)
    scores = papers_scores(line)
    return Summary(
        data=line.data,
        source=first.run.data.source,
        attack=line.attack,
        label=line.label,
        method=first.method,
        partition=line.partition,
        parameter=line.parameter,
        kind=first.kind,
        seeds_done=len(done),
        seeds_wanted=len(line.cells),
        num_refused=len(refusals),
        refused=refusals[0] if refusals else None,
        main=main,
        backdoor=backdoor,
        main_pooled=_pooled("main", results),
        backdoor_pooled=_pooled("backdoor", results),
        sevens=_over_seeds("sevens", results),
        sevens_pooled=_pooled("sevens", results),
        settings=show_settings(first),
        storage=storage_of(first, line.size) if first.kind == "model" else None,
        keeping=_keeping(results) if first.kind == "keeping" else None,
        paper=scores,
        main_difference=_points(main, scores[0] if scores else None),
        backdoor_difference=_points(backdoor, scores[1] if scores else None),
        unit_angles=_unit_angles(results),
        main_iterations=_iterations("main", results),
        backdoor_iterations=_iterations("backdoor", results),
        warnings=_once(w for result in results for w in result.get("warnings") or ()),
        software=_once(r["software"] for r in done if r.get("software")),
        **{name: _mean(_numbers(name, results)) for name in MEANS},
    )


MEANS = (
    *("seconds", "client_calls", "bytes_read", "stored_bytes", "peak_bytes"),
    *("mia_auc", "distance", "bound", "lipschitz", "angle_degrees"),
    *("class_ratio", "concentration"),
)
"""Fields that are plain means over seeds, named as in a result."""


def _keeping(results: Sequence[Result]) -> Keeping | None:
    results = [result for result in results if result.get("attacker")]
    own = [float(p) for result in results for p in result["attacker"]]
    others = [float(p) for result in results for p in result["honest"]]
    if not own:
        return None
    held = [result["condition"] for result in results]
    return Keeping(
        math.fsum(own) / len(own),
        math.fsum(others) / len(others),
        len(own),
        sum(p > q for p, q in zip(own, others, strict=True)),
        sum(bool(flag) for result in results for flag in result["largest"]),
        Proportion(
            sum(h["features"] for h in held), sum(h["num_features"] for h in held)
        ),
        Proportion(sum(h["pairs"] for h in held), sum(h["num_pairs"] for h in held)),
    )


def _over_seeds(name: str, results: Sequence[Result]) -> Mean | None:
    values = (_last(result.get(name)) for result in results)
    known = [float(value) for value in values if _is_known(value)]
    return mean_interval(known) if known else None


def _last(value: Any) -> Any:
    """Return the last of several values, or the value itself."""
    if isinstance(value, list):
        return value[-1] if value else None
    return value


def _pooled(name: str, results: Sequence[Result]) -> Proportion | None:
    pairs = [(r.get(f"{name}_count"), r.get(f"{name}_total")) for r in results]
    known = [(count, total) for count, total in pairs if count is not None and total]
    if not known:
        return None
    return Proportion(sum(c for c, _ in known), sum(t for _, t in known))


def _points(ours: Mean | None, papers: float | None) -> float | None:
    if ours is None or papers is None:
        return None
    return (ours.value - papers) * 100


def _numbers(name: str, results: Sequence[Result]) -> list[float]:
    values: Iterable[Any] = (result.get(name) for result in results)
    return [float(value) for value in values if _is_known(value)]


def _unit_angles(results: Sequence[Result]) -> tuple[float, ...]:
    angles = (angle for result in results for angle in result.get("unit_angles") or ())
    return tuple(float(angle) for angle in angles if _is_known(angle))


def _iterations(name: str, results: Sequence[Result]) -> tuple[float | None, ...]:
    courses = [r[name] for r in results if isinstance(r.get(name), list)]
    return tuple(
        _mean([float(value) for value in at_one if _is_known(value)])
        for at_one in zip_longest(*courses)
    )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _is_known(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def _once(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))
