"""Whether a fault loses anything, leaves anything, or makes a wrong byte believed.

Ten kinds of faults: SIGKILL at random instants of appending and of forgetting with
erasure; a SIGKILL, and an error, at system calls of every command that changes a run;
power loss, which drops and tears writes that were not synced; bytes flipped in every
file of a ledger; parts of a run swapped with each other or with older copies; altered
certificates; hostile replies to a Flower server; and, because a kill cannot reveal a
missing sync, the order of system calls as `strace` sees it.

    python benchmarks/faults.py [--json] [--quick | --full] [--only PART]
        [--work FOLDER] [--seed 0]

Without an option it takes about twenty minutes. `--full` has 10,000 kills and 10,000
flips, and takes about three hours; with `--work` an interrupted run goes on where it
was. It exits with status 1 if anything was lost, left, believed or out of order.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.fault_envelopes import alter_envelopes
from benchmarks.fault_flips import flip_bytes
from benchmarks.fault_kills import Kills, kill_appends, kill_erasures
from benchmarks.fault_order import check_order
from benchmarks.fault_power import power_losses
from benchmarks.fault_server import compiler
from benchmarks.fault_swaps import swap_parts
from benchmarks.fault_sweep import Sweep, sweep
from benchmarks.fault_writer import SHOWN
from benchmarks.measuring import machine, progress, work_folder, write_result

BATCH = 100
"""Faults after which a result is kept; an interrupted run loses at most these."""

EVERY = 10**6
"""A fault at every call: more than there are."""


@dataclass(frozen=True, slots=True)
class Found:
    """Result of one batch.

    Attributes:
        counts: Numbers by name; `faults` is the number of faults.
        problems: One line for each violation.
    """

    counts: Mapping[str, int]
    problems: list[str]


Try = Callable[[Path, int, int, Progress], Found]
"""Called with a folder, the number of faults, a seed and the display."""


def _kills(
    run: Callable[[Path, int, int, Progress], Kills],
    folder: Path,
    count: int,
    seed: int,
    display: Progress,
) -> Found:
    found = run(folder, count, seed, display)
    return Found({"faults": found.kills, **found.summary()}, found.problems)


def _flips(folder: Path, count: int, seed: int, display: Progress) -> Found:
    found = flip_bytes(folder, count, seed, display)
    return Found(found.counts(), found.examples)


def _sweep(
    run: Callable[[Path, int, int, Progress], Sweep],
    folder: Path,
    count: int,
    seed: int,
    display: Progress,
) -> Found:
    found = run(folder, count, seed, display)
    return Found({"faults": found.faults}, found.problems)


def _swaps(folder: Path, count: int, seed: int, display: Progress) -> Found:
    found = swap_parts(folder, count, seed, display)
    return Found(found.counts(), found.problems)


def _envelopes(folder: Path, count: int, seed: int, display: Progress) -> Found:
    found = alter_envelopes(folder, count, seed, display)
    return Found(found.counts(), found.problems)


def _replies(folder: Path, count: int, seed: int, display: Progress) -> Found:
    # Flower is an extra, and takes seconds to import.
    from benchmarks.fault_replies import send_replies

    found = send_replies(folder, count, seed, display)
    return Found(found.counts(), found.problems)


PARTS: dict[str, Try] = {
    "kills_append": partial(_kills, kill_appends),
    "kills_erase": partial(_kills, kill_erasures),
    "flips": _flips,
    "calls_killed": partial(_sweep, partial(sweep, "kill")),
    "calls_failed": partial(_sweep, partial(sweep, "fail")),
    "power_losses": partial(_sweep, power_losses),
    "swaps": _swaps,
    "certificates": _envelopes,
    "replies": _replies,
}

NAMES = {
    "kills_append": "SIGKILL at a random instant of an append",
    "kills_erase": "SIGKILL at a random instant of a forget with erasure",
    "flips": "a byte flipped",
    "calls_killed": "SIGKILL at a system call; the command repeated",
    "calls_failed": "an error of a system call; the command repeated",
    "power_losses": "power loss; the command repeated",
    "swaps": "parts of a run swapped or rolled back",
    "certificates": "a certificate altered",
    "replies": "a hostile reply to a Flower server",
}

USUAL = {
    "kills_append": 100,
    "kills_erase": 100,
    "flips": 500,
    "calls_killed": EVERY,
    "calls_failed": EVERY,
    "power_losses": 1_000,
    "swaps": 500,
    "certificates": 3_000,
    "replies": 1_000,
}
QUICK = {
    "kills_append": 4,
    "kills_erase": 4,
    "flips": 20,
    "calls_killed": 50,
    "calls_failed": 50,
    "power_losses": 60,
    "swaps": 24,
    "certificates": 100,
    "replies": 100,
}
FULL = {
    "kills_append": 5_000,
    "kills_erase": 5_000,
    "flips": 10_000,
    "calls_killed": EVERY,
    "calls_failed": EVERY,
    "power_losses": 10_000,
    "swaps": 10_000,
    "certificates": 10_000,
    "replies": 10_000,
}
"""Faults of each part."""

_OF_CALLS = ("calls_killed", "calls_failed", "power_losses")


def main() -> None:
    """Run the parts and print what came out."""
    arguments = parse_arguments()
    wanted = dict(FULL if arguments.full else QUICK if arguments.quick else USUAL)
    if arguments.only:
        wanted = {name: n for name, n in wanted.items() if name in arguments.only}
    missing = compiler() is None
    if missing:
        print("no C compiler: faults at system calls are left out", file=sys.stderr)
        wanted = {name: n for name, n in wanted.items() if name not in _OF_CALLS}
    if "replies" in wanted and find_spec("flwr") is None:
        print("no Flower: hostile replies are left out", file=sys.stderr)
        del wanted["replies"]
    with progress() as display, _folder(arguments.work) as folder:
        order = check_order(folder.resolve(), arguments.seed)
        found = {
            name: run_part(name, count, arguments.seed, folder, display)
            for name, count in wanted.items()
        }
    violations = [
        f"{NAMES[name]}: {text}" for name, part in found.items() for text in part[1]
    ]
    result = {
        "violations": len(violations),
        "order": order,
        **{name: dict(counts) for name, (counts, _) in found.items()},
        "examples": violations[:SHOWN],
        "machine": machine(),
    }
    write_result(
        result,
        only_json=arguments.json,
        title="Faults",
        columns=("fault", "number", "violations"),
        rows=[
            *(
                (NAMES[name], f"{counts['faults']:,}", str(len(problems)))
                for name, (counts, problems) in found.items()
            ),
            ("order of system calls", order, ""),
        ],
    )
    sys.exit(1 if violations or order not in ("ok", "no strace") else 0)


def run_part(
    name: str, count: int, seed: int, folder: Path, display: Progress
) -> tuple[Counter[str], list[str]]:
    """Return counts and problems of a part, batch by batch.

    A batch that an earlier run kept is not done again.
    """
    record = folder / "faults.jsonl"
    kept = {}
    if record.exists():
        for line in record.read_text().splitlines():
            # A line that was cut short by a kill is done again.
            with contextlib.suppress(ValueError):
                one = json.loads(line)
                kept[(one["part"], one["batch"], one["faults"], one["seed"])] = one
    counts: Counter[str] = Counter()
    problems: list[str] = []
    for batch, size in enumerate(batches(count)):
        key = (name, batch, size, seed)
        if key not in kept:
            found = PARTS[name](folder, size, seed + 1_000 * batch, display)
            one = {"part": name, "batch": batch, "faults": size, "seed": seed}
            one |= {"counts": dict(found.counts), "problems": found.problems}
            with record.open("a") as file:
                file.write(json.dumps(one) + "\n")
            kept[key] = one
        counts.update(kept[key]["counts"])
        problems += kept[key]["problems"]
    return counts, problems


def batches(count: int) -> Iterator[int]:
    """Yield sizes of batches; a fault at every call is one batch.

    >>> list(batches(250))
    [100, 100, 50]
    """
    while count > 0:
        size = count if count == EVERY else min(count, BATCH)
        yield size
        count -= size


@contextlib.contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    """Give the folder of an earlier run, or one that is removed at the end."""
    if given is None:
        with work_folder(None) as folder:
            yield folder
    else:
        given.mkdir(parents=True, exist_ok=True)
        yield given


def parse_arguments() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a minute: a few of each")
    size.add_argument("--full", action="store_true", help="10,000 kills and flips")
    parser.add_argument(
        "--only",
        action="append",
        choices=list(PARTS),
        help="a part; may be repeated",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of everything")
    parser.add_argument("--work", type=Path, help="keep results here, and go on")
    return parser.parse_args()


if __name__ == "__main__":
    main()
