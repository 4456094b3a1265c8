"""Output of commands: tables for people, one JSON object for scripts."""

from __future__ import annotations

import json
import logging
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal

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
from rich.text import Text

from fastfedul.report.wording import show_bytes as show_bytes
from fastfedul.report.wording import show_name as show_name
from fastfedul.report.wording import show_seconds as show_seconds
from fastfedul.strict_json import finite_values

Say = Callable[[str, int, int], None]
"""Called with the name of a task, the work done, and the work in all."""

Level = Literal["info", "warning", "error"]

_COLORS: Mapping[Level, str] = {"info": "", "warning": "yellow", "error": "red"}

_as_json = False
"""Whether lines on standard error are JSON objects; the command line says it once."""

_WIDE = 80
_PADDING, _FRAMED = 2, 3

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, also for an error.")
]


def out() -> Console:
    """Return the console for results."""
    return Console(highlight=False)


def err() -> Console:
    """Return the console for what moves on a terminal: bars, and words that wait."""
    return Console(
        stderr=True, highlight=False, force_terminal=False if _as_json else None
    )


def log_as_json() -> None:
    """Print each line on standard error as a JSON object from now on."""
    global _as_json
    _as_json = True
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonLines())
    logging.basicConfig(handlers=[handler], force=True)
    logging.captureWarnings(True)


def say(text: str, *, level: Level = "info", label: str = "", **facts: Any) -> None:
    """Print a line on standard error: progress, a warning, an error.

    Args:
        text: The line.
        level: How bad it is.
        label: Words before the text, in the colour of the level.
        facts: What the line says, for programs that read JSON.
    """
    whole = f"{label}: {text}" if label else text
    if _as_json:
        # The level says it already.
        message = text if label == level else whole
        typer.echo(_json_line(level, message, facts), err=True)
        return
    line = Text(whole)
    if label:
        line.stylize(_COLORS[level], 0, len(label) + 1)
    err().print(line, soft_wrap=True)


def _json_line(level: str, text: str, facts: Mapping[str, Any]) -> str:
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = {"time": time, "level": level, "message": text, **facts}
    return json.dumps(finite_values(line))


class _JsonLines(logging.Formatter):
    """What Python's own loggers say, in the same lines."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        return _json_line(record.levelname.lower(), text, {"logger": record.name})


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object; numbers that JSON cannot hold become null."""
    typer.echo(json.dumps(finite_values(value), indent=2))


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
    widths = _squeezed([max(map(len, c)) for c in cells], words, width)
    for number, column in enumerate(columns):
        table.add_column(
            column,
            justify="right" if _are_numbers([row[number] for row in rows]) else "left",
            overflow="fold",
            width=widths[number],
        )
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    if title:
        _print_whole(title, style="italic")
    out().print(table)


def _squeezed(widths: list[int], words: list[int], width: int) -> list[int]:
    """Return widths of columns that fit a framed table, no word broken.

    The widest columns give way first. Rich itself cuts the table off instead.
    """
    found = list(widths)
    while sum(found) + _FRAMED * len(found) >= width:
        spare = [found[i] - words[i] for i in range(len(found))]
        if max(spare) <= 0:
            break
        found[spare.index(max(spare))] -= 1
    return found


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
        say(line, level="error", label="" if stopped else "error")


def warn(text: str) -> None:
    """Print a warning on standard error."""
    say(text, level="warning", label="warning")


@contextmanager
def task_progress(what: str, *, lines: bool = False) -> Iterator[Say]:
    """Show on standard error how far a task is; yield the function to call.

    Args:
        what: Name of the first task.
        lines: Whether to print a line for each task where there is no terminal.
    """
    console = err()
    if lines and not console.is_terminal:
        yield _print_tasks()
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        # Elsewhere than on a terminal it would leave an empty line.
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total
        )


def _print_tasks() -> Say:
    last: list[str] = []

    def show(what: str, _done: int, _total: int) -> None:
        if last != [what]:
            last[:] = [what]
            say(what)

    return show


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on standard error; yield a function of work done and in all."""
    with task_progress(what) as say:
        yield partial(say, what)
