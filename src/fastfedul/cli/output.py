"""What commands print: tables for people, one JSON object for scripts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

_WIDE = 80
_LONG = 20
_PADDING, _FRAMED = 2, 3

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else.")
]


def out() -> Console:
    """Return the console for results."""
    return Console(highlight=False)


def err() -> Console:
    """Return the console for progress, warnings and errors."""
    return Console(stderr=True, highlight=False)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object; numbers that JSON cannot hold become null."""
    typer.echo(json.dumps(_finite(value), indent=2))


def print_facts(title: str, facts: Sequence[tuple[str, str]]) -> None:
    """Print names and values below each other."""
    table = Table(
        title=escape(title), show_header=False, title_justify="left", box=None
    )
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, escape(value))
    out().print(table)


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print rows under headings; all columns but the first are aligned right."""
    width = out().width
    cells = [[column, *(row[i] for row in rows)] for i, column in enumerate(columns)]
    if width < _WIDE and sum(max(map(len, c)) + _PADDING for c in cells) > width:
        _print_blocks(title, columns, rows)
        return
    # On a narrow screen frames would cost the width that whole lines need.
    frame = box.HEAVY_HEAD if width >= _WIDE else None
    words = [_longest_word(own) for own in cells]
    fits = sum(words) + _FRAMED * len(words) < width
    table = Table(title=escape(title), title_justify="left", box=frame)
    for number, column in enumerate(columns):
        table.add_column(
            column,
            justify="right" if number else "left",
            overflow="fold",
            min_width=words[number] if fits else None,
        )
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    out().print(table)


def _print_blocks(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print each row as lines below each other: on a screen too narrow for a table."""
    out().print(title, markup=False)
    for row in rows:
        out().print(f"{columns[0]} {row[0]}".strip(), markup=False, style="bold")
        for column, cell in zip(columns[1:], row[1:], strict=True):
            if cell:
                out().print(f"  {column}: {cell}", markup=False)


def _longest_word(cells: Sequence[str]) -> int:
    return min(_LONG, max(len(word) for cell in cells for word in cell.split() or [""]))


def warn(text: str) -> None:
    """Print a warning on standard error."""
    err().print(f"[yellow]warning:[/yellow] {escape(text)}", soft_wrap=True)


def show_name(name: str) -> str:
    """Return a client name that is safe to print on one line."""
    shown = name if name.isprintable() else repr(name)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def show_bytes(count: float) -> str:
    """Return a number of bytes with a unit.

    >>> show_bytes(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def show_seconds(seconds: float) -> str:
    """Return a duration in milliseconds or seconds."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


@contextmanager
def progress_bar(what: str) -> Iterator[Any]:
    """Show a bar on standard error; yields a function of done and total."""
    with Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=err(),
        transient=True,
        # Elsewhere than on a terminal it would leave an empty line.
        disable=not err().is_terminal,
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
