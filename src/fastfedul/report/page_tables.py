"""The tables of the page; every text in them is escaped here."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from fastfedul.evaluate.comparison import RETRAINED
from fastfedul.report.content import Count, Interval, Row
from fastfedul.report.wording import (
    NOTHING,
    shorten,
    show_bytes,
    show_count,
    show_distance,
    show_interval,
    show_method,
    show_number,
    show_seconds,
    show_share,
)

_EXPLAINED = {
    "Membership": "how well the loss tells the client's training images from images "
    "nobody trained on: 0.5 is guessing, 1 is always right",
    "Distance": "how far all parameters lie from those of the retrained model",
    "Angle": "how far the last layer is turned from that of the retrained model",
    "Time": "computing time to get this model from the trained one",
    "Client calls": "how often a client had to compute something for it",
    "History read": "stored updates that were read for it",
}


def escape(text: str, width: int = 1000) -> str:
    """Return the text on one line, not too long, safe in tags and attributes."""
    return html.escape(shorten(text, width), quote=True)


def render_plain_table(rows: Sequence[Row]) -> str:
    """Return the table anyone understands: does it work, does the attack, how long."""
    attacked = any(row.backdoor is not None for row in rows)
    timed = any(row.seconds is not None for row in rows)
    heads = ["Model", "Model works"]
    heads += ["Attack works"] * attacked + ["Time taken"] * timed
    body = []
    for row in rows:
        cells = [_share_cell("main", row.main, row.main_count, row.main_interval)]
        if attacked:
            cells.append(
                _share_cell(
                    "attack", row.backdoor, row.backdoor_count, row.backdoor_interval
                )
            )
        if timed:
            shown = show_seconds(row.seconds)
            cells.append(f'<td><span class="value">{shown}</span></td>')
        body.append((row.method, cells))
    caption = "Shares of test images with counts and, below, the 95&nbsp;% interval."
    if any(row.method == RETRAINED for row in rows):
        caption += (
            " Retrained: trained again from the start without the client, which is "
            "what a perfect removal would give."
        )
    return _table("plain", caption, heads, body)


def render_numbers_table(rows: Sequence[Row]) -> str:
    """Return everything else that was measured."""
    columns = {
        "Membership": [show_number(row.mia_auc, 3) for row in rows],
        "Distance": [show_distance(row.distance) for row in rows],
        "Angle": [_angle(row.angle_degrees) for row in rows],
        "Time": [show_seconds(row.seconds) for row in rows],
        "Client calls": [f"{row.client_calls:,}" for row in rows],
        "History read": [show_bytes(row.history_bytes) for row in rows],
    }
    used = {name: columns[name] for name in columns if {*columns[name]} != {NOTHING}}
    body = [
        (row.method, [f"<td>{cells[place]}</td>" for cells in used.values()])
        for place, row in enumerate(rows)
    ]
    return _table("numbers", "", ["Model", *used], body)


def render_terms() -> str:
    """Return a word on each column of the table of numbers."""
    terms = "".join(
        f"<dt>{name}</dt><dd>{html.escape(text)}</dd>"
        for name, text in _EXPLAINED.items()
    )
    return f'<dl class="terms">{terms}</dl>'


def render_settings(settings: Mapping[str, object]) -> str:
    """Return names and values below each other."""
    pairs = "".join(
        f"<dt>{escape(str(name), 120)}</dt><dd>{escape(str(value))}</dd>"
        for name, value in settings.items()
    )
    return f'<dl class="card">{pairs}</dl>'


def _table(
    kind: str, caption: str, heads: Sequence[str], body: Sequence[tuple[str, list[str]]]
) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    lines = "".join(
        f'<tr><th scope="row">{_method_cell(method)}</th>{"".join(cells)}</tr>'
        for method, cells in body
    )
    above = f"<caption>{caption}</caption>" if caption else ""
    return (
        f'<table class="{kind}">{above}<thead><tr>{head}</tr></thead>'
        f"<tbody>{lines}</tbody></table>"
    )


def _method_cell(method: str) -> str:
    case, name = show_method(method)
    return f'{case} <span class="count">{escape(name)}</span>' if name else case


def _share_cell(
    kind: str, value: float | None, count: Count | None, interval: Interval | None
) -> str:
    shown = f'<span class="value {kind}">{show_share(value)}</span>'
    below = [text for text in (show_count(count), show_interval(interval)) if text]
    small = "".join(f'<span class="count">{text}</span>' for text in below)
    return f"<td>{shown}{small}</td>"


def _angle(degrees: float | None) -> str:
    shown = show_number(degrees, 1)
    return shown if shown == NOTHING else f"{shown}°"
