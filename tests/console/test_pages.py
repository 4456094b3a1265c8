"""What the pages show, also of odd names, big ledgers and a training that goes on."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    LedgerReader,
    Model,
    Params,
    Round,
    forget,
)
from fastfedul.console.heat_map import LEVELS, MOST_BINS, PAGE_CLIENTS, heat_map
from fastfedul.console.views import line_of, storage_of
from fastfedul.ledger.failures import FailureEntry, note_failures
from fastfedul.report.stored import write_comparison
from fastfedul.runs import metrics_file
from fastfedul.runs.metrics_file import RoundMetrics
from tests.console.conftest import Browser, browser_at
from tests.support.commands import run
from tests.support.disk_ledgers import round_of

ODD = (
    "<script>alert(1)</script>",
    "a\u202egnp.exe",
    "line\nbreak",
    '"><img src=x onerror=alert(1)>',
    "&amp; ümlaut 猫",
    "x" * 300,
)


def small(path: Path, names: tuple[str, ...], rounds: int = 1) -> Path:
    """Return a ledger of a tiny model."""
    with DiskLedger.create(path, Model(Params.of({"w": np.zeros(3)}))) as ledger:
        for index in range(rounds):
            updates = tuple(
                ClientUpdate(
                    name, 1 / len(names), Params.of({"w": np.full(3, 1.0 + i)})
                )
                for i, name in enumerate(names)
            )
            ledger.append(Round(index, updates))
    return path


def test_the_overview_follows_a_training_and_is_silent_while_nothing_changes(
    operator: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=2**30)
    monkeypatch.setattr("shutil.disk_usage", lambda place: usage)
    page = operator.get("/")
    address = html.unescape(re.findall('hx-get="(/part/overview[^"]*)"', page)[0])
    assert operator.client.get(address).status_code == 204
    with DiskLedger(operator.ledger) as ledger:
        ledger.append(round_of(4))
        part = operator.client.get(address)
        assert part.status_code == 200
        assert re.search(r'class="figure">5<', part.text)
        assert "is writing" in part.text
    assert "never verified" in operator.get("/")


def test_a_ledger_without_rounds_has_every_page(tmp_path: Path) -> None:
    DiskLedger.create(tmp_path / "new", Model(Params.of({"w": np.zeros(3)}))).close()
    for browser in browser_at(tmp_path / "new"):
        for address in (
            "/",
            "/clients",
            "/forget",
            "/compare",
            "/storage",
            "/certificates",
        ):
            assert "<h1>" in browser.get(address)
        assert "No round is recorded yet" in browser.get("/")


def test_names_and_reasons_of_any_kind_are_shown_as_text(tmp_path: Path) -> None:
    path = small(tmp_path / "odd", ODD)
    for browser in browser_at(path):
        browser.get(f"/?token={browser.console.sessions.token}")
        with LedgerReader(path) as ledger:
            names = list(ledger.clients())
        for name in names:
            plan = browser.post("/forget/plan", client=name)
            browser.finish(plan)
            browser.post(
                "/forget/request",
                plan=plan.rpartition("/")[2],
                reason="<b>\u202e\x07</b>",
            )
        note_failures(
            path, [FailureEntry("t", 1, "train", n, "left out", n) for n in names]
        )
        addresses = ["/", "/clients", "/forget", "/storage", "/compare", plan]
        addresses += [
            str(browser.client.build_request("GET", "/client", params={"name": n}).url)
            for n in names
        ]
        for address in addresses:
            page = browser.get(address)
            assert "<script>alert" not in page
            assert "<img" not in page
            assert "<b>" not in page
            # Fields that are sent back hold the name itself; nobody reads them.
            seen = re.sub(r'(value|href)="[^"]*"', "", page)
            assert "\u202e" not in seen
            assert "\x07" not in seen
        assert "alert(1)" in browser.get("/clients")
        assert "&#39;a\\u202egnp.exe&#39;" in browser.get("/clients")


def test_the_map_of_many_clients_and_rounds_is_capped(tmp_path: Path) -> None:
    names = tuple(f"c{number:04}" for number in range(250))
    path = small(tmp_path / "many", names, rounds=2)
    for browser in browser_at(path):
        page = browser.get("/clients")
        assert page.count('class="row"') == PAGE_CLIENTS
        assert "page 1 of 3" in page
        assert browser.get("/clients?page=3").count('class="row"') == 50
        assert "page 3 of 3" in browser.get("/clients?page=99")
        assert browser.get("/clients?find=C0042").count('class="row"') == 1
        assert "No client has such a name" in browser.get("/clients?find=nobody")
        assert browser.get("/forget").count('type="checkbox"') == 200


def test_a_map_adds_rounds_up_and_shades_by_pull(tmp_path: Path) -> None:
    path = small(tmp_path / "long", ("ann", "bob"), rounds=MOST_BINS + 1)
    with LedgerReader(path) as ledger, ledger.snapshot():
        found = heat_map(ledger, list(ledger.clients().values()))
    assert (found.rounds_per_bin, found.bins) == (2, MOST_BINS // 2 + 1)
    assert found.strips["bob"].paths[LEVELS - 1] == f"M0 .5h{MOST_BINS // 2}"
    # The last field has one round in place of two, so it is paler.
    last = f"M{MOST_BINS // 2} .5h1"
    assert last in found.strips["bob"].paths[LEVELS - 2]
    assert not found.strips["ann"].paths[LEVELS - 1]


def test_the_page_of_a_client_has_its_rounds_and_what_still_holds_it(
    operator: Browser,
) -> None:
    nodes = operator.ledger.with_name("ledger.nodes.json")
    nodes.write_text(json.dumps({"clients": {"a": "ab" * 16}}))
    page = operator.get("/client?name=a")
    assert "4 of 4, from 1 to 4" in page
    assert "ab" * 16 in page
    assert "Preview forgetting it" in page
    with DiskLedger(operator.ledger) as ledger:
        forget(ledger, ["a"])
    page = operator.get("/client?name=a")
    assert "erased" in page
    assert "What still has this client" in page
    assert "backups" in page
    assert "Preview forgetting it" not in page
    assert "no update" in operator.get("/storage")
    assert "no client is called" in operator.get("/client?name=nobody", code=404)
    nodes.write_text("[]")
    assert "none noted" in operator.get("/client?name=b")


def test_storage_adds_up(operator: Browser) -> None:
    with LedgerReader(operator.ledger) as ledger:
        found = storage_of(ledger)
        assert sum(found.kinds.values()) == found.total
        assert [count for _, count in found.clients] == [4 * 37 * 4] * 4
    assert "Bytes of each client" in operator.get("/storage")


@pytest.mark.slow
def test_compare_shows_what_was_kept_and_trains_nothing(measured: Browser) -> None:
    assert "No comparison was kept yet" in measured.get("/compare")
    run("compare", measured.ledger, "--forget", "eve", "--methods", "fast-fedul")
    page = measured.get("/compare")
    assert "fast-fedul" in page
    assert "of 60" in page
    assert "Nobody can retrain here" in page
    for broken in ({}, {"rows": 3}, {"rows": [{"method": "x"}, 7, None]}):
        write_comparison(measured.ledger, broken)
        assert "No comparison was kept yet" in measured.get("/compare")


def test_metrics_are_drawn_as_lines(measured: Browser) -> None:
    assert "<polyline" not in measured.get("/")
    for index in range(500):
        own = RoundMetrics(index, index / 500, 1 - index / 500, 1.0)
        metrics_file.append(metrics_file.metrics_of(measured.ledger), own)
    page = measured.get("/")
    assert page.count("<polyline") == 2
    assert "Accuracy, now 99.8 %" in page
    points = re.findall('points="([^"]+)"', page)[0].split()
    assert len(points) <= 200


def test_a_line_needs_two_points() -> None:
    assert line_of([]) is None
    assert line_of([(0, 1.0), (1, float("nan"))]) is None
    found = line_of([(0, 1.0), (2, 3.0)])
    assert found is not None
    assert found.points == "0.0,100.0 1000.0,0.0"
    assert (found.first_round, found.last_round) == (1, 3)


@pytest.mark.parametrize("address", ["/jobs/x", "/clients?page=x", "/client"])
def test_an_address_that_is_no_number_or_lacks_something_gets_one_line(
    address: str, operator: Browser
) -> None:
    assert "lacks something" in operator.get(address, code=422)
