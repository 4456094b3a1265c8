"""`python -m paper.audits run|page`: is a client gone, by seven ways to forget it?

A run for each data set is trained, and `fastfedul.audit` attacks the model of every
method, on the same shadow federations. A method on a data set is a line of
results/audit.jsonl. The command can be stopped; the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fastfedul as ff
from fastfedul.errors import FastFedULError
from fastfedul.evaluate.intervals import Proportion
from fastfedul.evaluate.lira import RATES
from fastfedul.files import write_whole
from fastfedul.runs.training import resume
from paper.board.running import commit
from paper.leaving import read_results
from paper.settings import setting_of

RESULTS = Path("results/audit.jsonl")
PAGES = Path("docs/results")
PAGE = "audit.md"
RUNS = Path("build/audits")

CLIENT = "client-0"
METHODS = ("fast-fedul", "fast-fedul-paper", "federaser", "fedrecover", "kd", "pga")

_SEED = 20_000
"""No other experiment and no development run used it."""

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Board:
    """The audit of one data set.

    Attributes:
        data: Data set.
        config: Configuration of its run: one of ten clients hides a backdoor.
        shadows: Shadow federations.
        settings: Settings of methods that are not the usual ones.
    """

    data: str
    config: ff.RunConfig
    shadows: int
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def boards() -> tuple[Board, ...]:
    """Return the audits, small ones first."""
    digits, mnist = setting_of("smoke", "digits"), setting_of("standard", "mnist")
    small: dict[str, Any] = {
        "train_size": 6_000,
        "server_images": 500,
        "workers": 1,
    }
    return (
        Board("digits", digits.config("pixel", _SEED, workers=1), 64),
        Board("mnist", mnist.config("pixel", _SEED, **small), 32, mnist.methods),
    )


def measure(board: Board, folder: Path, budget: float | None) -> list[Line]:
    """Return the lines of an audit, as far as it came; its run is in a folder."""
    if (folder / "config.toml").is_file():
        resume(folder)
    else:
        folder.parent.mkdir(parents=True, exist_ok=True)
        ff.train(board.config, folder)
    shown: list[str] = []

    def say(what: str, done: int, total: int) -> None:
        if shown != [what]:
            shown[:] = [what]
            print(f"{board.data}: {what}", file=sys.stderr, flush=True)

    found = ff.audit(
        folder,
        CLIENT,
        METHODS,
        settings=board.settings,
        shadows=board.shadows,
        budget=budget,
        say=say,
    ).to_json()
    about = {
        name: found[name]
        for name in ("shadows", "shadows_wanted", "examples", "noise", "by_backdoor")
    }
    return [
        {
            "key": f"{board.data}/{row['name']}",
            "data": board.data,
            "commit": commit(),
            **about,
            "row": row,
        }
        for row in found["rows"]
    ]


def write_page(results: Path, out: Path) -> Iterator[Path]:
    """Write the page; yield its path.

    Args:
        results: File of the results.
        out: Folder of the page.
    """
    path = out / PAGE
    text = "\n".join(page_lines(read_results(results)))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.rstrip("\n") + "\n")
    yield path


def page_lines(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield "# Is a client gone, by seven ways to forget it?"
    yield ""
    yield "`python -m paper.audits page` makes this page from `results/audit.jsonl`."
    yield "`fastfedul audit` measured every method on the same shadow federations."
    yield "One of ten clients hides a backdoor and leaves."
    yield "[How to audit](../howto/audit.md) says what the numbers mean."
    yield ""
    for board in boards():
        own = [line for line in lines if line["data"] == board.data]
        yield f"## {board.data}"
        yield ""
        done = own[0]["shadows"] if own else 0
        if done < board.shadows:
            yield f"{done} of {board.shadows} shadow federations are done."
            yield "This command goes on:"
            yield ""
            yield "```bash"
            yield f"OMP_NUM_THREADS=1 python -m paper.audits run --only {board.data}"
            yield "python -m paper.audits page"
            yield "```"
            yield ""
        if own:
            names = ("before", "retrained", *METHODS)
            ordered = sorted(own, key=lambda line: names.index(line["row"]["name"]))
            yield from _board(ordered)


def _board(lines: Sequence[Line]) -> Iterator[str]:
    rows = [line["row"] for line in lines]
    shadowed = [row for row in rows if row["attack"] is not None]
    if shadowed:
        about = lines[0]
        yield (
            f"Can single examples be told? {about['shadows']} shadow federations, "
            f"{about['examples']['leaver']} examples of the client."
        )
        before = next(row for row in shadowed if row["name"] == "before")
        yield (
            "The row `before`, the model as trained, says how much there is to find: "
            f"an area of {before['attack']['auc']['value']:.3f}, where 0.5 is guessing."
        )
        yield "Intervals are over pairs of shadow federations."
        yield "“More” is the distance from the retrained models, on the same pairs."
        yield ""
        rates = list(RATES)
        yield (
            "| model | area | more | "
            + " | ".join(f"found at {rate} | more" for rate in rates)
            + " |"
        )
        yield "|---|---|---|" + "---|---|" * len(rates)
        for row in shadowed:
            attack = row["attack"]
            cells = _measured(attack["auc"], 1, 3)
            for rate in rates:
                cells += _measured(attack["found"][rate], 100, 1)
            yield f"| {row['name']} | {' | '.join(cells)} |"
        yield ""
        yield "KLOM in nats, quantiles over examples; the row `retrained` is the floor:"
        yield ""
        groups = [(g, q) for g, own in shadowed[0]["klom"].items() for q in own]
        heads = " | ".join(f"{group}, {quantile}" for group, quantile in groups)
        yield f"| model | {heads} |"
        yield "|---" * (1 + len(groups)) + "|"
        for row in shadowed:
            values = [
                f"{row['klom'][group][quantile]:.2f}" for group, quantile in groups
            ]
            yield f"| {row['name']} | {' | '.join(values)} |"
        yield ""
    noise = {k: v for k, v in lines[0]["noise"].items() if v is not None}
    yield "The models of the whole federation:"
    yield ""
    yield (
        "| model | accuracy | attack success | area by loss | KL | differs in "
        "| client back: rounds | without it: attack success after 5 | time |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        if row["whole"] is None:
            yield f"| {row['name']} | refused: {row['refused']} | | | | | | | |"
            continue
        yield f"| {row['name']} | {' | '.join(_whole(row))} |"
    yield ""
    told = ", ".join(f"{name} {value:.4f}" for name, value in noise.items())
    yield f"Noise of four retrainings in other orders of batches: {told}."
    yield "A difference below it counts as none."
    yield (
        "With the client back for up to ten rounds, the attack success is back at 95 % "
        "of its value before forgetting."
    )
    yield ""


def _whole(row: Mapping[str, Any]) -> list[str]:
    whole = row["whole"]
    some = [name for name, told in row["differences"].items() if told == "some"]
    reached = whole["relearn"]["reached"]
    last = whole["relapse"]["points"][-1]
    seconds = whole["seconds"]
    return [
        _share(whole["point"]["main"]),
        _share(whole["point"]["backdoor"]),
        f"{whole['auc']:.3f}",
        "-" if whole["kl"] is None else f"{whole['kl']:.3f}",
        ", ".join(some) or "none",
        "not back" if reached is None else str(reached),
        _share(last["backdoor"]),
        "-" if seconds is None else f"{seconds:.2f} s",
    ]


def _share(counts: Mapping[str, int] | None) -> str:
    if counts is None:
        return "-"
    found = Proportion(counts["successes"], counts["total"])
    assert found.value is not None
    return f"{found.value:.1%} ({found.successes} of {found.total})"


def _measured(own: Mapping[str, Any] | None, factor: int, digits: int) -> list[str]:
    """Return a number and its distance from the reference, with their intervals."""
    if own is None:
        return ["-", "-"]

    def shown(value: float, ends: Sequence[float], sign: str) -> str:
        low, high = (f"{factor * end:{sign}.{digits}f}" for end in ends)
        return f"{factor * value:{sign}.{digits}f} [{low} to {high}]"

    return [
        shown(own["value"], own["interval"], ""),
        shown(own["more"], own["more_interval"], "+"),
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Run the command of the command line; return the exit code."""
    asked = _parser().parse_args(words)
    try:
        if asked.verb == "page":
            for path in write_page(asked.results, asked.out):
                print(path)
            return 0
        for board in boards():
            if asked.only and board.data not in asked.only:
                continue
            lines = measure(board, asked.runs / board.data, asked.budget)
            kept = [
                ln for ln in read_results(asked.results) if ln["data"] != board.data
            ]
            every = sorted([*kept, *lines], key=lambda line: line["key"])
            text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in every)
            write_whole(asked.results, text)
    except FastFedULError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m paper.audits", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="do the audits, as far as they are not done")
    run.add_argument("--only", nargs="*", choices=("digits", "mnist"), default=())
    run.add_argument("--budget", type=float, help="minutes for each data set")
    run.add_argument("--runs", type=Path, default=RUNS, help="folder of the runs")
    page = verbs.add_parser("page", help="write the page from the results")
    page.add_argument("--out", type=Path, default=PAGES)
    for verb in (run, page):
        verb.add_argument("--results", type=Path, default=RESULTS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
