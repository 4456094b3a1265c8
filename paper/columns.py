"""The columns of each table, and how its numbers are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastfedul.evaluate.intervals import Interval, Mean, Proportion
from fastfedul.report.wording import NOTHING, show_bytes, show_count, show_seconds
from paper import published
from paper.experiments import NO_SKEW, PAPER, PAPER_ALL
from paper.summary import WIDE_DEGREES, Keeping, Summary

Group = Sequence[Summary]
"""The lines of one table."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        head: Heading of the column.
        show: From a line and its whole table to the text of a cell.
    """

    head: str
    show: Callable[[Summary, Group], str]


def columns_of(name: str, group: Group) -> tuple[Column, ...]:
    """Return the columns of one of the paper's tables or figures."""
    if name == "cost":
        return _COST
    if name == "deviation":
        return _DEVIATION
    if name == "bound":
        return _BOUND
    if name == "lemma":
        return _LEMMA
    if name == "damping":
        return (_METHOD, _SETTINGS, _SEEDS, *_SHARES)
    if name == "history":
        return (_METHOD, _SETTINGS, _POLICY[1], _SEEDS, *_SHARES, _STORED, *_LEAST)
    if name == "sampling":
        return (*_POLICY, _SETTINGS, _SEEDS, *_SHARES, _STORED)
    columns = [_METHOD, _SETTINGS, _SEEDS, *_SHARES]
    if any(line.sevens for line in group):
        columns.append(_SEVENS)
    if any(line.paper for line in group):
        columns += _PAPER
    return tuple(columns)


def line_of(columns: Sequence[Column], line: Summary, group: Group) -> list[str]:
    """Return the cells of a line; a refusal is told in the first after the seeds."""
    seeds = columns.index(_SEEDS) + 1
    if line.num_measured:
        return [column.show(line, group) for column in columns]
    said = f"refused: {line.refused}" if line.refused else "not run yet"
    named = [column.show(line, group) for column in columns[:seeds]]
    kept = [c.show(line, group) if c in _FROM_PAPER else "" for c in columns[seeds:]]
    return [*named, said, *kept[1:]]


def show_percent(value: float | None) -> str:
    """Return a share with two digits, as the paper has them.

    >>> show_percent(0.97368)
    '97.37 %'
    """
    return NOTHING if value is None else f"{value * 100:.2f} %"


def show_points(value: float | None) -> str:
    """Return a difference in points with its sign.

    >>> show_points(-0.5), show_points(0.001)
    ('-0.50', '0.00')
    """
    if value is None:
        return NOTHING
    return f"{value:+.2f}" if abs(value) >= 0.005 else "0.00"


def show_mean(mean: Mean | None) -> str:
    """Return a mean of shares with its interval, cut at 0 and 100 %.

    >>> show_mean(Mean(0.01, (-0.02, 0.04), 3))
    '1.00 % [0.00 to 4.00]'
    """
    if mean is None:
        return NOTHING
    ends = cut(mean.interval)
    if ends is None:
        return show_percent(mean.value)
    return f"{show_percent(mean.value)} [{ends[0] * 100:.2f} to {ends[1] * 100:.2f}]"


def cut(interval: Interval | None) -> Interval | None:
    """Return the part of an interval from 0 to 1."""
    if interval is None:
        return None
    return max(0.0, interval[0]), min(1.0, interval[1])


def ratio_of(value: float | None, base: float | None) -> float | None:
    """Return the quotient, or None if there is none."""
    return value / base if value is not None and base else None


def papers_time(line: Summary) -> float | None:
    """Return the paper's time as a multiple of its Fast-FedUL's, for its data sets."""
    known = line.data in published.MAIN_TABLES.get(line.attack, {})
    return published.TIMES.get(line.label) if known else None


def find(label: str, group: Group) -> Summary | None:
    """Return the line with a label."""
    return next((line for line in group if line.label == label), None)


def _seeds(line: Summary, _: Group) -> str:
    if line.num_measured == line.seeds_wanted:
        return f"{line.seeds_wanted}"
    return f"{line.num_measured} of {line.seeds_wanted} seeds"


def _counted(mean: Mean | None, pooled: Proportion | None) -> str:
    count = show_count((pooled.successes, pooled.total)) if pooled else ""
    return show_mean(mean) + (f" ({count})" if count else "")


def _times(ratio: float | None) -> str:
    if ratio is None or not math.isfinite(ratio):
        return NOTHING
    return f"{ratio:,.0f} ×" if ratio >= 99.5 else f"{ratio:.3g} ×"


def _time_ratio(line: Summary, group: Group) -> str:
    base = find(PAPER.label, group)
    return _times(ratio_of(line.seconds, base.seconds if base else None))


def _bytes(value: float | None) -> str:
    return NOTHING if value is None else show_bytes(value)


def _stored(line: Summary, name: str) -> str:
    return NOTHING if line.storage is None else _bytes(getattr(line.storage, name))


def _number(value: float | None) -> str:
    """Return a number with three digits, however large it is."""
    return NOTHING if value is None else f"{value:.3g}"


def _lemma(show: Callable[[Keeping], str]) -> Callable[[Summary, Group], str]:
    """Return a column's function from the text of a measure of Lemma 3."""
    return lambda line, _: NOTHING if line.keeping is None else show(line.keeping)


def _degrees(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}°"


def _angle_ratio(line: Summary, group: Group) -> str:
    base = find(PAPER_ALL.label, group)
    return _times(
        ratio_of(line.mean_unit_angle, base.mean_unit_angle if base else None)
    )


def _papers_angle(line: Summary, _: Group) -> str:
    if line.data != "mnist":
        return NOTHING
    return {
        PAPER_ALL.label: f"mean below {published.MEAN_ANGLE_BELOW:g}°",
        NO_SKEW.label: f"{published.SKEW_IGNORANT_ANGLE_RATIO:g} ×",
    }.get(line.label, NOTHING)


def _calls(line: Summary, _: Group) -> str:
    return NOTHING if line.client_calls is None else f"{line.client_calls:,.0f}"


def _policy(line: Summary, _: Group) -> str:
    return line.label if line.parameter is None else line.label.partition(":")[0]


def _budget(line: Summary, _: Group) -> str:
    return NOTHING if line.parameter is None else f"{line.parameter:g}"


_METHOD = Column("method", lambda line, _: line.label)
_SETTINGS = Column("settings", lambda line, _: line.settings or NOTHING)
_SEEDS = Column("seeds", _seeds)
_SHARES = (
    Column("main", lambda line, _: show_mean(line.main)),
    Column("backdoor", lambda s, _: _counted(s.backdoor, s.backdoor_pooled)),
)
_SEVENS = Column(
    "all sevens nobody has", lambda s, _: _counted(s.sevens, s.sevens_pooled)
)
_PAPER = (
    Column("paper main", lambda s, _: show_percent(s.paper[0] if s.paper else None)),
    Column(
        "paper backdoor", lambda s, _: show_percent(s.paper[1] if s.paper else None)
    ),
    Column("difference main", lambda line, _: show_points(line.main_difference)),
    Column(
        "difference backdoor", lambda line, _: show_points(line.backdoor_difference)
    ),
)
_STORED = Column("history stored", lambda line, _: _bytes(line.stored_bytes))
_LEAST = (
    Column("as published", lambda s, _: _stored(s, "published")),
    Column("at the least", lambda s, _: _stored(s, "least")),
)
_POLICY = (Column("kept by", _policy), Column("updates a round", _budget))
_COST = (
    _METHOD,
    _SETTINGS,
    _SEEDS,
    Column("time", lambda line, _: show_seconds(line.seconds)),
    Column(f"time, {PAPER.label} = 1", _time_ratio),
    Column("paper's time", lambda line, _: _times(papers_time(line))),
    Column("client calls", _calls),
    Column("peak memory", lambda line, _: _bytes(line.peak_bytes)),
    _STORED,
    *_LEAST,
    Column("history read", lambda line, _: _bytes(line.bytes_read)),
)
_DEVIATION = (
    _METHOD,
    _SETTINGS,
    _SEEDS,
    Column("mean angle", lambda line, _: _degrees(line.mean_unit_angle)),
    Column("largest angle", lambda line, _: _degrees(line.max_unit_angle)),
    Column(
        f"above {WIDE_DEGREES:g}°",
        lambda line, _: show_percent(line.wide_share),
    ),
    Column(f"mean, {PAPER_ALL.label} = 1", _angle_ratio),
    Column("paper", _papers_angle),
)
_BOUND = (
    _METHOD,
    _SETTINGS,
    _SEEDS,
    _SHARES[0],
    Column("distance to the retrained model", lambda s, _: _number(s.distance)),
    Column("bound", lambda s, _: _number(s.bound)),
    Column("bound / distance", lambda s, _: _times(ratio_of(s.bound, s.distance))),
    Column("K", lambda s, _: _number(s.lipschitz)),
)
_LEMMA = (
    Column("keeps", lambda line, _: line.label),
    _SEEDS,
    Column("attacker kept", _lemma(lambda found: _number(found.attacker))),
    Column("honest kept", _lemma(lambda found: _number(found.honest))),
    Column(
        "rounds: attacker likelier",
        _lemma(lambda found: show_count((found.more_likely, found.num_rounds))),
    ),
    Column(
        "rounds: attacker largest",
        _lemma(lambda found: show_count((found.largest, found.num_rounds))),
    ),
    Column(
        "condition holds: features",
        _lemma(lambda found: show_percent(found.features.value)),
    ),
    Column(
        "condition holds: pairs",
        _lemma(lambda found: show_count((found.pairs.successes, found.pairs.total))),
    ),
)
_FROM_PAPER = (*_PAPER[:2], _COST[5], _DEVIATION[-1])
