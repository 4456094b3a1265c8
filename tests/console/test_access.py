"""Who may look and who may change: tokens, sessions, origins, hosts and secrets."""

from __future__ import annotations

import pytest

from fastfedul import LedgerReader
from fastfedul.console.app import HEADERS, LARGEST_UPLOAD, PAGES
from fastfedul.console.sessions import MOST_SESSIONS, Sessions
from tests.console.conftest import BASE, Browser

FORMS = (
    *("/forget/plan", "/forget/now", "/forget/request", "/requests/cancel"),
    *("/requests/apply", "/trace", "/certificates/check", "/storage/verify"),
)


def test_a_stranger_sees_every_page_and_no_form_that_changes_something(
    stranger: Browser,
) -> None:
    for address, _ in PAGES:
        page = stranger.get(address)
        assert "may only look" in page
        assert 'method="post"' not in page or "disabled" in page
        assert 'name="secret"' not in page


def test_a_stranger_changes_nothing(stranger: Browser) -> None:
    for address in FORMS:
        found = stranger.client.post(address, headers={"origin": BASE})
        assert found.status_code == 403
        assert "may only look" in found.text
    assert not stranger.console.jobs.current()


def test_the_token_leads_to_the_page_without_it_and_a_wrong_one_to_nothing(
    stranger: Browser,
) -> None:
    right = stranger.console.sessions.token
    for wrong in ("", "x", right[:-1], right + "x", "ü", "\x00"):
        found = stranger.client.get("/", params={"token": wrong})
        assert found.status_code == 403
        assert "token is wrong" in found.text
        assert not found.cookies
    found = stranger.client.get(f"/clients?token={right}", follow_redirects=False)
    assert (found.status_code, found.headers["location"]) == (303, "/clients")
    cookie = found.headers["set-cookie"]
    assert right not in cookie
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "may only look" not in stranger.get("/")


@pytest.mark.parametrize(
    "origin",
    [None, "null", "http://evil.example", "http://127.0.0.1:1", f"{BASE}.evil.example"],
)
def test_a_form_of_another_page_is_refused(
    origin: str | None, operator: Browser
) -> None:
    headers = {} if origin is None else {"origin": origin}
    for address in FORMS:
        fields = {"secret": operator.secret()}
        found = operator.client.post(address, data=fields, headers=headers)
        assert found.status_code == 403
        assert "another page" in found.text


def test_a_form_without_the_secret_of_its_session_is_refused(
    operator: Browser,
) -> None:
    plan = operator.finish(operator.post("/forget/plan", client="a"))
    assert "The model would move by" in plan
    whole = {"plan": "1", "typed": "a", "name": "x", "number": "1", "client": "a"}
    files = {"inputs": ("x.npz", b"x")}
    wrong: tuple[dict[str, str], ...] = ({}, {"secret": "x"})
    for address in FORMS:
        for secret in (*wrong, {"secret": operator.console.sessions.token}):
            found = operator.client.post(
                address,
                data={**whole, **secret},
                files=files if address == "/trace" else None,
                headers={"origin": BASE},
            )
            assert found.status_code == 403, address
            assert "another session" in found.text
    assert not operator.console.jobs.current()
    with LedgerReader(operator.ledger) as ledger:
        assert not ledger.requests()
        assert {entry.state for entry in ledger.clients().values()} == {"active"}


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "[x", ""])
def test_a_name_of_another_machine_is_refused(host: str, operator: Browser) -> None:
    for method in ("GET", "POST"):
        found = operator.client.request(method, "/", headers={"host": host})
        assert found.status_code == 403
        assert "only on this machine" in found.text
    for own in ("localhost:8765", "127.0.0.1:9", "[::1]:8765"):
        assert operator.client.get("/", headers={"host": own}).status_code == 200


def test_every_answer_has_the_headers_that_keep_others_out(operator: Browser) -> None:
    for address, code in (("/", 200), ("/nothing", 404), ("/static/style.css", 200)):
        found = operator.client.get(address)
        assert found.status_code == code
        for name in HEADERS.keys() - {"Cache-Control"}:
            assert found.headers[name] == HEADERS[name]
    page = operator.get("/")
    assert "style=" not in page
    assert "<script>" not in page
    assert "http://" not in page.replace(BASE, "")
    assert "https://" not in page


def test_requests_without_a_length_or_with_a_huge_one_are_refused(
    operator: Browser,
) -> None:
    headers = {"origin": BASE}
    lengthy = {**headers, "content-length": str(LARGEST_UPLOAD + 1)}
    assert operator.client.post("/trace", headers=lengthy).status_code == 413
    parts = operator.client.post("/trace", headers=headers, content=iter([b"x"]))
    assert parts.status_code == 411
    assert operator.client.put("/", headers=headers).status_code == 405


@pytest.mark.parametrize(
    "address",
    ["/docs", "/openapi.json", "/static/../app.py", "/static/%2e%2e/app.py",
     "/certificates/..%2f..%2findex.sqlite", "/jobs/1", "/part/jobs/7"],
)  # fmt: skip
def test_what_is_not_there_is_not_found(address: str, operator: Browser) -> None:
    found = operator.client.get(address)
    assert found.status_code in (404, 409)
    assert "SQLite" not in found.text


def test_old_sessions_give_way_to_new_ones() -> None:
    sessions = Sessions()
    first = sessions.begin(sessions.token)
    assert first is not None
    assert sessions.find(first.cookie) is first
    for _ in range(MOST_SESSIONS):
        sessions.begin(sessions.token)
    assert sessions.find(first.cookie) is None
    assert sessions.find(None) is None


def test_prometheus_may_look_without_a_token_and_only_on_this_machine(
    stranger: Browser,
) -> None:
    found = stranger.client.get("/metrics")
    assert found.status_code == 200
    assert found.headers["content-type"].startswith("text/plain; version=")
    assert "\nfastfedul_rounds_total 4.0\n" in found.text
    assert stranger.client.get("/metrics", headers={"host": "evil"}).status_code == 403
