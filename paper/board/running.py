"""Does the runs that are missing, in several processes, and can be stopped any time."""

from __future__ import annotations

import functools
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from types import FrameType
from typing import Any

from paper.board import rows
from paper.board.retired import check_out
from paper.board.runs import DIAMONDS, Run
from paper.board.store import Line, Results, is_done, read_lines
from paper.board.tabular import write_diamonds

Measure = Callable[[Run, Path], list[rows.Row]]
"""Makes a run in a folder of its own and returns its rows."""

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_LOOK_AGAIN = 1.0
"""Seconds after which the parent looks whether its processes still live."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Told by a process about a run.

    Attributes:
        key: Name of the run.
        seconds: Time of the run.
        failure: The traceback if it failed, which leaves the run to be done.
    """

    key: str
    seconds: float
    failure: str | None


def run_all(
    runs: Sequence[Run],
    results: Path,
    *,
    processes: int,
    work: Path | None = None,
    cells: Sequence[str] | None = None,
) -> int:
    """Do the runs that the file of results does not have; return how many failed.

    Args:
        runs: The runs, in the order in which they are begun.
        results: The file of results.
        processes: How many runs at a time, a thread each.
        work: Where ledgers go while a run is done; None for the system's folder.
        cells: Names of the rows to make; None for all.
    """
    lines = read_lines(results)
    missing = [run for run in runs if not is_done(run, lines)]
    _say(f"{len(runs) - len(missing)} of {len(runs)} runs are there")
    if not missing:
        return 0
    if work is not None:
        work.mkdir(parents=True, exist_ok=True)
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    with tempfile.TemporaryDirectory(
        prefix="board-", dir=work, ignore_cleanup_errors=True
    ) as folder:
        diamonds = ""
        if any(run.data == DIAMONDS for run in missing):
            diamonds = str(write_diamonds(Path(folder)))
        measure = functools.partial(
            rows.measure,
            diamonds=diamonds,
            old_software=check_out(Path(folder) / "old"),
            cells=cells,
        )
        return _in_processes(missing, results, Path(folder), measure, processes)


def do_runs(
    runs: Sequence[Run],
    results: Path,
    folder: Path,
    measure: Measure,
    tell: Callable[[Finished], None],
    go_on: Callable[[], bool] = lambda: True,
) -> None:
    """Do the missing runs one after the other, except runs of another process.

    Args:
        runs: The runs.
        results: The file of results.
        folder: Where each run gets a folder for as long as it is done.
        measure: Makes a run.
        tell: Told of every run that is done or failed.
        go_on: Asked before every run.
    """
    about = {"commit": commit()}
    with Results(results) as store:
        for run in runs:
            if not go_on():
                return
            with store.claim(run) as mine:
                if mine:
                    tell(_do(run, store, folder / run.key, measure, about))


def commit() -> str:
    """Return the commit of the code, with a plus if files differ from it."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--", ":/src", ":/paper")
    return git("rev-parse", "HEAD") + ("+" if changed else "")


def _do(
    run: Run, store: Results, folder: Path, measure: Measure, about: Line
) -> Finished:
    started = time.perf_counter()
    failure = None
    folder.mkdir(parents=True)
    try:
        found = measure(run, folder)
        store.append([{**row, **about, **_names(run, row)} for row in found])
    except Exception:
        failure = traceback.format_exc()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Finished(run.key, time.perf_counter() - started, failure)


def _names(run: Run, row: rows.Row) -> Line:
    return {"run": run.key, "key": f"{run.key}/{row['method']}"}


def _in_processes(
    runs: Sequence[Run], results: Path, folder: Path, measure: Measure, number: int
) -> int:
    """Do runs in processes that are started afresh; return how many failed."""
    context = multiprocessing.get_context("spawn")
    told: Any = context.Queue()
    children = [
        context.Process(target=_child, args=(runs, results, folder, measure, told))
        for _ in range(min(number, len(runs)))
    ]
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        for child in children:
            child.start()
        return _listen(told, children, len(runs))
    finally:
        for child in children:
            if child.pid is not None:
                child.terminate()
                child.join()
        signal.signal(signal.SIGTERM, before)


def _listen(told: Any, children: Sequence[Any], total: int) -> int:
    """Show the processes' messages to their end; return the number of failures."""
    started, done, failed = time.perf_counter(), 0, 0
    while True:
        ended = not any(child.is_alive() for child in children)
        try:
            news: Finished = told.get(timeout=0.1 if ended else _LOOK_AGAIN)
        except Empty:
            if ended:
                break
            continue
        done += 1
        failed += news.failure is not None
        left = (time.perf_counter() - started) / done * (total - done)
        state = "FAILED" if news.failure else "done"
        _say(
            f"{done}/{total} {news.key} {state} in {news.seconds:.0f} s, "
            f"about {left / 60:.0f} min left"
        )
        if news.failure:
            _say(news.failure)
    killed = [child for child in children if child.exitcode != 0]
    if killed:
        _say(f"{len(killed)} processes were killed; their runs are to be done again")
    return failed + len(killed)


def _child(
    runs: Sequence[Run], results: Path, folder: Path, measure: Measure, told: Any
) -> None:
    import torch

    torch.set_num_threads(1)
    # The parent gets Ctrl-C, too, and ends its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    do_runs(runs, results, folder, measure, told.put, parent.is_alive)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
