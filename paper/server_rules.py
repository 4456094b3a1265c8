"""`python -m paper.server_rules run|page`: forgetting under other server rules.

Every case trains a federation under one rule of the server, forgets one client with the
default method, and retrains without the client under the same rule. A case is a line of
results/server-rules.jsonl. The command can be stopped; the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fastfedul.errors import FastFedULError
from fastfedul.files import write_whole
from fastfedul.forgetting.service import preview
from fastfedul.ledger.reader import LedgerReader
from fastfedul.runs.config import RunConfig
from fastfedul.runs.training import prepare, retrain, score, start_workers, train
from paper.board.running import commit

RESULTS = Path("results/server-rules.jsonl")
PAGES = Path("docs/results")
PAGE = "server-rules.md"

Line = dict[str, Any]

FEDAVG = "FedAvg"
RULES: Mapping[str, Mapping[str, Any]] = {
    FEDAVG: {},
    "FedAvgM": {"server_optimizer": "momentum"},
    "FedAdam": {"server_optimizer": "adam", "server_lr": 0.03},
    "Krum": {"aggregation": "krum:1"},
}
"""Options of each rule.

The learning rate of FedAdam is the better of .01 and .03 by accuracy before forgetting,
on seed 100 of digits. FedAvgM was tried there with 1 and .3; it has the default, 1.
Forgetting under Krum has the scalar skew, which is the default for choosing rules.
"""

DATA: Mapping[str, Mapping[str, Any]] = {
    "digits": {"data": "digits"},
    "mnist": {"data": "mnist", "train_size": 2_000},
}
SPLITS = ("iid", "dirichlet:0.5")
LEAVERS: Mapping[str, Mapping[str, Any]] = {
    "pixel": {"attack": "pixel"},
    "honest": {},
}
LEAVER = "client-0"
"""The client that leaves; with an attack it is the attacker."""

SEEDS = (0, 1, 2)
WANTED = 2.0
"""Mean gaps under a rule should be at most so many times FedAvg's."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run under one rule, and the client that leaves.

    Attributes:
        data: Data set.
        rule: Rule of the server.
        split: How the clients share the examples.
        leaver: Kind of the client that leaves.
        seed: Seed of the run.
    """

    data: str
    rule: str
    split: str
    leaver: str
    seed: int

    @property
    def key(self) -> str:
        """Name of the case in the results."""
        parts = (self.data, self.rule, self.split, self.leaver, self.seed)
        return "/".join(map(str, parts))

    @property
    def config(self) -> RunConfig:
        """Configuration of the run."""
        return RunConfig.from_options(
            {**DATA[self.data], **RULES[self.rule], **LEAVERS[self.leaver]},
            partition=self.split,
            seed=self.seed,
            workers=1,
        )


def all_cases(data: Sequence[str] = tuple(DATA)) -> list[Case]:
    """Return every case, seed by seed, so that early results compare all rules."""
    return [
        Case(name, rule, split, leaver, seed)
        for name, seed, split, leaver, rule in product(
            data, SEEDS, SPLITS, LEAVERS, RULES
        )
    ]


def measure(case: Case, folder: Path) -> Line:
    """Return the result of a case; its run goes into a folder."""
    config = case.config
    train(config, folder)
    prepared = prepare(config)
    with start_workers(prepared) as workers, LedgerReader(folder) as ledger:
        models = {
            "before": ledger.final,
            "forgotten": preview(ledger, [LEAVER]).model,
            "retrained": retrain(prepared, workers, frozenset([LEAVER])),
        }
        scores = {name: score(prepared, workers, m) for name, m in models.items()}
    return {
        "key": case.key,
        "data": case.data,
        "rule": case.rule,
        "split": case.split,
        "leaver": case.leaver,
        "seed": case.seed,
        "commit": commit(),
        "main": {name: main for name, (main, _) in scores.items()},
        "backdoor": {name: found for name, (_, found) in scores.items()},
    }


def read_results(path: Path) -> list[Line]:
    """Return all lines; none if there is no file.

    Raises:
        FastFedULError: If a line cannot be read.
    """
    if not path.exists():
        return []
    found: list[Line] = []
    for number, text in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            found.append({**line, "key": line["key"]})
        except (ValueError, KeyError, TypeError):
            raise FastFedULError(f"{path}, line {number}: cannot be read") from None
    return found


class AnyCase(Protocol):
    """A case of some results."""

    @property
    def key(self) -> str:
        """Name of the case in the results."""


C = TypeVar("C", bound=AnyCase)


def run_missing(
    cases: Sequence[C], path: Path, measure: Callable[[C, Path], Line]
) -> Iterator[Line]:
    """Do the cases that the results do not have; yield each line once it is stored.

    Args:
        cases: All cases.
        path: File of the results.
        measure: Returns the result of a case; its run goes into a folder.
    """
    for case in cases:
        lines = read_results(path)
        if case.key in {line["key"] for line in lines}:
            continue
        with tempfile.TemporaryDirectory(prefix="paper-") as folder:
            found = measure(case, Path(folder) / "run")
        every = sorted([*read_results(path), found], key=lambda line: line["key"])
        text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in every)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
        yield found


def gaps(lines: Sequence[Line], what: str) -> list[float]:
    """Return the gaps of some results to retraining, in points.

    Args:
        lines: The results.
        what: `main` or `backdoor`; cases without an attack have no backdoor.
    """
    return [
        100 * (line[what]["forgotten"] - line[what]["retrained"])
        for line in lines
        if line[what]["retrained"] is not None
    ]


def write_page(results: Path, out: Path) -> Iterator[Path]:
    """Write the page of the results; yield its file."""
    text = page_text(read_results(results))
    path = out / PAGE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
    yield path


def page_text(lines: Sequence[Line]) -> str:
    """Return the page: a table for each data set, with gaps to retraining."""
    parts = [
        "# Forgetting under other server rules",
        "",
        "`python -m paper.server_rules run` does the runs, and "
        "`python -m paper.server_rules page` writes this page.",
        "A run forgets one of ten clients with the default method.",
        "The gap is the accuracy after forgetting minus the accuracy after retraining "
        "under the same rule, in points.",
        "Means are over absolute gaps; the worst gap keeps its sign.",
        "The runs have two splits (even and Dirichlet 0.5), an attacker or an honest "
        "client that leaves, and three seeds.",
        "Only runs with an attacker have a backdoor.",
        "On MNIST the ten clients share "
        f"{DATA['mnist']['train_size']:,} training images, and accuracy is of all "
        "10,000 test images.",
        f"Wanted is a mean gap of at most {WANTED:g} times FedAvg's.",
        "",
        "Two choices were made before these runs, on seed 100 of digits, even split, "
        "with an attacker.",
        "The learning rate of FedAdam is the better of 0.01 and 0.03 by accuracy "
        "before forgetting.",
        "FedAvgM was tried with 1 and 0.3, and has its default of 1.",
        "The default skew takes the pull of local training as it is, not divided by "
        "the server's gain.",
        "So main accuracy was nearer to retraining under every rule tried, and the "
        "backdoor further under two of four.",
        "",
    ]
    for data in DATA:
        own = [line for line in lines if line["data"] == data]
        table = [*_table(own)] if own else ["These runs have not been done yet."]
        parts += [f"## {data}", "", *table, ""]
    return "\n".join(parts)


_COLUMNS = (
    "rule",
    "runs",
    "main before",
    "main retrained",
    "main gap: mean",
    "worst",
    "backdoor before",
    "backdoor retrained",
    "backdoor gap: mean",
    "worst",
    "within twice FedAvg's",
)


def _table(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the lines of the table of one data set."""
    yield f"| {' | '.join(_COLUMNS)} |"
    yield f"|{'---|' * len(_COLUMNS)}"
    by_rule = {rule: [one for one in lines if one["rule"] == rule] for rule in RULES}
    usual = [_mean_gap(by_rule[FEDAVG], what) for what in ("main", "backdoor")]
    for rule, own in by_rule.items():
        if not own:
            continue
        cells = [rule, str(len(own))]
        mine = []
        for what in ("main", "backdoor"):
            found = gaps(own, what)
            mine.append(_mean_gap(own, what))
            worst = max(found, key=abs, default=None)
            cells += [
                _percent(_mean([line[what]["before"] for line in own])),
                _percent(_mean([line[what]["retrained"] for line in own])),
                "none" if mine[-1] is None else f"{mine[-1]:.2f}",
                "none" if worst is None else f"{worst:+.2f}",
            ]
        cells.append("" if rule == FEDAVG else _verdict(mine, usual))
        yield f"| {' | '.join(cells)} |"


def _verdict(mine: Sequence[float | None], usual: Sequence[float | None]) -> str:
    """Return whether mean gaps are as small as wanted, for main and backdoor."""
    words = []
    for what, own, wanted in zip(("main", "backdoor"), mine, usual, strict=True):
        if own is not None and wanted is not None:
            words.append(f"{what}: {'yes' if own <= WANTED * wanted else 'no'}")
    return ", ".join(words) or "not known"


def _mean_gap(lines: Sequence[Line], what: str) -> float | None:
    return _mean([abs(gap) for gap in gaps(lines, what)])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{100 * value:.1f} %"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command of the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m paper.server_rules")
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="do the cases that are missing")
    run.add_argument("--data", choices=tuple(DATA), help="only this data set")
    run.add_argument("--limit", type=int, help="do at most so many cases")
    page = verbs.add_parser("page", help="write the page from the results")
    page.add_argument("--out", type=Path, default=PAGES, help=f"usually {PAGES}")
    for verb in (run, page):
        verb.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args(words)
    try:
        if asked.verb == "page":
            for path in write_page(asked.results, asked.out):
                print(path)
            return 0
        cases = all_cases([asked.data] if asked.data else tuple(DATA))
        for number, line in enumerate(run_missing(cases, asked.results, measure), 1):
            print(line["key"], json.dumps(line["main"]), json.dumps(line["backdoor"]))
            sys.stdout.flush()
            if asked.limit is not None and number >= asked.limit:
                break
    except FastFedULError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
