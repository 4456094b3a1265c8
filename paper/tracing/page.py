"""The page of the board: counts with intervals, made from the lines alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fastfedul.evaluate.intervals import Proportion
from fastfedul.files import write_whole
from paper.board.store import Line, read_lines
from paper.tracing.runs import COUNTS, RARE, all_runs
from paper.tracing.scoring import ATTACK, MISTAKES, RIGHT, RIVALS

WORKS = 0.3
"""Share of backdoor images from which on an attack counts as working."""

Group = Callable[[Line], str]


def write_page(results: Path, out: Path) -> Path:
    """Write the page and return its path."""
    path = out / "tracing.md"
    write_whole(path, "\n".join(_page(read_lines(results))) + "\n")
    return path


def _page(lines: Sequence[Line]) -> Iterator[str]:
    yield "# Are attackers found, and are honest clients left alone?"
    yield ""
    yield "`python -m paper.tracing page` makes this page from `results/tracing.jsonl`."
    yield "[The protocol](tracing-protocol.md) was written before any run was scored."
    yield ""
    done = {line["run"]: line["data"] for line in lines}
    yield "## What was run"
    yield ""
    yield "| data | runs in the list | runs done |"
    yield "|---|---:|---:|"
    for data, count in COUNTS.items():
        yield f"| {data} | {count} | {sum(own == data for own in done.values())} |"
    yield ""
    if len(done) < len(all_runs()):
        yield "`python -m paper.tracing run` does the missing runs."
        yield ""
    attack = [
        line
        for line in lines
        if line.get("case") == ATTACK and line["attack_works"] >= WORKS
    ]
    working = len({line["run"] for line in attack})
    attacked = len({line["run"] for line in lines if line["attackers"]})
    yield "## Is an attacker first, and is the group found?"
    yield ""
    yield f"Of {attacked} runs with an attack, the attack works in {working}:"
    yield f"at least {WORKS:.0%} of its images get the attackers' answer."
    yield "The tables count draws of these runs."
    yield ""
    yield from _table(attack, "inputs", lambda line: str(line["inputs"]))
    for name, group in (
        ("attackers", lambda line: str(line["attackers"])),
        ("attack", lambda line: str(line["attack"])),
        ("clients", lambda line: str(line["clients"])),
        ("split", lambda line: str(line["split"])),
        ("kept", lambda line: str(line["keep"])),
        ("attackers' behaviour", lambda line: str(line["behaviour"])),
    ):
        yield from _table(attack, name, group)
    yield "## Is an attacker first by other scores?"
    yield ""
    yield "| score | draws with an attacker first |"
    yield "|---|---|"
    top = Proportion(_sum(attack, "top1"), _sum(attack, "draws"))
    yield f"| trace | {_shown(top)} |"
    for rival in RIVALS:
        told = [line[rival] for line in attack]
        found = Proportion(sum(own[0] for own in told), sum(own[1] for own in told))
        yield f"| {rival} | {_shown(found)} |"
    yield ""
    yield "## Is an honest client accused?"
    yield ""
    yield "| inputs | draws | draws that accuse an honest client |"
    yield "|---|---:|---|"
    for name, own in (
        ("ordinary mistakes", [li for li in lines if li.get("case") == MISTAKES]),
        ("right answers", [li for li in lines if li.get("case") == RIGHT]),
        (
            "of these, answers of a class that one honest client alone has",
            [li for li in lines if li.get("case") == RIGHT and li["attack"] == RARE],
        ),
        ("unwanted answers of attacks that work", attack),
    ):
        wrong = Proportion(_sum(own, "false"), _sum(own, "draws"))
        yield f"| {name} | {wrong.total} | {_shown(wrong)} |"


def _table(lines: Sequence[Line], name: str, group: Group) -> Iterator[str]:
    yield f"| {name} | draws | attacker first | all attackers first | group accused |"
    yield "|---|---:|---|---|---|"
    for value in sorted({group(line) for line in lines}, key=lambda v: (len(v), v)):
        own = [line for line in lines if group(line) == value]
        cells = [
            _shown(Proportion(_sum(own, key), _sum(own, "draws")))
            for key in ("top1", "topk", "group")
        ]
        yield f"| {value} | {_sum(own, 'draws')} | {' | '.join(cells)} |"
    yield ""


def _sum(lines: Sequence[Line], key: str) -> int:
    return sum(line.get(key, 0) for line in lines)


def _shown(found: Proportion) -> str:
    if found.value is None or found.interval is None:
        return "-"
    low, high = found.interval
    return (
        f"{found.value:.1%} ({found.successes} of {found.total}; {low:.1%} to "
        f"{high:.1%})"
    )
