"""CSV that reads back, and tables that say what is missing."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable

import pytest

from paper.cells import CellStore
from paper.experiments import EXPERIMENTS, NO_SKEW, Line, lines_of
from paper.settings import SCALES, Scale
from paper.summary import summarize
from paper.tables import CSV_COLUMNS, to_csv, to_markdown

Build = Callable[..., Line]
Fill = Callable[..., CellStore]
WHOLE = {
    "main": 0.9747,
    "backdoor": 0.0118,
    "backdoor_count": 11,
    "backdoor_total": 935,
    "seconds": 2.0,
    "client_calls": 1234,
    "unit_angles": [8.0, 24.0],
}


def page(name: str, *lines: Line, store: CellStore) -> str:
    return to_markdown(name, "standard", summarize(lines, store))


def row(text: str, label: str) -> list[str]:
    """Return the cells of the line that begins with a label."""
    found = [line for line in text.splitlines() if line.startswith(f"| {label} |")]
    assert len(found) == 1
    return [cell.strip() for cell in found[0].strip("|").split(" | ")]


def test_csv_reads_back(line_with: Build, store: CellStore) -> None:
    lines = [
        line_with(WHOLE, {**WHOLE, "warnings": ['says "a, b"\nand c']}),
        line_with({"refused": "a, b"}, label="kd"),
    ]
    text = to_csv(summarize(lines, store))
    reader = csv.DictReader(io.StringIO(text))
    first, second = list(reader)
    assert tuple(reader.fieldnames or ()) == CSV_COLUMNS
    assert first["data"] == "mnist"
    assert float(first["main"]) == pytest.approx(0.9747)
    assert float(first["main_low"]) == pytest.approx(0.9747)
    assert (first["backdoor_count"], first["backdoor_total"]) == ("22", "1870")
    assert float(first["main_difference"]) == pytest.approx(-1.0)
    assert first["warnings"] == 'says "a, b"\nand c'
    assert first["peak_bytes"] == ""
    assert (second["refused"], second["main"], second["label"]) == ("a, b", "", "kd")
    assert (second["seeds_done"], second["seeds_refused"]) == ("1", "1")


def test_a_line_has_its_mean_interval_counts_and_the_papers_figures(
    line_with: Build, store: CellStore
) -> None:
    line = line_with({**WHOLE, "main": 0.97}, {**WHOLE, "main": 0.98})
    text = page("pixel", line, store=store)
    # t(1) = 12.706 times 0.005 is 6.35 points; cut at 100 %
    assert row(text, "fast-fedul-paper") == [
        "fast-fedul-paper",
        "damping 0.07, keeps all",
        "2",
        "97.50 % [91.15 to 100.00]",
        "1.18 % [1.18 to 1.18] (22 of 1,870)",
        "98.47 %",
        "0.18 %",
        "-0.97",
        "+1.00",
    ]
    assert "python -m paper pixel --scale standard --seeds 2 --out DIR" in text


def test_one_seed_has_no_interval_and_the_text_says_so(
    line_with: Build, store: CellStore
) -> None:
    text = page("pixel", line_with(WHOLE), store=store)
    assert "one seed, so there are no intervals" in text
    assert row(text, "fast-fedul-paper")[3] == "97.47 %"
    assert " to " not in row(text, "fast-fedul-paper")[4]


def test_missing_seeds_are_counted(line_with: Build, store: CellStore) -> None:
    text = page("pixel", line_with(WHOLE, None, WHOLE), store=store)
    assert row(text, "fast-fedul-paper")[2] == "2 of 3 seeds"
    lines = line_with(WHOLE), line_with(None, label="kd")
    text = page("pixel", *lines, store=store)
    assert row(text, "kd")[2:4] == ["0 of 1 seeds", "not run yet"]


def test_a_refusal_stands_in_words_beside_the_papers_figures(
    line_with: Build, store: CellStore
) -> None:
    line = line_with({"refused": "needs images | on\nthe server"}, label="kd")
    text = page("pixel", line, store=store)
    cells = row(text, "kd")
    assert cells[3] == "refused: needs images \\| on the server"
    assert cells[5:7] == ["98.76 %", "7.80 %"]
    text = page("cost", line, store=store)
    assert row(text, "kd")[3].startswith("refused")


def test_a_refusal_of_some_seeds_is_a_note(line_with: Build, store: CellStore) -> None:
    line = line_with(WHOLE, {"refused": "no images"}, label="kd")
    text = page("pixel", line, store=store)
    assert row(text, "kd")[2] == "1 of 2 seeds"
    assert "- kd refused 1 of 2 seeds: no images" in text


def test_the_papers_columns_are_there_only_with_figures_of_the_paper(
    line_with: Build, store: CellStore
) -> None:
    text = page("pixel", line_with(WHOLE, data="digits"), store=store)
    assert "paper main" not in text


def test_cdp_is_said_to_remove_a_class(line_with: Build, store: CellStore) -> None:
    said = "removes the attack's label as a class, not a client"
    assert said in page("pixel", line_with(WHOLE, label="cdp"), store=store)
    assert said not in page("pixel", line_with(WHOLE), store=store)


def test_retinal_scans_are_never_called_octmnist(
    line_with: Build, store: CellStore
) -> None:
    line = line_with(WHOLE, data="oct", source="oct-retina-subset")
    text = page("pixel", line, store=store)
    assert "## pixel: retinal subset (paper: OCTMNIST)" in text
    assert "stands in for OCTMNIST" in text
    assert "retinal subset" in to_csv(summarize([line], store))


def test_costs_are_compared_with_fast_fedul(line_with: Build, store: CellStore) -> None:
    lines = [
        line_with({**WHOLE, "seconds": 300.0, "stored_bytes": 2048}, label="pga"),
        line_with(WHOLE),
    ]
    text = page("cost", *lines, store=store)
    stored = ["2.0 KiB", "0 B", "0 B"]
    expected = ["5 min 0 s", "150 ×", "110 ×", "1,234", "–", *stored, "–"]
    assert row(text, "pga")[3:] == expected
    assert row(text, "fast-fedul-paper")[4:6] == ["1 ×", "1 ×"]
    text = page("cost", lines[0], store=store)
    assert row(text, "pga")[4] == "–"


def test_angles_are_compared_with_all_kept(line_with: Build, store: CellStore) -> None:
    lines = [
        line_with(WHOLE, label="fast-fedul-paper, all kept", method="fast-fedul-paper"),
        line_with({"unit_angles": [40.0, 24.0]}, label=NO_SKEW.label, method="kd"),
    ]
    text = page("deviation", *lines, store=store)
    first, second = row(text, "fast-fedul-paper, all kept"), row(text, NO_SKEW.label)
    assert first[3:] == ["16.0°", "24.0°", "50.00 %", "1 ×", "mean below 10°"]
    assert second[3:] == ["32.0°", "40.0°", "100.00 %", "2 ×", "2.6 ×"]


def test_sampling_goes_by_policy_and_budget(line_with: Build, store: CellStore) -> None:
    line = line_with(WHOLE, label="optimal:5", method="fast-fedul-paper", parameter=5)
    assert row(page("sampling", line, store=store), "optimal")[1] == "5"


def test_damping_shows_the_last_iteration(line_with: Build, store: CellStore) -> None:
    course = {"main": [0.9, 0.8], "backdoor": [0.5, 0.25]}
    line = line_with(course, label="0.07", method="fast-fedul-paper", parameter=0.07)
    assert row(page("damping", line, store=store), "0.07")[3:] == ["80.00 %", "25.00 %"]


def test_warnings_stand_below_the_table(line_with: Build, store: CellStore) -> None:
    text = page("pixel", line_with({**WHOLE, "warnings": ["beware"]}), store=store)
    assert "\n- fast-fedul-paper: beware" in text


def test_the_bound_stands_beside_the_distance(
    line_with: Build, store: CellStore
) -> None:
    found = {**WHOLE, "distance": 2.0, "bound": 3e7, "lipschitz": 1.25}
    text = page("bound", line_with(found), store=store)
    expected = ["97.47 %", "2", "3e+07", "15,000,000 ×", "1.25"]
    assert row(text, "fast-fedul-paper")[3:] == expected
    text = page("bound", line_with({**found, "bound": None}), store=store)
    assert row(text, "fast-fedul-paper")[5:7] == ["–", "–"]


def test_all_sevens_are_a_column_where_they_were_scored(
    line_with: Build, store: CellStore
) -> None:
    scored = {**WHOLE, "sevens": 0.25, "sevens_count": 70, "sevens_total": 280}
    lines = [line_with(scored), line_with(WHOLE, label="kd")]
    text = page("edge-case", *lines, store=store)
    assert row(text, "fast-fedul-paper")[5] == "25.00 % (70 of 280)"
    assert row(text, "kd")[5] == "–"
    assert "nobody has" not in page("edge-case", lines[1], store=store)


def test_the_ratio_that_a_split_reached_is_told(
    line_with: Build, store: CellStore
) -> None:
    split = {"partition": "ratio:3", "parameter": 3.0}
    found = {**WHOLE, "class_ratio": 2.98, "concentration": 7.5}
    text = page("non-iid", line_with(found, **split), store=store)
    assert "## pixel: mnist, ratio:3" in text
    assert "a ratio of 2.98 with a concentration of 7.5" in text


@pytest.mark.parametrize(
    "scale",
    [s if s == "smoke" else pytest.param(s, marks=pytest.mark.slow) for s in SCALES],
)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_its_tables(name: str, scale: Scale, fill: Fill) -> None:
    lines = lines_of(name, scale, 2)
    store = fill(lines)
    summaries = summarize(lines, store)
    text = to_markdown(name, scale, summaries, ["a-plot.svg"])
    assert text == to_markdown(name, scale, summaries, ["a-plot.svg"])
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    # The page of the criteria begins with a table of its own: no line for `before`.
    own = len({line.label for line in lines}) if name == "criteria" else 0
    assert len(rows) == len(lines) + text.count("\n## ") + own
    assert "![a plot](a-plot.svg)" in text
    assert "None" not in text
    assert "nan" not in text
    assert to_csv(summaries).count("\n") == len(lines) + 1


def test_criteria_are_judged_on_the_seeds_of_retraining(
    line_with: Build, store: CellStore
) -> None:
    good = {"main": 0.97, "backdoor": 0.01}
    again = line_with(good, good, label="retrained")
    half = line_with(good, None, label="kd")
    text = page("criteria", again, half, store=store)
    assert "| kd | – / yes |" in text
    whole = line_with(good, good, label="kd")
    text = page("criteria", again, whole, store=store)
    assert "| kd | yes (0.0, 0.0) / yes |" in text
