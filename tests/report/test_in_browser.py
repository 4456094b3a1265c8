"""The page in a real browser, as wide as a phone and as wide as a desk."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfedul.report.content import Contributions, Report
from fastfedul.report.page import render_html, write_html

pytest.importorskip("matplotlib", reason="needs the extra report")

pytestmark = pytest.mark.slow

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
    *("--no-first-run", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--disable-dev-shm-usage"),
    *("--virtual-time-budget=5000", "--window-size=1300,900", "--dump-dom"),
    *("--enable-logging=stderr", "--hide-scrollbars"),
)
SECONDS = 90
WIDTHS = (320, 390, 1200)

# The page is put untouched into frames of several widths, and measured from outside.
MEASURE = """
const box = e => { const r = e.getBoundingClientRect();
  return [r.left, r.top, r.right, r.bottom]; };
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, all = q => [...page.querySelectorAll(q)];
    return {
      width: frame.contentWindow.innerWidth,
      scroll_width: page.documentElement.scrollWidth,
      charts: all("svg").map(svg => ({
        box: box(svg), texts: [...svg.querySelectorAll("text")].map(t =>
          [t.textContent.trim(), box(t), parseFloat(getComputedStyle(t).fontSize)
            * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width]),
      })),
      images: all("img").map(img => [img.naturalWidth, ...box(img)]),
      cells: all(".plain td").map(box),
      numbers: all(".numbers td").map(box),
      scripts: all("script").length,
      requests: frame.contentWindow.performance.getEntriesByType("resource")
        .map(entry => entry.name).filter(name => !name.startsWith("data:")),
      title: page.title,
    };
  });
  document.getElementById("found").textContent = JSON.stringify(found);
});
"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        missing = f"no browser on the PATH ({', '.join(NAMES)})"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    return found


def visit(browser: str, page: Path, folder: Path) -> tuple[str, list[str]]:
    """Return the document after loading, and what the page wrote to the console."""
    command = [browser, *FLAGS, f"--user-data-dir={folder / 'profile'}", page.as_uri()]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        document, log = process.communicate(timeout=SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
    assert process.returncode == 0, log[-2000:]
    return document, [line for line in log.splitlines() if ":CONSOLE" in line]


def measure(browser: str, report: Report, folder: Path) -> list[dict[str, Any]]:
    """Return what a page looks like in frames of all widths."""
    page = html.escape(render_html(report))
    frames = "".join(
        f'<iframe style="border:0" width="{width}" height="900" srcdoc="{page}">'
        "</iframe>"
        for width in WIDTHS
    )
    outside = folder / "outside.html"
    outside.write_text(
        f'<!DOCTYPE html><meta charset="utf-8"><body style="width:2000px">'
        f'<pre id="found"></pre>{frames}<script>{MEASURE}</script>',
        "utf-8",
    )
    document, _ = visit(browser, outside, folder)
    match = re.search(r'<pre id="found">(.*?)</pre>', document, re.DOTALL)
    assert match is not None
    found: list[dict[str, Any]] = json.loads(html.unescape(match[1]))
    assert [page["width"] for page in found] == list(WIDTHS)
    return found


def check_layout(page: dict[str, Any], num_charts: int) -> None:
    """Nothing sticks out, nothing is empty, every letter can be read."""
    assert page["scroll_width"] <= page["width"]
    assert len(page["charts"]) == num_charts
    for chart in page["charts"]:
        left, top, right, bottom = chart["box"]
        assert left >= 0
        assert right <= page["width"]
        assert right - left > 200
        assert bottom - top > 60
        for text, box, size in chart["texts"]:
            assert size >= 8, text
            inside = box[0] >= left - 3, box[2] <= right + 3
            assert all(inside), text
            assert box[1] >= top - 3, text
            assert box[3] <= bottom + 3, text
    for natural, left, _, right, _ in page["images"]:
        assert natural > 0
        assert right - left > 40
        assert right <= page["width"]
    assert page["scripts"] == 0
    assert page["requests"] == []


def test_the_page_fits_every_width(
    browser: str, report: Report, tmp_path: Path
) -> None:
    pages = measure(browser, report, tmp_path)
    for page in pages:
        check_layout(page, num_charts=5)
        assert len(page["images"]) == 8
    phone = pages[WIDTHS.index(390)]
    assert len(phone["cells"]) == 12
    assert len(phone["numbers"]) == 24
    assert all(cell[2] <= 390 for cell in phone["cells"] + phone["numbers"])


def test_hostile_names_neither_run_nor_break_the_layout(
    browser: str, report: Report, tmp_path: Path
) -> None:
    attack = '"><img src=x onerror=alert(1)><script>alert(1)</script> 😀 '
    name = attack + "z" * 10_000
    names = (name, "漢" * 200, "</svg>", *(f"client-{i}" for i in range(3, 1000)))
    hostile = dataclasses.replace(
        report,
        title=name,
        summary=(name,),
        rows=tuple(dataclasses.replace(row, method=name) for row in report.rows),
        forgotten=((20, name),),
        unit_angles={name: np.arange(10.0)},
        contributions=Contributions(names, np.ones((1000, 300))),
        settings={name: name},
        commands=(name,),
        notes=(name,),
    )
    for page in measure(browser, hostile, tmp_path):
        check_layout(page, num_charts=5)
        assert page["title"].startswith(attack[:20])


def test_the_console_stays_silent(browser: str, report: Report, tmp_path: Path) -> None:
    noisy, quiet = tmp_path / "noisy.html", tmp_path / "report.html"
    noisy.write_text("<!DOCTYPE html><script>console.error('heard')</script>")
    write_html(quiet, report)
    _, heard = visit(browser, noisy, tmp_path)
    assert any("heard" in line for line in heard)
    document, said = visit(browser, quiet, tmp_path)
    assert report.title in document
    assert said == []
