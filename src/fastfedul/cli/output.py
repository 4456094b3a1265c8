"""Output of commands: tables for people, one JSON object for scripts."""

from __future__ import annotations

import json
import logging
import re
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from threading import Event, Lock, Thread
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

QUIET_SECONDS = 2.0
"""How long a task without a terminal runs before its first line."""

_SECOND_LINE, _LONGEST_WAIT = 4.0, 60.0

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
    words = [_unbroken(own) for own in cells]
    broken = sum(words) + _FRAMED * len(words) >= width
    squeezed = sum(max(map(len, c)) + _PADDING for c in cells) > width
    if broken or (width < _WIDE and squeezed):
        _print_blocks(title, columns, rows)
        return
    # On a narrow screen frames would cost the width that whole lines need.
    frame = box.HEAVY_HEAD if width >= _WIDE else None
    table = Table(box=frame)
    between = _PADDING if frame is None else _FRAMED
    room = width - between * len(columns) - (frame is not None)
    widths = _squeezed([max(map(len, c)) for c in cells], words, room)
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


def _unbroken(cells: Sequence[str]) -> int:
    """Return the least width of a column; a number stays beside its unit."""
    head, *rest = cells
    widths = map(len, rest) if _are_numbers(rest) else (_longest_word(rest),)
    return max(_longest_word([head]), *widths, 0)


def _squeezed(widths: list[int], words: list[int], room: int) -> list[int]:
    """Return widths of columns that fit together into the room, no word broken.

    The widest columns give way first. Rich itself cuts the table off instead.
    """
    found = list(widths)
    while sum(found) > room:
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


def show_already(facts: Mapping[str, Any], why: object, *, json: bool) -> None:
    """Say that nothing is left to do: what somebody asks for is so already."""
    if json:
        print_json({**facts, "already": True})
    else:
        out().print(f"Nothing to do: {why}.", markup=False, soft_wrap=True)


def warn(text: str) -> None:
    """Print a warning on standard error."""
    say(text, level="warning", label="warning")


@contextmanager
def task_progress(what: str) -> Iterator[Say]:
    """Show on standard error how far a task is; yield the function to call.

    Without a terminal, a task that takes more than two seconds prints lines.

    Args:
        what: Name of the first task.
    """
    console = err()
    if not console.is_terminal:
        with _printing_lines(what) as tell:
            yield tell
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total
        )


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on standard error that a task is going on which cannot say how far."""
    console = err()
    shown = console.status(what) if console.is_terminal else task_progress(what)
    with shown:
        yield


@contextmanager
def _printing_lines(what: str) -> Iterator[Say]:
    lines = _Lines(what)
    # A task may take long between two calls, and its reader wants to see that it lives.
    watch = Thread(target=lines.watch, daemon=True)
    watch.start()
    try:
        yield lines.say
    finally:
        lines.over.set()
        watch.join()


class _Lines:
    """Lines about a task: none at first, then each stage, and ever fewer between."""

    def __init__(self, what: str) -> None:
        self.over = Event()
        self._lock, self._begun = Lock(), time.monotonic()
        self._now, self._last = (what, 0, 0), ""

    def say(self, what: str, done: int, total: int) -> None:
        """Note how far the task is; print it if a new stage begins."""
        with self._lock:
            begins = what != self._now[0]
            self._now = what, done, total
            if begins and self._seconds() >= QUIET_SECONDS:
                self._print()

    def watch(self) -> None:
        """Print from time to time until the task is over."""
        wait = QUIET_SECONDS
        while not self.over.wait(wait):
            with self._lock:
                self._print()
            wait = min(_LONGEST_WAIT, max(2 * wait, _SECOND_LINE))

    def _print(self) -> None:
        what, done, total = self._now
        text = f"{what}: {done} of {total}" if done and total else what
        if text == self._last:
            text += f", {show_seconds(self._seconds())} so far"
        else:
            self._last = text
        say(text)

    def _seconds(self) -> float:
        return time.monotonic() - self._begun


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on standard error; yield a function of work done and in all."""
    with task_progress(what) as say:
        yield partial(say, what)
