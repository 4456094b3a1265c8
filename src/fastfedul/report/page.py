"""The report as one HTML file that stands alone: no script, no request, any device.

Jinja2 fills `templates/report.html.j2` and escapes every text. The charts alone go in
as they are: Matplotlib has escaped the names in them.
"""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fastfedul.errors import InvalidInputError, require_extra
from fastfedul.evaluate.comparison import BEFORE, NOW, RETRAINED
from fastfedul.files import write_whole
from fastfedul.report import wording
from fastfedul.report.charts import (
    MAX_CLIENTS,
    draw_angles,
    draw_bars,
    draw_contributions,
    draw_held_back,
    draw_rounds,
)
from fastfedul.report.content import Images, Report, Row, find_row

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True, slots=True)
class _Tile:
    """A figure that answers the reader's question before everything else."""

    name: str
    kind: str
    before: str
    after: str
    retrained: str


@dataclass(frozen=True, slots=True)
class _Picture:
    """A chart with its title and its description."""

    title: str
    chart: str
    caption: str


def render_html(report: Report) -> str:
    """Return the whole page; it makes no request and runs no script.

    The template escapes every text of the report and, but for the commands, cuts it
    to a length that fits a page. The same report gives the same page.

    Raises:
        InvalidInputError: If a package of the extra `report` is missing.
    """
    template = environment().get_template("report.html.j2")
    return template.render(
        report=report,
        attacked=any(row.backdoor is not None for row in report.rows),
        timed=any(row.seconds is not None for row in report.rows),
        tiles=_answer(report.rows),
        answer=_answering_row(report.rows),
        retrained=find_row(report.rows, RETRAINED),
        pictures=list(_draw_pictures(report)),
        numbers=_number_columns(report.rows),
        membership=any(row.mia_auc is not None for row in report.rows),
    )


def write_html(path: Path, report: Report) -> None:
    """Write the page to a file, whole or not at all.

    Raises:
        InvalidInputError: If the file cannot be written, or a package of the extra
            `report` is missing.
    """
    write_text(path, render_html(report))


def write_text(path: Path, content: str) -> None:
    """Write a page to a file, whole or not at all.

    Raises:
        InvalidInputError: If the file cannot be written.
    """
    try:
        write_whole(path, content)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidInputError(f"cannot write {path}: {reason}") from None


def encode_png(image: Images) -> bytes:
    """Return a uint8 picture (height, width, 1 or 3 channels) as a PNG file.

    Raises:
        InvalidInputError: If Pillow is not installed.
    """
    with require_extra("report", "pictures need Pillow"):
        from PIL import Image
    file = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[2] == 1 else image).save(file, "PNG")
    return file.getvalue()


@functools.cache
def environment() -> Environment:
    """Return Jinja2 with the templates and the filters of all pages.

    Raises:
        InvalidInputError: If Jinja2 is not installed.
    """
    with require_extra("report", "pages need Jinja2"):
        from jinja2 import Environment, PackageLoader, StrictUndefined
    found = Environment(
        loader=PackageLoader("fastfedul.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(
        short=wording.shorten,
        lines=wording.tidy_lines,
        share=wording.show_share,
        count=wording.show_count,
        interval=wording.show_interval,
        seconds=wording.show_seconds,
        method=_method_name,
        png_address=_png_address,
    )
    return found


def _method_name(method: str) -> tuple[str, str]:
    """Return the case that a row of a comparison shows, and the method if one made it.

    >>> _method_name("before"), _method_name("fast-fedul")
    (('Before', ''), ('After', 'fast-fedul'))
    """
    named = {BEFORE: "Before", RETRAINED: "Retrained", NOW: "Now"}
    return (
        (named[method], "")
        if method in named
        else ("After", wording.shorten(method, 40))
    )


def _png_address(image: Images) -> str:
    """Return a picture as a `data:` address for an `img` element."""
    return "data:image/png;base64," + base64.b64encode(encode_png(image)).decode()


def _answering_row(rows: tuple[Row, ...]) -> Row | None:
    """Return the first row of a method, or of the model as it is."""
    return next((row for row in rows if row.method not in (BEFORE, RETRAINED)), None)


def _answer(rows: tuple[Row, ...]) -> list[_Tile]:
    own = _answering_row(rows)
    if own is None:
        return []
    before, retrained = find_row(rows, BEFORE), find_row(rows, RETRAINED)

    def share(row: Row | None, name: str) -> str:
        return wording.show_share(getattr(row, name)) if row else ""

    tiles = [
        _Tile(title, kind, *(share(row, name) for row in (before, own, retrained)))
        for title, kind, name in (
            ("Attack success", "attack", "backdoor"),
            ("Accuracy", "main", "main"),
        )
        if getattr(own, name) is not None
    ]
    if own.seconds is not None:
        again = wording.show_seconds(retrained.seconds) if retrained else ""
        shown = wording.show_seconds(own.seconds)
        tiles.append(_Tile("Time to forget", "time", "", shown, again))
    return tiles


def _number_columns(rows: tuple[Row, ...]) -> dict[str, list[str]]:
    """Return the measured columns of the second table."""
    columns = {
        "Membership": [wording.show_number(row.mia_auc, 3) for row in rows],
        "Distance": [wording.show_distance(row.distance) for row in rows],
        "Angle": [wording.show_degrees(row.angle_degrees) for row in rows],
        "Time": [wording.show_seconds(row.seconds) for row in rows],
        "Client calls": [f"{row.client_calls:,}" for row in rows],
        "History read": [wording.show_bytes(row.history_bytes) for row in rows],
    }
    return {
        name: cells
        for name, cells in columns.items()
        if any(cell != wording.NOTHING for cell in cells)
    }


def _draw_pictures(report: Report) -> Iterator[_Picture]:
    if any(row.method != NOW for row in report.rows):
        yield _Picture(
            "Now, and retrained"
            if find_row(report.rows, NOW)
            else "Before, after, and retrained",
            draw_bars(report.rows),
            "A good removal looks like the retrained model: the same accuracy, and as "
            "little attack success. The thin lines are 95 % intervals.",
        )
    if report.rounds:
        said = "Accuracy and attack success as training went on."
        if report.forgotten:
            said += f" Forgotten: {wording.show_forgotten(report.forgotten)}."
        chart = draw_rounds(report.rounds, report.forgotten)
        yield _Picture("Round by round", chart, said)
    shown = report.contributions
    if shown is not None and shown.values.size:
        said = "The darker a field, the more the client moved the model in that round."
        said += " Grey: the client took no part."
        if report.forgotten:
            said += " Orange: the client was forgotten."
        if len(shown.clients) > MAX_CLIENTS:
            said += f" The map shows {MAX_CLIENTS} of {len(shown.clients):,} clients."
        chart = draw_contributions(shown, report.forgotten)
        yield _Picture("Who contributed how much when", chart, said)
    if any(kept is not None for _, kept in report.removed_by_layer):
        yield _Picture(
            "What was removed where",
            draw_held_back(report.removed_by_layer),
            "By the server's estimate, training with the others had already pulled "
            "part of the client's influence back. The method removes the rest (green) "
            "and holds that part back (grey), as a share of each array of the model.",
        )
    if report.unit_angles:
        yield _Picture(
            "Angle to the retrained model",
            draw_angles(report.unit_angles),
            "For every output of the model, the angle between its weights and the "
            "retrained model's: the further left, the more alike.",
        )
