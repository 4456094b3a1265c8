"""The page of the board: counts with intervals, made from the lines alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fastfedul.evaluate.intervals import Proportion
from fastfedul.files import write_whole
from paper.board.store import Line, read_lines
from paper.tracing.runs import COUNTS, RARE, all_runs
from paper.tracing.scoring import ATTACK, MISTAKES, RIGHT, RIVALS, UNDONE
from paper.tracing.worth import worth_section

PAGE = "tracing.md"
TRACES, WORTH = "tracing.jsonl", "contributions.jsonl"

WORKS = 0.3
"""Share of backdoor images from which on an attack counts as working."""

LEARNED = 0.5
"""Accuracy below which a model has learned too little for an attack to count."""

_COUNTS = ("top1", "topk", "group", "undone")
_GROUPS = {
    "inputs": "inputs",
    "attackers": "attackers",
    "attack": "attack",
    "clients": "clients",
    "split": "split",
    "kept updates": "keep",
    "behaviour of attackers": "behaviour",
}
"""Choices by which a table groups the draws: shown name, and field of a line."""


def write_page(results: Path, out: Path) -> Iterator[Path]:
    """Write the page; yield its path.

    Args:
        results: Folder of the results.
        out: Folder of the page.
    """
    path = out / PAGE
    lines = read_lines(results / TRACES)
    text = "\n".join(page_lines(lines, read_lines(results / WORTH)))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.rstrip("\n") + "\n")
    yield path


def page_lines(lines: Sequence[Line], worths: Sequence[Line]) -> Iterator[str]:
    """Yield the lines of the page.

    Args:
        lines: Results of the board.
        worths: Results of contributions beside retraining.
    """
    yield "# Are attackers found, and are honest clients left alone?"
    yield ""
    yield "`python -m paper.tracing page` makes this page."
    yield "It reads `results/tracing.jsonl` and `results/contributions.jsonl`."
    yield "[The protocol](tracing-protocol.md) is older than these scores."
    yield ""
    yield from _runs_done(lines)
    attack = [
        line
        for line in lines
        if line.get("case") == ATTACK
        and line["attack_works"] >= WORKS
        and line["accuracy"] >= LEARNED
    ]
    quiet = [line for line in lines if line.get("case") in (MISTAKES, RIGHT)]
    yield from _aims(attack, quiet)
    working = len({line["run"] for line in attack})
    attacked = len({line["run"] for line in lines if line["attackers"]})
    yield "## Is an attacker first, and is the group found?"
    yield ""
    yield f"The attack works in {working} of {attacked} runs with an attack."
    yield (
        f"It works if at least {WORKS:.0%} of its images get the attackers' answer, "
        f"and the model's accuracy is at least {LEARNED:.0%}."
    )
    yield "The tables count draws of these runs."
    yield (
        "An attack is undone if forgetting the accused leaves less than "
        f"{UNDONE:.0%} of its images with the attackers' answer."
    )
    yield ""
    for name, field in _GROUPS.items():
        yield from _table(attack, name, field)
    yield from _rivals(attack)
    yield from _accusations(lines, attack)
    yield from _losses(attack, quiet)
    yield from worth_section(worths)


def _runs_done(lines: Sequence[Line]) -> Iterator[str]:
    yield "## Which runs were done?"
    yield ""
    yield "| data | clients | runs in the list | runs done |"
    yield "|---|---:|---:|---:|"
    done = {line["run"] for line in lines}
    runs = all_runs()
    for data in COUNTS:
        for clients in sorted({run.clients for run in runs}):
            own = [r.key for r in runs if (r.data, r.clients) == (data, clients)]
            yield f"| {data} | {clients} | {len(own)} | {len(done & {*own})} |"
    yield ""
    left = len(runs) - len(done)
    if left:
        yield f"The other {left} runs have not been done."
        yield "These commands do them and write this page anew."
        yield "If somebody stops the first command, the same command goes on."
        yield "The command names each run that fails."
        yield ""
        yield "```bash"
        yield "OMP_NUM_THREADS=1 python -m paper.tracing run"
        yield "python -m paper.pages"
        yield "```"
        yield ""


def _aims(attack: Sequence[Line], quiet: Sequence[Line]) -> Iterator[str]:
    yield "## Are the aims reached?"
    yield ""
    yield "An aim is reached, or missed, if the whole interval reaches, or misses, it."
    yield "Otherwise more draws must settle it."
    yield ""
    yield "| aim | wanted | measured | reached |"
    yield "|---|---|---|---|"
    one = [own for own in attack if own["inputs"] == 1 and own["attackers"] == 1]
    four = [own for own in attack if own["inputs"] == 10 and own["attackers"] == 4]
    for aim, wanted, found, least in (
        ("attacker first: one input, one attacker", 0.99, _share(one, "top1"), True),
        (
            "group accused: ten inputs, four attackers",
            0.95,
            _share(four, "group"),
            True,
        ),
        ("honest client accused without cause", 0.005, _share(quiet, "false"), False),
    ):
        verdict = _verdict(found, wanted, least=least)
        bound = "at least" if least else "at most"
        yield f"| {aim} | {bound} {100 * wanted:g} % | {_shown(found)} | {verdict} |"
    yield ""


def _verdict(found: Proportion, wanted: float, *, least: bool) -> str:
    """Return whether a share is surely on the wanted side of an aim."""
    if found.interval is None:
        return "not known"
    low, high = found.interval
    if not least:
        low, high, wanted = -high, -low, -wanted
    if low >= wanted:
        return "yes"
    return "no" if high < wanted else "not settled"


def _rivals(attack: Sequence[Line]) -> Iterator[str]:
    yield "## Is an attacker first by other scores?"
    yield ""
    yield "A ledger of sums has no trajectory score, so that row has fewer draws."
    yield ""
    yield "| score | all draws | draws with one input |"
    yield "|---|---|---|"
    single = [line for line in attack if line["inputs"] == 1]
    told = [_shown(_share(own, "top1")) for own in (attack, single)]
    yield f"| trace | {' | '.join(told)} |"
    for rival in RIVALS:
        told = [_shown(_rival(own, rival)) for own in (attack, single)]
        yield f"| {rival} | {' | '.join(told)} |"
    yield ""
    better = [rival for rival in RIVALS if _beats(attack, rival)]
    if better:
        yield (
            "On the same draws, these scores put an attacker first more often than "
            f"`fastfedul trace`: {', '.join(better)}."
        )
        yield ""


def _rival(lines: Sequence[Line], rival: str) -> Proportion:
    counts = [line[rival] for line in lines]
    return Proportion(sum(own[0] for own in counts), sum(own[1] for own in counts))


def _beats(lines: Sequence[Line], rival: str) -> bool:
    """Return whether a rival puts an attacker first more often on the same draws."""
    own = [line for line in lines if line[rival][1] == line["draws"]]
    return _rival(own, rival).successes > _sum(own, "top1")


def _accusations(lines: Sequence[Line], attack: Sequence[Line]) -> Iterator[str]:
    yield "## Is an honest client accused?"
    yield ""
    yield "| inputs | draws | draws that accuse an honest client |"
    yield "|---|---:|---|"
    right = [line for line in lines if line.get("case") == RIGHT]
    for name, own in (
        ("ordinary mistakes", [li for li in lines if li.get("case") == MISTAKES]),
        ("right answers", right),
        (
            "of these, answers of a class that one honest client alone has",
            [line for line in right if line["attack"] == RARE],
        ),
        ("unwanted answers of attacks that work", attack),
    ):
        wrong = _share(own, "false")
        yield f"| {name} | {wrong.total} | {_shown(wrong)} |"
    yield ""


def _losses(attack: Sequence[Line], quiet: Sequence[Line]) -> Iterator[str]:
    yield "## Where does tracing lose?"
    yield ""
    yield "The table has every run and number of inputs with at least one loss."
    yield "A loss: an honest client first, a group missed, or an honest client accused."
    yield ""
    yield (
        "| run | attack | clients | attackers | split | kept | behaviour | asked "
        "| draws | honest first | group missed | honest accused |"
    )
    yield "|---|---|---:|---:|---|---|---|---|---:|---:|---:|---:|"
    for line in [*attack, *quiet]:
        draws, wrong = line["draws"], line["false"]
        missed = ["", ""]
        if line["case"] == ATTACK:
            missed = [str(draws - line["top1"]), str(draws - line["group"])]
        if not wrong and all(cell in ("", "0") for cell in missed):
            continue
        facts = ("run", "attack", "clients", "attackers", "split", "keep", "behaviour")
        cells = [*(str(line[name]) for name in facts), line["method"], str(draws)]
        yield f"| {' | '.join([*cells, *missed, str(wrong)])} |"
    yield ""


def _table(lines: Sequence[Line], name: str, field: str) -> Iterator[str]:
    if not lines:
        return
    yield (
        f"| {name} | draws | attacker first | all attackers first | group accused "
        "| attack undone |"
    )
    yield "|---|---:|---|---|---|---|"
    for value in sorted({line[field] for line in lines}):
        own = [line for line in lines if line[field] == value]
        cells = [_shown(_share(own, key)) for key in _COUNTS]
        yield f"| {value} | {_sum(own, 'draws')} | {' | '.join(cells)} |"
    yield ""


def _sum(lines: Sequence[Line], key: str) -> int:
    return sum(line[key] for line in lines)


def _share(lines: Sequence[Line], key: str) -> Proportion:
    """Return the share of draws of some lines that count under a key."""
    return Proportion(_sum(lines, key), _sum(lines, "draws"))


def _shown(found: Proportion) -> str:
    if found.value is None or found.interval is None:
        return "-"
    low, high = found.interval
    return (
        f"{found.value:.1%} ({found.successes} of {found.total}; {low:.1%} to "
        f"{high:.1%})"
    )
