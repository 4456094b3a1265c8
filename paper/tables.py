"""Summaries as a CSV file and as a page of Markdown."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Mapping, Sequence

from fastfedul.report.wording import tidy
from paper.columns import Group, columns_of, line_of
from paper.criteria import ABOUT, criteria_table
from paper.lemma import NUM_PAIRS
from paper.settings import Scale
from paper.storage import ABOUT as STORAGE
from paper.summary import MEANS, WIDE_DEGREES, Keeping, Summary, by_table

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
        "The ratio is how many times as frequent a client's most frequent class is as "
        "its least frequent class.",
        "With `ratio`, each class has a Dirichlet split, and we searched the "
        "concentration that gives the ratio on average over clients.",
        "With `level`, the classes of every client are graded by the ratio.",
    ),
    "ablation": (
        "Variants of Fast-FedUL",
        "The worth of each part of the paper's Fast-FedUL.",
        "fast-fedul-1 draws the kept updates at random, fast-fedul-2 has no skew, "
        "fast-fedul-3 has it in every other round.",
        "All four keep 5 updates of a round; the lines `all kept` keep every update.",
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
        *STORAGE,
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
    "sign": (
        "The sign of α",
        "The paper prints the factor (1 + α) for the difference of a round.",
        "With (1 − α) the difference fades.",
        "The authors' public code has the factor 1 − α·β and subtracts the leaver's "
        "updates alone; β is the share of the clients that stay.",
    ),
    "bound": (
        "Theorem 1",
        "The bound of Theorem 1 beside the true distance to the retrained model.",
        "K is estimated from the steps of the run, so it is too small if anything.",
        "The bound is no guarantee that anything was forgotten.",
    ),
    "lemma": (
        "Lemma 3",
        "The probability that optimal keeping of 5 updates keeps the attacker's "
        "update, and an honest client's.",
        "The lemma's condition is about features before the last layer: "
        "d·∇F(x) > (2/ξ)·F(x) for every feature F, with d the way from a clean example "
        "to its poisoned form and ξ the share of poison.",
        f"We tried it on the trained model for up to {NUM_PAIRS} test images.",
        "The lemma also asks for convex features, which a network with pooling and "
        "several layers does not promise.",
    ),
    "epochs": (
        "Local epochs",
        "Main and backdoor accuracy after 20 rounds with more and more local epochs.",
        "`fast-fedul-2` has no skew: the distance to `retrained` is what the others' "
        "reaction costs.",
    ),
    "sampling": (
        "Keeping fewer updates",
        "Main and backdoor accuracy of the paper's Fast-FedUL when the server keeps "
        "only some of the updates of a round.",
    ),
}
_PLAIN = ("cost", "deviation", "lemma")
_COMPARED = ("edge-case", "pixel", "ablation")
_RETINA = (
    "The retinal subset stands in for OCTMNIST, the data set of the paper.",
    "Its images are others, so the paper's figures are there for orientation only.",
)
_AGGREGATED = (
    "The lines `5 aggregated` belong to another run: there the server aggregated 5 "
    "updates of a round with weights 1/p, as in the paper's Algorithm 1.",
    "They have a retrained model of their own.",
)
_SEVENS = (
    "All sevens nobody has: the scored pictures, and the ARDIS sevens that the "
    "attacker did not draw.",
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
        said.append("Some lines have no results yet; the command computes them.")
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
    if name == "non-iid" and not split:
        split = ", even split"
    rows = [line_of(columns, line, group) for line in group]
    table = [
        _row([column.head for column in columns]),
        "|---" + "".join(_rule(column.head) for column in columns[1:]) + "|",
        *map(_row, rows),
    ]
    heading = f"## {first.attack}: {first.data_name}{split}"
    if not any(line.seeds_done for line in group):
        return [heading, "Not run yet."]
    return [heading, "\n".join(table), *_notes(group)]


def _rule(head: str) -> str:
    """Return the rule below a column's head: words left, numbers right."""
    return "|---" if head == "settings" else "|---:"


def _row(cells: Sequence[str]) -> str:
    shown = (tidy(" ".join(cell.split())).replace("|", "\\|") for cell in cells)
    return "| " + " | ".join(shown) + " |"


def _notes(group: Group) -> list[str]:
    notes = []
    if any(line.method == "cdp" for line in group):
        notes.append(prose(_CDP))
    if any(line.label.endswith("5 aggregated") for line in group):
        notes.append(prose(_AGGREGATED))
    if any(line.sevens for line in group):
        notes.append(prose(_SEVENS))
    notes += _ratio(group)
    if any(line.source == "oct-retina-subset" for line in group):
        notes.append(prose(_RETINA))
    partly = [line for line in group if line.num_refused and line.num_measured]
    said = [
        f"{line.label} refused {line.num_refused} of {line.seeds_wanted} seeds: "
        f"{line.refused}"
        for line in partly
    ]
    warned: dict[str, list[str]] = {}
    for line in group:
        for text in line.warnings:
            warned.setdefault(text, []).append(line.label)
    said += [f"{'; '.join(labels)}: {text}" for text, labels in warned.items()]
    points = [f"- {tidy(' '.join(text.split()))}" for text in said]
    if points:
        notes.append("\n".join("\n".join(_wrapped(text, "  ")) for text in points))
    return notes


def _ratio(group: Group) -> list[str]:
    """Return the ratio that a split reached, if it was searched."""
    found = [line for line in group if line.class_ratio and line.concentration]
    if not found:
        return []
    return [
        f"The splits reached a ratio of {found[0].class_ratio:.2f} with a "
        f"concentration of {found[0].concentration:.1f} (means over seeds)."
    ]


KEEPING = (
    *("attacker_kept", "honest_kept", "rounds_likelier", "rounds_largest"),
    *("rounds_counted", "condition_features", "condition_pairs"),
)
"""Columns of Lemma 3."""
CSV_COLUMNS = (
    *("data", "paper_data", "attack", "partition", "label", "method", "settings"),
    "parameter",
    *("kind", "seeds_done", "seeds_wanted", "seeds_refused"),
    *("main", "main_low", "main_high", "main_count", "main_total"),
    *("backdoor", "backdoor_low", "backdoor_high", "backdoor_count", "backdoor_total"),
    *("sevens", "sevens_low", "sevens_high", "sevens_count", "sevens_total"),
    *("paper_main", "paper_backdoor", "main_difference", "backdoor_difference"),
    *MEANS,
    *("published_bytes", "least_bytes", *KEEPING),
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
        "settings": line.settings,
        "parameter": line.parameter,
        "kind": line.kind,
        "seeds_done": line.seeds_done,
        "seeds_wanted": line.seeds_wanted,
        "seeds_refused": line.num_refused,
        **_shares("main", line),
        **_shares("backdoor", line),
        **_shares("sevens", line),
        "paper_main": main,
        "paper_backdoor": backdoor,
        "main_difference": line.main_difference,
        "backdoor_difference": line.backdoor_difference,
        **{name: getattr(line, name) for name in MEANS},
        "published_bytes": line.storage.published if line.storage else None,
        "least_bytes": line.storage.least if line.storage else None,
        **_keeping(line.keeping),
        "mean_unit_angle": line.mean_unit_angle,
        "max_unit_angle": line.max_unit_angle,
        f"share_above_{WIDE_DEGREES:g}_degrees": line.wide_share,
        "num_units": len(line.unit_angles),
        "warnings": "; ".join(line.warnings),
        "refused": line.refused,
    }


def _keeping(found: Keeping | None) -> dict[str, object]:
    if found is None:
        return dict.fromkeys(KEEPING)
    condition = (found.features.value, found.pairs.value)
    counts = (found.more_likely, found.largest, found.num_rounds)
    values = (found.attacker, found.honest, *counts, *condition)
    return dict(zip(KEEPING, values, strict=True))


def _shares(name: str, line: Summary) -> dict[str, object]:
    mean, pooled = getattr(line, name), getattr(line, f"{name}_pooled")
    low, high = (mean.interval if mean else None) or (None, None)
    return {
        name: mean.value if mean else None,
        f"{name}_low": low,
        f"{name}_high": high,
        f"{name}_count": pooled.successes if pooled else None,
        f"{name}_total": pooled.total if pooled else None,
    }
