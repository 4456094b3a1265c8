"""The table of README.md in docs/results: the paper's main tables in one.

It stands between two marks, and `python -m paper.pages` writes it anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fastfedul.errors import InvalidInputError
from fastfedul.files import write_whole
from fastfedul.methods.registry import find_method
from fastfedul.report.wording import NOTHING
from paper.cells import BEFORE, RETRAINED, CellStore
from paper.experiments import ATTACKS, lines_of
from paper.summary import Summary, summarize

BEGIN, END = "<!-- python -m paper.pages -->\n", "<!-- end -->"
NAMES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "oct": "scans"}
_NUM_SEEDS = 3


def write_short(store: CellStore, readme: Path) -> Iterator[Path]:
    """Replace the table between the marks of a page; yield the page if it is there."""
    if not readme.is_file():
        return
    text = readme.read_text("utf-8")
    if BEGIN not in text or END not in text:
        raise InvalidInputError(f"{readme} lacks the line {BEGIN!r} or {END!r}")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    write_whole(readme, f"{before}{BEGIN}\n{short_table(store)}\n\n{END}{after}")
    yield readme


def short_table(store: CellStore) -> str:
    """Return a line for each method of the main tables: main / backdoor in percent."""
    found: dict[str, dict[tuple[str, str], Summary]] = {}
    for attack in ATTACKS:
        for line in summarize(lines_of(attack, "standard", _NUM_SEEDS), store):
            found.setdefault(line.label, {})[line.data, attack] = line
    columns = [(data, attack) for data in NAMES for attack in ATTACKS]
    heads = [f"{NAMES[data]} {attack}" for data, attack in columns]
    rows = [
        ["method", "settings", *heads, "asks"],
        ["---", "---", *["---:"] * len(columns), "---"],
    ]
    for label, lines in found.items():
        shown = [_shown(lines.get(column)) for column in columns]
        method = next(iter(lines.values())).method
        rows.append([label, _settings(lines), *shown, _asks(method)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _shown(line: Summary | None) -> str:
    if line is None or line.main is None or line.backdoor is None:
        return NOTHING
    shares = f"{100 * line.main.value:.2f} / {100 * line.backdoor.value:.2f}"
    done, wanted = line.num_measured, line.seeds_wanted
    return shares if done == wanted else f"{shares} ({done} of {wanted})"


def _settings(lines: dict[tuple[str, str], Summary]) -> str:
    """Return a method's settings, then for a data set those that differ."""
    by_data = {data: line.settings for (data, _), line in lines.items()}
    first = next(iter(by_data.values()))
    usual = first.split(", ")
    said = [first or NOTHING]
    for data, settings in list(by_data.items())[1:]:
        own = [word for word in settings.split(", ") if word not in usual]
        if own:
            said.append(f"{NAMES[data]}: {', '.join(own)}")
    return "; ".join(said)


def _asks(name: str) -> str:
    """Return whose help a method needs, in words."""
    if name == BEFORE:
        return NOTHING
    needs = find_method("retrain" if name == RETRAINED else name).needs
    return needs.helpers or "nobody"
