"""The page stands alone, escapes everything, and leaves out what is not there."""

from __future__ import annotations

import dataclasses
import html
import io
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastfedul.errors import InvalidInputError, MissingPackageError
from fastfedul.report import page as page_module
from fastfedul.report.content import Contributions, ExampleImages, Report, Row
from fastfedul.report.page import encode_png, render_html, write_html

pytest.importorskip("matplotlib", reason="needs the extra report")

VOID = {"meta", "link", "img", "br", "hr", "input"}
ADDRESSES = {"src", "href", "xlink:href", "action", "data", "srcset", "poster"}
HOSTILE = "<script>alert(1)</script>\"'&amp;😀\n\x00\ud800" + "z" * 10_000


class Page(HTMLParser):
    """Collects tags and attributes, and fails on tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.headings: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data)

    def count(self, tag: str) -> int:
        return sum(found == tag for found, _ in self.tags)


@pytest.fixture(scope="module")
def text(report: Report) -> str:
    return render_html(report)


SECTIONS = {
    "rows": ["The result", "Before, after, and retrained", "All numbers"],
    "rounds": ["Round by round"],
    "unit_angles": ["Angle to the retrained model"],
    "removed_by_layer": ["What was removed where"],
    "contributions": ["Who contributed how much when"],
    "examples": ["Poisoned images"],
    "settings": ["Settings"],
    "commands": ["How to reproduce"],
}
LAST = "What this does and does not show"


def test_the_page_has_every_part_in_order(report: Report, text: str) -> None:
    page = Page(text)
    assert page.headings[0] == report.title
    assert page.headings[1] == "The result"
    assert page.headings[-1] == LAST
    for headings in SECTIONS.values():
        assert set(headings) <= set(page.headings)
    assert (page.count("svg"), page.count("img"), page.count("pre")) == (5, 8, 1)
    assert dict(page.tags)["html"] == {"lang": "en"}
    assert all(attrs.get("alt") for tag, attrs in page.tags if tag == "img")
    assert all(attrs.get("aria-label") for tag, attrs in page.tags if tag == "svg")


def test_the_result_reads_like_a_sentence(report: Report, text: str) -> None:
    words = " ".join(re.sub(r"<[^>]+>", " ", text).split())
    assert "Model Accuracy Attack success Time" in words
    assert "Before 97.5 % 351 of 360 95.3–98.7 % 92.9 % 302 of 325" in words
    assert "After fast-fedul 91.9 % 331 of 360 88.7–94.3 % 2.2 % 7 of 325" in words
    for word in ("estimate", "no proof", "Membership inference", "one random seed"):
        assert word in words
    assert report.notes[0] in words


@pytest.mark.parametrize("part", SECTIONS)
def test_any_part_may_come_alone(part: str, report: Report) -> None:
    alone = dataclasses.replace(Report("alone"), **{part: getattr(report, part)})
    headings = Page(render_html(alone)).headings
    assert {*headings} - {"alone", "In pictures", LAST} == {*SECTIONS[part]}


def test_a_report_of_nothing_is_still_a_page() -> None:
    images = ExampleImages(np.zeros((0, 8, 8, 1), np.uint8), ())
    nobody = Contributions((), np.zeros((0, 0)))
    report = Report("Nothing", contributions=nobody, examples=images)
    assert Page(render_html(report)).headings == ["Nothing", LAST]


def test_without_an_attack_the_table_has_no_column_for_it() -> None:
    text = render_html(Report("t", rows=(Row("before", 0.5, (1, 2), (0.1, 0.9)),)))
    assert "Accuracy" in text
    assert "Attack success" not in text
    assert "Time taken" not in text
    assert "was not measured" in text


def test_the_same_report_gives_the_same_page(report: Report, text: str) -> None:
    assert render_html(report) == text


def test_the_page_asks_the_network_for_nothing(text: str) -> None:
    for tag, attributes in Page(text).tags:
        assert tag not in {"script", "iframe", "object", "embed", "base", "form"}
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ADDRESSES:
                assert (value or "").startswith(("data:", "#")), (tag, name)
    assert "default-src 'none'" in text
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    without_namespaces = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    without_pictures = re.sub(r'"data:image/png;[^"]*"', "", without_namespaces)
    assert not re.search(r"https?:|//", without_pictures)


def hostile_report(report: Report) -> Report:
    assert report.contributions is not None
    assert report.examples is not None
    names = (HOSTILE, *report.contributions.clients[1:])
    return dataclasses.replace(
        report,
        title=HOSTILE,
        summary=(HOSTILE,),
        rows=tuple(dataclasses.replace(row, method=HOSTILE) for row in report.rows),
        forgotten=((20, HOSTILE),),
        unit_angles={HOSTILE: np.ones(3)},
        removed_by_layer=((HOSTILE, 0.5),),
        contributions=Contributions(names, report.contributions.values),
        examples=ExampleImages(report.examples.images[:1], (HOSTILE,)),
        settings={HOSTILE: HOSTILE},
        commands=(HOSTILE,),
        notes=(HOSTILE,),
    )


def test_names_from_strangers_stay_text(report: Report) -> None:
    text = render_html(hostile_report(report))
    page = Page(text)
    assert not page.count("script")
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "\x00" not in text
    assert text.encode()
    assert len(text) < 200_000
    titles = [attrs["alt"] for tag, attrs in page.tags if tag == "img"]
    assert titles[0] is not None
    assert titles[0].startswith("<script>alert(1)</script>\"'&amp;😀")


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "{{7*7}}", "{% raw %}", "{#", "{{ report }}"]
)
def test_a_name_is_neither_markup_nor_a_template(name: str, report: Report) -> None:
    assert report.contributions is not None
    names = (name, *report.contributions.clients[1:])
    text = render_html(
        dataclasses.replace(
            report,
            title=f"Forgetting {name}",
            summary=(name,),
            rows=tuple(dataclasses.replace(row, method=name) for row in report.rows),
            forgotten=((20, name),),
            contributions=Contributions(names, report.contributions.values),
            settings={name: name},
            commands=(name,),
            notes=(name,),
        )
    )
    page = Page(text)
    assert page.headings[0] == f"Forgetting {name}"
    assert not page.count("script")
    shown = html.unescape(re.sub(r"<[^>]*>", " ", text))
    assert shown.count(name) > 10


def test_the_answer_comes_before_everything_else(report: Report, text: str) -> None:
    words = " ".join(re.sub(r"<[^>]+>", " ", text[text.index("<h1>") :]).split())
    assert words.startswith(
        f"{report.title} Attack success 92.9 % → 2.2 % retrained: 0.0 % "
        "Accuracy 97.5 % → 91.9 % retrained: 98.1 % "
        "Time to forget 12 ms retrained: 9.4 s "
        f"{report.summary[0]}"
    )
    assert "The figures above are of fast-fedul." in words


def test_the_answer_about_a_model_as_it_is_has_no_before(report: Report) -> None:
    now = dataclasses.replace(report.rows[2], method="now", seconds=None)
    text = render_html(dataclasses.replace(report, rows=(now, report.rows[1])))
    words = " ".join(re.sub(r"<[^>]+>", " ", text[text.index("<h1>") :]).split())
    assert words.startswith(
        f"{report.title} Attack success 2.2 % retrained: 0.0 % "
        "Accuracy 91.9 % retrained: 98.1 % "
    )
    assert "of the model as it is now" in words
    assert "Now, and retrained" in words
    assert "Time to forget" not in words


def test_every_colour_that_a_chart_names_is_in_the_style(text: str) -> None:
    light, dark = re.findall(r":root \{(.*?)\}", text, re.DOTALL)[:2]
    charts = "".join(re.findall(r"<svg .*?</svg>", text, re.DOTALL))
    used = set(re.findall(r"var\((--[a-z]+), #", charts))
    assert {"--ink", "--line", "--accent", "--mark"} <= used
    for style in (light, dark):
        assert used <= set(re.findall(r"(--[a-z]+):", style))


def test_without_jinja_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page_module.environment.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'fastfedul\[report\]'"):
        render_html(Report("t"))


def test_a_file_holds_the_page_and_nothing_lies_beside_it(tmp_path: Path) -> None:
    report = Report("😀", summary=("one",), settings={"seed": 1})
    path = tmp_path / "report.html"
    path.write_text("old")
    write_html(path, report)
    assert path.read_text("utf-8") == render_html(report)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", tmp_path / "none" / "report.html"):
        with pytest.raises(InvalidInputError, match="cannot write") as caught:
            write_html(path, Report("t"))
        assert "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def test_a_write_that_fails_leaves_the_old_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "report.html"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(InvalidInputError, match="No space left"):
        write_html(path, Report("t"))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_every_pixel_of_the_picture_is_in_the_file(channels: int, mode: str) -> None:
    image = np.arange(5 * 7 * channels, dtype=np.uint8).reshape(5, 7, channels)
    with Image.open(io.BytesIO(encode_png(image)), formats=("PNG",)) as found:
        assert (found.size, found.mode) == ((7, 5), mode)
        np.testing.assert_array_equal(np.asarray(found).reshape(image.shape), image)


def test_without_pillow_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingPackageError, match=r"fastfedul\[report\]"):
        encode_png(np.zeros((1, 1, 3), np.uint8))
