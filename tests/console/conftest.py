"""What the tests of the console start from: a ledger, and a browser at its pages."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra console")

with warnings.catch_warnings():
    # Starlette would rather have a successor of httpx, which Flower does not use.
    warnings.simplefilter("ignore")
    from fastapi.testclient import TestClient

from fastfedul.console.app import Console, make_app
from fastfedul.runs.evaluation_source import write_source
from tests.support.disk_ledgers import record
from tests.support.linear_trainer import SOURCE, trained

BASE = "http://127.0.0.1:8765"


@dataclass(frozen=True)
class Browser:
    """A browser at a console.

    Attributes:
        console: The console.
        client: What sends requests.
        ledger: The ledger that the console is about.
    """

    console: Console
    client: TestClient
    ledger: Path

    def get(self, address: str, code: int = 200) -> str:
        """Return a page."""
        found = self.client.get(address)
        assert found.status_code == code, found.text
        return str(found.text)

    def secret(self) -> str:
        """Return the secret that the forms of this browser carry."""
        found = re.search('name="secret" value="([^"]+)"', self.get("/trace"))
        assert found is not None
        return found[1]

    def post(
        self, address: str, code: int = 303, files: Any = None, **fields: Any
    ) -> str:
        """Send a form as its page does; return where it leads, or what it says."""
        found = self.client.post(
            address,
            data={"secret": self.secret(), **fields},
            files=files,
            headers={"origin": BASE},
            follow_redirects=False,
        )
        assert found.status_code == code, found.text
        return str(found.headers["location"] if code == 303 else found.text)

    def finish(self, address: str) -> str:
        """Return the page of a job once it has ended."""
        deadline = time.monotonic() + 60
        number = int(address.rpartition("/")[2])
        while self.console.jobs.find(number).is_open:  # type: ignore[union-attr]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return self.get(address)


def browser_at(ledger: Path) -> Iterator[Browser]:
    console = Console(ledger)
    try:
        with TestClient(make_app(console), base_url=BASE) as client:
            yield Browser(console, client, ledger)
    finally:
        console.close()


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key and no trusted key of the user who runs the tests."""
    monkeypatch.delenv("FASTFEDUL_KEY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[Browser]:
    """A browser without the token, at a ledger of four rounds."""
    yield from browser_at(record(tmp_path / "ledger", 4))


@pytest.fixture
def operator(stranger: Browser) -> Browser:
    """The same with the token."""
    found = stranger.client.get(f"/?token={stranger.console.sessions.token}")
    assert found.status_code == 200
    return stranger


@pytest.fixture
def measured(tmp_path: Path) -> Iterator[Browser]:
    """An operator at a ledger whose model can be evaluated."""
    ledger = trained(tmp_path / "recorded")
    write_source(ledger, SOURCE)
    for browser in browser_at(ledger):
        browser.get(f"/?token={browser.console.sessions.token}")
        yield browser
