"""Charts are valid, repeatable SVG, whatever is missing and whoever is named."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Callable
from xml.etree import ElementTree

import numpy as np
import pytest

from fastfedul.errors import MissingPackageError
from fastfedul.report.charts import (
    MAX_CLIENTS,
    MAX_LAYERS,
    draw_angles,
    draw_bars,
    draw_contributions,
    draw_held_back,
    draw_rounds,
)
from fastfedul.report.content import Contributions, Report, RoundPoint, Row

pytest.importorskip("matplotlib", reason="needs the extra report")

HOSTILE = "</text><script>alert(1)</script>\"'&$x_1$ 😀 \x00\ud800\u202e" + "z" * 10_000
SVG = "{http://www.w3.org/2000/svg}"


def contributions_of(report: Report) -> str:
    assert report.contributions is not None
    return draw_contributions(report.contributions, report.forgotten)


DRAW: dict[str, Callable[[Report], str]] = {
    "rounds": lambda report: draw_rounds(report.rounds, report.forgotten),
    "bars": lambda report: draw_bars(report.rows),
    "angles": lambda report: draw_angles(report.unit_angles),
    "held back": lambda report: draw_held_back(report.removed_by_layer),
    "contributions": contributions_of,
}


def texts(svg: str) -> list[str]:
    found = ElementTree.fromstring(svg).iter(f"{SVG}text")
    return ["".join(element.itertext()).strip() for element in found]


@pytest.mark.parametrize("name", DRAW)
def test_a_chart_is_one_described_picture(name: str, report: Report) -> None:
    svg = DRAW[name](report)
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img"
    assert len(root.get("aria-label", "")) > 40
    assert root.get("viewBox", "").startswith("0 0 340 ")
    assert svg.startswith("<svg ")
    assert svg.endswith("</svg>")
    assert len(svg) < 60_000


@pytest.mark.parametrize("name", DRAW)
def test_the_same_data_give_the_same_text(name: str, report: Report) -> None:
    assert DRAW[name](report) == DRAW[name](report)


def test_settings_of_the_user_do_not_show(report: Report) -> None:
    import matplotlib

    usual = DRAW["rounds"](report)
    with matplotlib.rc_context({"font.size": 30, "axes.grid": True, "text.color": "r"}):
        assert DRAW["rounds"](report) == usual
        assert matplotlib.rcParams["font.size"] == 30


def test_charts_in_one_page_share_no_identifier(report: Report) -> None:
    found: list[str] = []
    for draw in DRAW.values():
        svg = draw(report)
        names = re.findall(r' id="([^"]+)"', svg)
        used = set(re.findall(r"url\(#([^)]+)\)", svg))
        used |= set(re.findall(r'href="#([^"]+)"', svg))
        assert used <= set(names)
        found += names
    assert len(found) == len(set(found))


def test_axes_speak_plainly(report: Report) -> None:
    assert {"accuracy", "attack success", "100 %"} <= set(texts(DRAW["rounds"](report)))
    assert "client-3 forgotten" in texts(DRAW["rounds"](report))
    assert {"before", "retrained", "2.2 %"} <= set(texts(DRAW["bars"](report)))
    assert "angle to the retrained model (degrees)" in texts(DRAW["angles"](report))
    assert {"removed", "held back", "100 %"} <= set(texts(DRAW["held back"](report)))


def test_without_an_attack_it_is_not_mentioned(report: Report) -> None:
    points = [RoundPoint(point.round, point.main) for point in report.rounds]
    rows = [Row(r.method, r.main, r.main_count, r.main_interval) for r in report.rows]
    for svg in (draw_rounds(points), draw_bars(rows)):
        assert "attack" not in svg


def test_names_from_strangers_stay_text(report: Report) -> None:
    values = np.ones((2, 3))
    svgs = (
        draw_rounds(report.rounds, [(3, HOSTILE)]),
        draw_bars([dataclasses.replace(report.rows[0], method=HOSTILE)]),
        draw_angles({HOSTILE: np.ones(3)}),
        draw_contributions(
            Contributions((HOSTILE, "漢字" * 50), values), [(2, HOSTILE)]
        ),
        draw_held_back([(f"</text>{HOSTILE[:9]}", 0.5)]),
    )
    for svg in svgs:
        root = ElementTree.fromstring(svg)
        assert not list(root.iter(f"{SVG}script"))
        assert any(text.startswith("</text>") for text in texts(svg))
        assert "z" * 100 not in svg
        assert svg.encode()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_none_are_left_out(value: float) -> None:
    row = Row("odd", value, (0, 0), (value, value), value, (0, 0), (value, value))
    good = Row("fine", 0.5, (1, 2), (0.1, 0.9), 0.5, (1, 2), (0.1, 0.9))
    drawn = (
        draw_bars([row, good]),
        draw_bars([row]),
        draw_rounds([RoundPoint(0, math.nan, None), RoundPoint(1, 0.5, 0.5)]),
        draw_angles({"a": np.array([value]), "b": np.array([3.0]), "c": np.zeros(0)}),
        draw_contributions(Contributions(("a",), np.full((1, 2), value))),
    )
    assert all(ElementTree.fromstring(svg) is not None for svg in drawn)


def test_one_point_is_enough() -> None:
    assert draw_rounds([RoundPoint(0, 0.1, 0.0)], [(0, "a"), (0, "b")])
    assert draw_held_back([("w", 0.5)])


def test_a_bar_says_what_was_removed_and_never_leaves_its_place(report: Report) -> None:
    """Directions cross layers, so a part may be below 0 or above 1."""
    svg = draw_held_back(report.removed_by_layer)
    shown = texts(svg)
    for name, kept in report.removed_by_layer:
        assert (name in shown) == (kept is not None)
    label = ElementTree.fromstring(svg).get("aria-label", "")
    for said in ("conv.weight: 34%", "conv.bias: 100%", "dense.weight: 7%"):
        assert said in label
    assert "dense.bias: 0%" in label
    assert "unused" not in svg


def test_of_many_layers_the_first_and_the_last_are_shown() -> None:
    layers = [(f"layer{place}", place / 100) for place in range(100)]
    svg = draw_held_back(layers)
    half = MAX_LAYERS // 2
    names = [name for name, _ in layers]
    found = [text for text in texts(svg) if text.startswith("layer")]
    assert found == [*names[:half], *names[-half:]]
    assert len(svg) < 60_000


def test_a_long_name_of_a_layer_keeps_its_end() -> None:
    svg = draw_held_back([("module." * 20 + "block.weight", 0.5)])
    [name] = [text for text in texts(svg) if text.endswith("block.weight")]
    assert name.startswith("…")
    assert len(name) <= 20


def test_of_many_clients_the_forgotten_and_the_largest_are_shown() -> None:
    names = tuple(f"c{place}" for place in range(1000))
    values = np.tile(np.arange(1000.0)[:, None], (1, 200))
    svg = draw_contributions(Contributions(names, values), [(5, "c7")])
    shown = [text for text in texts(svg) if text.startswith("c")]
    assert shown == ["c7", *names[-MAX_CLIENTS + 1 :]]
    assert len(svg) < 60_000


def test_without_matplotlib_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'fastfedul\[report\]'"):
        draw_rounds([RoundPoint(0, 0.5)])
