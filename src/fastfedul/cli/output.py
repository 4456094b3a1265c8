"""Output of commands: tables for people, one JSON object for scripts."""

from __future__ import annotations

import json
import math
import re
import textwrap
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
_PADDING, _FRAMED = 2, 3

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, also for an error.")
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
    """Print names and values below each other.

    A value with a word that does not fit beside its name has a line of its own, so that
    nobody copies half a digest or half a path.
    """
    _print_whole(title, style="bold")
    wide = max(len(name) for name, _ in facts)
    for name, value in facts:
        room = out().width - wide - 3
        if _longest_word([value]) > room:
            _print_whole(f" {name}\n  {value}")
            continue
        first, *rest = textwrap.wrap(value, room, break_on_hyphens=False) or [""]
        for start, line in [(name, first), *(("", line) for line in rest)]:
            out().print(f" {start:{wide}}  {line}", markup=False)


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print rows under headings; columns of numbers are aligned right.

    If a word of a cell would have to be broken, each row is printed as a block.
    """
    width = out().width
    cells = [[column, *(row[i] for row in rows)] for i, column in enumerate(columns)]
    words = [_longest_word(own) for own in cells]
    broken = sum(words) + _FRAMED * len(words) >= width
    squeezed = sum(max(map(len, c)) + _PADDING for c in cells) > width
    if broken or (width < _WIDE and squeezed):
        _print_blocks(title, columns, rows)
        return
    # On a narrow screen frames would cost the width that whole lines need.
    frame = box.HEAVY_HEAD if width >= _WIDE else None
    table = Table(box=frame)
    for number, column in enumerate(columns):
        table.add_column(
            column,
            justify="right" if _are_numbers([row[number] for row in rows]) else "left",
            overflow="fold",
            min_width=words[number],
        )
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    if title:
        _print_whole(title, style="italic")
    out().print(table)


def _are_numbers(cells: Sequence[str]) -> bool:
    """Return whether cells, as far as they are filled, begin with a number.

    >>> _are_numbers(["98.2%", "-", ""]), _are_numbers(["3 rounds", "none"])
    (True, False)
    """
    return all(re.match(r"[-+<~]?[0-9]|-?$", cell) for cell in cells)


def _print_blocks(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print each row as lines below each other: on a screen too narrow for a table."""
    _print_whole(title, style="italic")
    for row in rows:
        _print_whole(f"{columns[0]} {row[0]}".strip(), style="bold")
        for column, cell in zip(columns[1:], row[1:], strict=True):
            if cell:
                _print_whole(f"  {column}: {cell}")


def _print_whole(text: str, style: str | None = None) -> None:
    """Print text that breaks between words, and never inside of one."""
    console = out()
    long = _longest_word([text]) + _PADDING > console.width
    console.print(text, markup=False, style=style, soft_wrap=long)


def _longest_word(cells: Sequence[str]) -> int:
    return max(len(word) for cell in cells for word in cell.split() or [""])


def print_error(text: str, *, only_json: bool, stopped: bool = False) -> None:
    """Print why a command failed: a line on standard error, or one JSON object."""
    line = " ".join(text.split("\n"))
    if only_json:
        print_json({"error": line})
    else:
        start = "" if stopped else "[red]error:[/red] "
        err().print(f"{start}{escape(line)}", soft_wrap=True)


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
