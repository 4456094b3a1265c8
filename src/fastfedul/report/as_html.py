"""The report as one HTML file that stands alone: no script, no request, any device."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from fastfedul.errors import InvalidInputError
from fastfedul.evaluate.comparison import NOW, RETRAINED
from fastfedul.files import write_whole
from fastfedul.report.charts import draw_angles, draw_bars, draw_rounds
from fastfedul.report.content import ExampleImages, Report, find_row
from fastfedul.report.heat_map import MAX_CLIENTS, draw_contributions
from fastfedul.report.held_back_chart import draw_held_back
from fastfedul.report.page_style import STYLE
from fastfedul.report.page_tables import (
    escape,
    render_numbers_table,
    render_plain_table,
    render_settings,
    render_terms,
)
from fastfedul.report.pictures import png_address
from fastfedul.report.wording import show_forgotten, tidy_lines

# The page may hold pictures and styles of its own and nothing else, not even a script.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def render_html(report: Report) -> str:
    """Return the whole page; it makes no request and runs no script.

    Every text of the report is escaped and, but for the commands, cut to a length
    that fits a page. The same report gives the same page.

    Raises:
        InvalidInputError: If there is a chart to draw and matplotlib is missing.
    """
    parts = [
        _render_header(report),
        "<main>",
        _render_result(report),
        _render_charts(report),
        _render_examples(report.examples),
        _render_numbers(report),
        _render_settings(report),
        _render_commands(report.commands),
        _render_limits(report),
        "</main>",
        "<footer>Made by fastfedul. This file needs no network.</footer>",
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.title, 160)}</title>\n"
        f'<link rel="icon" href="data:,">\n<style>{STYLE}</style>\n</head>\n'
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def write_html(path: Path, report: Report) -> None:
    """Write the page to a file, whole or not at all.

    Raises:
        InvalidInputError: If the file cannot be written or a chart cannot be drawn.
    """
    content = render_html(report)
    try:
        write_whole(path, content)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidInputError(f"cannot write {path}: {reason}") from None


def _render_header(report: Report) -> str:
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in report.summary)
    summary = f'<div class="summary">{said}</div>' if said else ""
    return f"<header><h1>{escape(report.title, 160)}</h1>{summary}</header>"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _scrolling(label: str, content: str) -> str:
    return (
        f'<div class="card scroll" role="region" tabindex="0" aria-label="{label}">'
        f"{content}</div>"
    )


def _render_result(report: Report) -> str:
    if not report.rows:
        return ""
    return _section(
        "The result", _scrolling("The result", render_plain_table(report.rows))
    )


def _render_charts(report: Report) -> str:
    figures = []
    if any(row.method != NOW for row in report.rows):
        figures.append(
            _figure(
                "Now, and retrained"
                if find_row(report.rows, NOW)
                else "Before, after, and retrained",
                draw_bars(report.rows),
                "A good removal looks like the retrained model: as many right answers "
                "and as few attacks that work; the thin lines are 95 % intervals.",
            )
        )
    if report.rounds:
        said = "How often the model was right, and how often the attack worked, as"
        said += " training went on"
        if report.forgotten:
            said += f"; forgotten: {show_forgotten(report.forgotten)}"
        chart = draw_rounds(report.rounds, report.forgotten)
        figures.append(_figure("Round by round", chart, f"{said}."))
    figures += _more_figures(report)
    content = "".join(figures)
    return _section("In pictures", content and f'<div class="charts">{content}</div>')


def _more_figures(report: Report) -> list[str]:
    figures = []
    shown = report.contributions
    if shown is not None and shown.values.size:
        said = "The darker a field, the more the client moved the model in that round;"
        said += " grey means that it took no part"
        if report.forgotten:
            said += ", orange that it was forgotten"
        if len(shown.clients) > MAX_CLIENTS:
            said += f" ({MAX_CLIENTS} of {len(shown.clients):,} clients are shown)"
        chart = draw_contributions(shown, report.forgotten)
        figures.append(_figure("Who contributed how much when", chart, f"{said}."))
    if any(kept is not None for _, kept in report.removed_by_layer):
        said = (
            "By the server's estimate, training with the others had already pulled "
            "part of the client's influence back. fast-fedul removes the rest (green) "
            "and holds that part back (grey), as a share of each array of the model."
        )
        chart = draw_held_back(report.removed_by_layer)
        figures.append(_figure("What was removed where", chart, said))
    if report.unit_angles:
        said = (
            "For every output of the model, the angle between its weights and those of "
            "the retrained model: the further left, the more alike."
        )
        chart = draw_angles(report.unit_angles)
        figures.append(_figure("Angle to the retrained model", chart, said))
    return figures


def _figure(title: str, chart: str, said: str) -> str:
    return (
        f'<figure class="card"><h3>{title}</h3><div class="chart">{chart}</div>'
        f"<figcaption>{escape(said)}</figcaption></figure>"
    )


def _render_examples(examples: ExampleImages | None) -> str:
    if examples is None or not examples.captions:
        return ""
    captions = [escape(caption, 120) for caption in examples.captions]
    items = "".join(
        f'<li><figure><img src="{png_address(image)}" alt="{caption}" '
        f'width="{image.shape[1]}" height="{image.shape[0]}">'
        f"<figcaption>{caption}</figcaption></figure></li>"
        for image, caption in zip(examples.images, captions, strict=True)
    )
    said = "<p>What the attacker trained on, or shows the model to fool it.</p>"
    pictures = f'<div class="card"><ul class="examples">{items}</ul></div>'
    return _section("Poisoned images", said + pictures)


def _render_numbers(report: Report) -> str:
    if not report.rows:
        return ""
    table = _scrolling("All numbers", render_numbers_table(report.rows))
    return _section("All numbers", table + render_terms())


def _render_settings(report: Report) -> str:
    if not report.settings:
        return ""
    return _section("Settings", render_settings(report.settings))


def _render_commands(commands: Sequence[str]) -> str:
    if not commands:
        return ""
    lines = html.escape("\n".join(map(tidy_lines, commands)))
    said = "<p>These commands give the same numbers again, except for the times.</p>"
    return _section("How to reproduce", f'{said}<pre class="card">{lines}</pre>')


def _render_limits(report: Report) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in _limits(report))
    title = "What this does and does not show"
    return _section(title, f'<ul class="limits">{items}</ul>')


def _limits(report: Report) -> tuple[str, ...]:
    measured = any(row.mia_auc is not None for row in report.rows)
    membership = (
        "Membership inference looks for traces of the client's own images in the "
        "model's losses. It is one simple attack: where it finds nothing, a stronger "
        "one may still find something."
        if measured
        else "Whether the client's own images left traces in the model (membership "
        "inference) was not measured here."
    )
    compared = find_row(report.rows, RETRAINED) is not None
    return (
        "A cleaned model is an estimate of the model that would have come out without "
        "the client. Only training again from the start gives that model itself"
        + ("; here that was done, to compare." if compared else "."),
        "That an attack no longer works is a good sign, but no proof that the client "
        "is forgotten: whatever else the model learned from it may still be there.",
        membership,
        "Everything here comes from one run with one random seed. The intervals say "
        "how much depends on the choice of test images, not how much another seed, "
        "another split or another attack would change.",
        *report.notes,
    )
