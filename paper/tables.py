"""Summaries as a CSV file and as a page of Markdown."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Mapping, Sequence

from fastfedul.report.wording import tidy
from paper.columns import Group, columns_of, line_of
from paper.criteria import ABOUT, criteria_table
from paper.settings import Scale
from paper.summary import MEANS, WIDE_DEGREES, Summary, by_table

_ABOUT: Mapping[str, tuple[str, ...]] = {
    "edge-case": (
        "Edge-case backdoor",
        "Main accuracy and success of the edge-case backdoor, before and after every "
        "method forgot the attacker.",
    ),
    "pixel": (
        "Pixel backdoor",
        "Main accuracy and success of the pixel-pattern backdoor, before and after "
        "every method forgot the attacker.",
    ),
    "non-iid": (
        "Skewed data",
        "Main and backdoor accuracy as the clients' data differ more and more.",
        "Level 1 is an even split.",
    ),
    "ablation": (
        "Variants of Fast-FedUL",
        "The worth of each part of the paper's Fast-FedUL: fast-fedul-1, -2 and -3 "
        "leave one part out.",
    ),
    "damping": (
        "Damping",
        "Main and backdoor accuracy after the last unlearning iteration of the paper's "
        "Fast-FedUL, for each damping.",
        "The plots show all iterations.",
    ),
    "deviation": (
        "Distance from retraining",
        "Angles between the output units of the last layer and the same units of the "
        "retrained model, over all seeds.",
    ),
    "cost": (
        "Cost of forgetting",
        "Time, client calls, memory and history that forgetting takes.",
        "The column `history stored` counts the bytes that a server must keep to be "
        "able to forget anybody.",
    ),
    "criteria": (
        "The paper's criteria",
        "Which of the paper's five criteria each method fulfils.",
    ),
    "history": (
        "A history that stays small",
        "Main and backdoor accuracy against the bytes of history that the server "
        "keeps.",
        "The server keeps all or some of the updates of a round in several storage "
        "dtypes, and the steps in the same dtype.",
        "Or it keeps sums: a float32 sum per client, and a few pairs of updates in the "
        "dtype named.",
    ),
    "sampling": (
        "Keeping fewer updates",
        "Main and backdoor accuracy of the paper's Fast-FedUL when the server keeps "
        "only some of the updates of a round.",
    ),
}
_PLAIN = ("cost", "deviation")
_COMPARED = ("edge-case", "pixel", "ablation")
_RETINA = (
    "The retinal subset stands in for OCTMNIST, the data set of the paper.",
    "Its images are others, so the paper's figures are there for orientation only.",
)
_CDP = (
    "`cdp` (class-discriminative pruning) removes the attack's label as a class, not "
    "a client.",
)
_WIDTH = 118
"""The longest line outside tables, in characters."""


def to_csv(summaries: Sequence[Summary]) -> str:
    """Return a line per summary; shares from 0 to 1, empty where unknown."""
    text = io.StringIO()
    rows = [_record(summary) for summary in summaries]
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def to_markdown(
    name: str,
    scale: Scale,
    summaries: Sequence[Summary],
    pictures: Sequence[str] = (),
) -> str:
    """Return a page with a table per attack, data set and split.

    Args:
        name: The paper's table or figure.
        scale: How large the runs were.
        summaries: The lines, in their order.
        pictures: Files beside the page to be shown in it.
    """
    title, *about = _ABOUT[name]
    parts = [f"# {title}", prose(_introduction(about, name, scale, summaries))]
    if name == "criteria":
        parts += [prose(ABOUT), criteria_table(summaries)]
    for lines in by_table(summaries).values():
        parts += _section(name, lines)
    for file in pictures:
        words = file.removesuffix(".svg").replace("-", " ")
        parts.append(f"![{words}]({file})")
    return "\n\n".join(parts) + "\n"


def prose(sentences: Sequence[str]) -> str:
    """Return a paragraph of Markdown with a line for each sentence, none too long."""
    return "\n".join(line for text in sentences for line in _wrapped(text))


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _introduction(
    about: Sequence[str], name: str, scale: Scale, summaries: Sequence[Summary]
) -> list[str]:
    num_seeds = max((line.seeds_wanted for line in summaries), default=1)
    command = f"python -m paper {name} --scale {scale} --seeds {num_seeds} --out DIR"
    said = [*about, f"`{command}` writes this page."]
    said += _means(num_seeds) if name in _PLAIN else _intervals(num_seeds)
    if scale == "smoke":
        said.append("Runs of this scale are small, and the paper has none like them.")
    if name in _COMPARED and any(line.paper for line in summaries):
        said.append("A difference is ours minus the paper's, in points of a hundred.")
    if any(not line.seeds_done for line in summaries):
        said.append("Some lines have no results yet and say so.")
    return said


def _means(num_seeds: int) -> list[str]:
    if num_seeds == 1:
        return ["There is one seed."]
    return [f"Figures are means over {num_seeds} seeds, without intervals."]


def _intervals(num_seeds: int) -> list[str]:
    if num_seeds == 1:
        return ["There is one seed, so there are no intervals."]
    return [
        f"A figure is the mean over {num_seeds} seeds with its 95 % interval "
        "(Student's t, cut at 0 and 100 %).",
        "A single seed has no interval.",
        "Counts are sums over all seeds.",
    ]


def _section(name: str, group: Group) -> list[str]:
    columns = columns_of(name, group)
    first = group[0]
    split = "" if first.partition == "iid" else f", {first.partition}"
    if name == "non-iid":
        split = f", level {first.parameter:g}"
    rows = [line_of(columns, line, group) for line in group]
    table = [
        _row([column.head for column in columns]),
        "|---" + "|---:" * (len(columns) - 1) + "|",
        *map(_row, rows),
    ]
    heading = f"## {first.attack}: {first.data_name}{split}"
    return [heading, "\n".join(table), *_notes(group)]


def _row(cells: Sequence[str]) -> str:
    shown = (tidy(" ".join(cell.split())).replace("|", "\\|") for cell in cells)
    return "| " + " | ".join(shown) + " |"


def _notes(group: Group) -> list[str]:
    notes = []
    if any(line.method == "cdp" for line in group):
        notes.append(prose(_CDP))
    if any(line.source == "oct-retina-subset" for line in group):
        notes.append(prose(_RETINA))
    partly = [line for line in group if line.num_refused and line.num_measured]
    said = [
        f"{line.label} refused {line.num_refused} of {line.seeds_wanted} seeds: "
        f"{line.refused}"
        for line in partly
    ]
    said += [f"{line.label}: {text}" for line in group for text in line.warnings]
    points = [f"- {tidy(' '.join(text.split()))}" for text in said]
    if points:
        notes.append("\n".join("\n".join(_wrapped(text, "  ")) for text in points))
    return notes


CSV_COLUMNS = (
    *("data", "paper_data", "attack", "partition", "label", "method", "parameter"),
    *("kind", "seeds_done", "seeds_wanted", "seeds_refused"),
    *("main", "main_low", "main_high", "main_count", "main_total"),
    *("backdoor", "backdoor_low", "backdoor_high", "backdoor_count", "backdoor_total"),
    *("paper_main", "paper_backdoor", "main_difference", "backdoor_difference"),
    *MEANS,
    *("mean_unit_angle", "max_unit_angle", f"share_above_{WIDE_DEGREES:g}_degrees"),
    *("num_units", "warnings", "refused"),
)
"""The columns of every CSV file, in their order; differences are in points."""


def _record(line: Summary) -> dict[str, object]:
    main, backdoor = line.paper or (None, None)
    return {
        "data": line.data_name,
        "paper_data": line.data if line.paper else None,
        "attack": line.attack,
        "partition": line.partition,
        "label": line.label,
        "method": line.method,
        "parameter": line.parameter,
        "kind": line.kind,
        "seeds_done": line.seeds_done,
        "seeds_wanted": line.seeds_wanted,
        "seeds_refused": line.num_refused,
        **_shares("main", line),
        **_shares("backdoor", line),
        "paper_main": main,
        "paper_backdoor": backdoor,
        "main_difference": line.main_difference,
        "backdoor_difference": line.backdoor_difference,
        **{name: getattr(line, name) for name in MEANS},
        "mean_unit_angle": line.mean_unit_angle,
        "max_unit_angle": line.max_unit_angle,
        f"share_above_{WIDE_DEGREES:g}_degrees": line.wide_share,
        "num_units": len(line.unit_angles),
        "warnings": "; ".join(line.warnings),
        "refused": line.refused,
    }


def _shares(name: str, line: Summary) -> dict[str, object]:
    mean = line.main if name == "main" else line.backdoor
    pooled = line.main_pooled if name == "main" else line.backdoor_pooled
    low, high = (mean.interval if mean else None) or (None, None)
    return {
        name: mean.value if mean else None,
        f"{name}_low": low,
        f"{name}_high": high,
        f"{name}_count": pooled.successes if pooled else None,
        f"{name}_total": pooled.total if pooled else None,
    }
