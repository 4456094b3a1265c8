"""The console in Chromium: open, look, follow, file, forget, verify; with pictures."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastfedul import DiskLedger, LedgerReader, apply_requests
from fastfedul.console.app import PAGES
from tests.support.commands import COMMAND, run
from tests.support.disk_ledgers import record, round_of

pytest.importorskip("playwright", reason="needs playwright, of the extra dev")

from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Page,
    Request,
    expect,
    sync_playwright,
)

pytestmark = pytest.mark.slow

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = (390, 1280, 1600)

# What a reader of the screen would hear for each thing that can be used.
NAMELESS = """
() => [...document.querySelectorAll(
    "a, button, input:not([type=hidden]), progress, meter, [role=region]")]
  .filter(e => !(e.getAttribute("aria-label") || e.textContent.trim()
    || [...(e.labels || [])].some(l => l.textContent.trim())))
  .map(e => e.outerHTML.slice(0, 120))
"""
SHIFTS = """
() => new Promise(done => {
  let sum = 0;
  new PerformanceObserver(list => {
    for (const one of list.getEntries()) if (!one.hadRecentInput) sum += one.value;
  }).observe({type: "layout-shift", buffered: true});
  setTimeout(() => done(sum), 300);
})
"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        text = f"no browser on the PATH ({', '.join(BROWSERS)})"
        pytest.fail(text) if os.environ.get("CI") == "true" else pytest.skip(text)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=found, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@contextlib.contextmanager
def console(ledger: Path) -> Iterator[str]:
    """Yield the link that the command prints."""
    with subprocess.Popen(
        [*COMMAND, "console", str(ledger), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().removeprefix("Open ").strip()
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, said
    assert "Traceback" not in said[1]


@contextlib.contextmanager
def page_at(browser: Browser, link: str, **options: Any) -> Iterator[Page]:
    """Yield a page; it asks nobody else for anything, and nothing goes wrong in it."""
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(15_000)
    own = link.partition("?")[0]
    outside: list[str] = []
    wrong: list[str] = []

    def asked(request: Request) -> None:
        if not request.url.startswith((own, "data:")):
            outside.append(request.url)

    def told(said: ConsoleMessage) -> None:
        if said.type == "error":
            wrong.append(said.text)

    page.on("request", asked)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", told)
    page.goto(link)
    assert "token" not in page.url
    yield page
    assert (outside, wrong) == ([], [])
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_fits_every_screen_and_has_a_name_for_everything(
    scheme: Any, chromium: Browser, tmp_path: Path
) -> None:
    ledger = record(tmp_path / "ledger", 4)
    run("forget", ledger, "d")
    run("request", "add", ledger, "c", "--reason", "ticket 812")
    with console(ledger) as link:
        for width in WIDTHS:
            size = {"width": width, "height": 900}
            with page_at(chromium, link, viewport=size, color_scheme=scheme) as page:
                for address, label in (*PAGES, ("/client?name=a", "client")):
                    page.goto(link.partition("?")[0].rstrip("/") + address)
                    assert (
                        page.evaluate("document.documentElement.scrollWidth") <= width
                    )
                    assert page.evaluate(NAMELESS) == []
                    assert page.evaluate(SHIFTS) < 0.02, label
                    assert page.locator("h1").count() == 1
                    picture = tmp_path / f"{label.lower()}-{scheme}-{width}.png"
                    page.screenshot(path=picture, full_page=True)


def test_the_whole_story_of_an_operator(chromium: Browser, tmp_path: Path) -> None:
    ledger = record(tmp_path / "ledger", 4)
    size = {"width": 1280, "height": 900}

    def picture(page: Page, name: str) -> None:
        page.screenshot(path=tmp_path / f"story-{name}.png", full_page=True)

    with console(ledger) as link, page_at(chromium, link, viewport=size) as page:
        # Open and look, while a training goes on: the page follows by itself.
        figure = page.locator(".figure").first
        expect(figure).to_have_text("4")
        with DiskLedger(ledger) as training:
            training.append(round_of(4))
            expect(figure).to_have_text("5", timeout=15_000)
            expect(page.get_by_text("is writing")).to_be_visible()

            # File a request, because somebody else writes.
            page.get_by_role("link", name="Clients").click()
            page.get_by_role("link", name="a, active").click()
            page.get_by_role("button", name="Preview forgetting it").click()
            expect(page.get_by_text("The model would move by")).to_be_visible()
            page.get_by_label("Reason").fill("ticket <812>")
            page.get_by_role("button", name="File the request").click()
            expect(page.get_by_text("ticket <812>")).to_be_visible()
            picture(page, "1-request")
            apply_requests(training)
        none = page.get_by_text("Nobody waits to be forgotten.")
        expect(none).to_be_visible(timeout=15_000)

        # Forget another one, by the keyboard alone.
        page.goto(page.url.partition("#")[0] + "forget")
        box = page.get_by_role("checkbox", name="b 5 rounds")
        box.focus()
        page.keyboard.press("Space")
        page.get_by_role("button", name="Preview").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_text("Nobody can undo it")).to_be_visible()
        picture(page, "2-preview")
        page.get_by_label("to confirm").focus()
        page.keyboard.type("b")
        page.keyboard.press("Enter")
        expect(
            page.get_by_text("Forgotten, and erased from the ledger")
        ).to_be_visible()
        page.reload()
        picture(page, "3-forgotten")
        with page.expect_download() as download:
            page.get_by_role("link", name="event-2.json").click()
        wanted = tmp_path / "certificates" / "event-2.json"
        assert Path(download.value.path()).read_bytes() == wanted.read_bytes()
        page.get_by_role("button", name="Check it").click()
        expect(page.get_by_text("No check fails")).to_be_visible()
        picture(page, "4-checked")

        # Verify.
        page.get_by_role("link", name="Storage").click()
        page.get_by_role("button", name="Verify now").click()
        expect(page.get_by_text("Intact: 5 rounds")).to_be_visible()
        page.get_by_role("link", name="Overview").click()
        expect(page.get_by_text("intact", exact=True)).to_be_visible()
        picture(page, "5-verified")
    with LedgerReader(ledger) as found:
        states = {name: entry.state for name, entry in found.clients().items()}
    assert states == {"a": "erased", "b": "erased", "c": "active", "d": "active"}
