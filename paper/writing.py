"""Writes the files of a table or figure: a page of Markdown, a CSV and the plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fastfedul.errors import InvalidInputError
from fastfedul.files import write_whole
from paper.cells import CellStore
from paper.experiments import Line
from paper.plot_style import can_plot
from paper.plots import plots_of
from paper.settings import Scale
from paper.summary import Summary, summarize
from paper.tables import to_csv, to_markdown

_NO_PLOTS = "\nPlots need matplotlib: `pip install 'fastfedul[report]'`.\n"


def write(
    name: str, scale: Scale, lines: Sequence[Line], store: CellStore, out: Path
) -> tuple[Path, ...]:
    """Write the files of one table or figure, each whole or not at all.

    Without matplotlib there are no plots, and the page says so. Plots of an earlier
    time stay where they are unless they are drawn again.

    Returns:
        The files, the page first.

    Raises:
        InvalidInputError: If a file cannot be written.
    """
    texts = _files(name, scale, summarize(lines, store))
    for file, text in texts.items():
        _write(out / file, text)
    return tuple(out / file for file in texts)


def _files(name: str, scale: Scale, summaries: Sequence[Summary]) -> dict[str, str]:
    plots = plots_of(name, summaries) if can_plot() else {}
    pictures = {f"{stem}.svg": text for stem, text in plots.items()}
    page = to_markdown(name, scale, summaries, tuple(pictures))
    return {
        f"{name}.md": page if can_plot() else page + _NO_PLOTS,
        f"{name}.csv": to_csv(summaries),
        **pictures,
    }


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidInputError(f"cannot write {path}: {reason}") from None
