"""Plots are valid, repeatable SVG that names what it shows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from fastfedul.errors import MissingPackageError
from paper.cells import CellStore
from paper.experiments import EXPERIMENTS, Line, lines_of
from paper.plots import DRAWN, plots_of
from paper.settings import SCALES, Scale
from paper.summary import summarize

pytest.importorskip("matplotlib", reason="needs the extra report")

Build = Callable[..., Line]
Fill = Callable[..., CellStore]
SVG = "{http://www.w3.org/2000/svg}"
EXPECTED = {
    "edge-case": {"main accuracy", "backdoor accuracy", "federaser", "cdp"},
    "pixel": {"main accuracy", "backdoor accuracy", "fast-fedul-paper, all kept"},
    "non-iid": {"ratio of classes (1: even split)", "retrained", "fedrecover", "4"},
    "ablation": {"fast-fedul-1", "fast-fedul-2", "fast-fedul-3"},
    "damping": {"unlearning iteration", "damping 0.01", "damping 0.07"},
    "deviation": {"output units"},
    "cost": {"time to forget", "history stored", "history read", "peak memory"},
    "history": {"history kept (MB)", "fast-fedul-paper, int8", "fast-fedul, sums"},
    "sign": {"fast-fedul-2, all kept", "(1 + α), α 0.05", "authors' code, α 0.1"},
    "epochs": {"local epochs a round", "fast-fedul-2, all kept", "20"},
    "sampling": {"updates kept a round (m)", "optimal", "uniform", "top", "retrained"},
}


def texts(svg: str) -> set[str]:
    found = ElementTree.fromstring(svg).iter(f"{SVG}text")
    return {"".join(element.itertext()).strip() for element in found}


@pytest.mark.parametrize("name", sorted(set(EXPERIMENTS) - set(DRAWN)))
def test_some_experiments_are_a_table_and_no_plot(name: str, fill: Fill) -> None:
    lines = lines_of(name, "smoke", 2)
    assert plots_of(name, summarize(lines, fill(lines))) == {}


def test_a_method_far_below_does_not_stretch_the_axis_of_the_others(
    line_with: Build, store: CellStore
) -> None:
    def at(ratio: int, label: str, main: float) -> Line:
        split = {"partition": f"ratio:{ratio}", "parameter": ratio}
        result = {"main": main, "backdoor": 0.1}
        return line_with(result, label=label, **split)

    good = [at(2, "retrained", 0.98), at(2, "kd", 0.96)]
    whole = plots_of("non-iid", summarize(good, store))["non-iid-pixel-mnist"]
    assert not any("down to" in text for text in texts(whole))
    lines = [*good, at(4, "fedaccum", 0.31)]
    svg = plots_of("non-iid", summarize(lines, store))["non-iid-pixel-mnist"]
    assert "fedaccum: down to 31 %" in texts(svg)
    assert {"92 %", "94 %", "96 %"} <= texts(svg), "the axis shows single points"


def test_the_worth_of_the_skew_is_drawn_against_retraining(
    line_with: Build, store: CellStore
) -> None:
    def at(epochs: int, label: str, main: float) -> Line:
        split = {"partition": f"{epochs} local epochs", "parameter": epochs}
        # Another seed for other epochs: else both would be one cell.
        later = (None,) if epochs > 1 else ()
        return line_with(*later, {"main": main}, label=label, **split)

    lines = [at(1, "retrained", 0.9), at(1, "fast-fedul-2", 0.6)]
    lines += [at(20, "retrained", 0.9), at(20, "fast-fedul-2", 0.9)]
    svg = plots_of("epochs", summarize(lines, store))["epochs-mnist"]
    shown = texts(svg)
    assert {"1", "20", "fast-fedul-2", "pixel backdoor", "0", "30"} <= shown
    assert "35" not in shown, "points lost against the retraining of the same epochs"


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", DRAWN)
def test_every_experiment_has_its_plots(name: str, scale: Scale, fill: Fill) -> None:
    lines = lines_of(name, scale, 2)
    summaries = summarize(lines, fill(lines))
    found = plots_of(name, summaries)
    drawn = {(name != "epochs" and line.attack, line.source) for line in summaries}
    assert len(found) == len(drawn)
    for stem, svg in found.items():
        assert stem.startswith(f"{name}-")
        assert texts(svg) >= EXPECTED[name]
        assert "Date" not in svg


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_same_results_give_the_same_bytes(name: str, fill: Fill) -> None:
    lines = lines_of(name, "smoke", 2)
    summaries = summarize(lines, fill(lines))
    assert plots_of(name, summaries) == plots_of(name, summaries)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_half_of_the_results_are_enough(name: str, fill: Fill) -> None:
    lines = lines_of(name, "standard", 2)
    store = fill(lines[::2])
    store.write(lines[1].cells[0], {"refused": "cannot"})
    for svg in plots_of(name, summarize(lines, store)).values():
        ElementTree.fromstring(svg)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_unknown_values_are_left_out(name: str, store: CellStore) -> None:
    lines = lines_of(name, "smoke", 1)
    for line in lines:
        store.write(line.cells[0], {"main": None, "seconds": 0.0, "unit_angles": []})
    for svg in plots_of(name, summarize(lines, store)).values():
        ElementTree.fromstring(svg)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_without_results_there_are_no_plots(name: str, store: CellStore) -> None:
    assert plots_of(name, summarize(lines_of(name, "smoke", 1), store)) == {}


def test_a_refusal_and_the_papers_figures_are_shown(
    line_with: Build, store: CellStore
) -> None:
    lines = [
        line_with({"main": 0.9, "backdoor": 0.1}),
        line_with({"refused": "cannot"}, label="kd"),
        line_with(None, label="pga"),
    ]
    svg = plots_of("pixel", summarize(lines, store))["pixel-mnist"]
    assert texts(svg) >= {"paper", "refused", "not run yet", "90.00 %", "one seed"}


def test_a_result_without_its_time_is_named(line_with: Build, store: CellStore) -> None:
    known = {"main": 0.9, "seconds": 2.0}
    lines = [line_with(known), line_with({**known, "seconds": None}, label="kd")]
    svg = plots_of("cost", summarize(lines, store))["cost-pixel-mnist"]
    assert "not timed yet" in texts(svg)
    svg = plots_of("cost", summarize(lines[:1], store))["cost-pixel-mnist"]
    assert "not timed yet" not in texts(svg)


def test_the_stand_in_is_named_in_its_plot(line_with: Build, store: CellStore) -> None:
    line = line_with({"main": 0.9}, data="oct", source="oct-retina-subset")
    ((stem, svg),) = plots_of("pixel", summarize([line], store)).items()
    assert stem == "pixel-oct-retina-subset"
    assert "retinal subset (paper: OCTMNIST)" in svg


def test_without_matplotlib_one_line_says_what_to_install(
    line_with: Build, store: CellStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    summaries = summarize([line_with({"main": 0.9})], store)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'fastfedul\[report\]'"):
        plots_of("pixel", summaries)


def test_importing_the_plots_does_not_import_matplotlib() -> None:
    code = "import sys, paper.writing; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
