"""Forgetting, requests, tracing, certificates and verification from the pages."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path

import numpy as np
import pytest

from fastfedul import DiskLedger, FastFedULError, LedgerReader
from fastfedul.console.jobs import KEPT_JOBS, Jobs
from fastfedul.runs.training import RunConfig, prepare, train
from tests.console.conftest import Browser, browser_at
from tests.support.commands import run, run_json
from tests.support.damage import array_of


def number_of(address: str) -> str:
    return address.rpartition("/")[2]


def planned(browser: Browser, *names: str) -> str:
    """Return the number of a preview that is done."""
    address = browser.post("/forget/plan", client=list(names))
    page = browser.finish(address)
    assert "The model would move by" in page
    return number_of(address)


def states(browser: Browser) -> dict[str, str]:
    with LedgerReader(browser.ledger) as ledger:
        return {name: entry.state for name, entry in ledger.clients().items()}


def test_a_client_is_forgotten_after_a_preview_and_its_name(operator: Browser) -> None:
    wanted = run_json("forget", operator.ledger, "a", "--dry-run")
    plan = planned(operator, "a")
    page = operator.get(f"/jobs/{plan}")
    assert f"{wanted['delta_norm']:.4g}" in page
    assert "Type" in page
    for typed in ("", "b", "A", "a b"):
        said = operator.post("/forget/now", code=409, plan=plan, typed=typed)
        assert "to confirm, type" in said
    assert set(states(operator).values()) == {"active"}
    done = operator.finish(
        operator.post("/forget/now", plan=plan, typed=" a ", erase="yes")
    )
    assert "Forgotten, and erased" in done
    assert states(operator)["a"] == "erased"
    assert "event-1.json" in done
    page = operator.get("/certificates")
    assert "forgetting, entry 1" in page
    assert "not signed" in page
    again = operator.finish(operator.post("/forget/plan", client="a"))
    assert "forgotten already" in again


def test_several_clients_are_confirmed_by_their_number(operator: Browser) -> None:
    plan = planned(operator, "a", "b", "a")
    operator.post("/forget/now", code=409, plan=plan, typed="a")
    operator.finish(operator.post("/forget/now", plan=plan, typed="forget 2 clients"))
    found = states(operator)
    assert (found["a"], found["b"], found["c"]) == ("forgotten", "forgotten", "active")


def test_while_somebody_writes_a_request_is_filed_instead(operator: Browser) -> None:
    plan = planned(operator, "a")
    with DiskLedger(operator.ledger):
        assert "File a request" in operator.get(f"/jobs/{plan}")
        assert "is writing to this ledger" in operator.get("/forget")
        refused = operator.finish(
            operator.post("/forget/now", plan=plan, typed="a", erase="yes")
        )
        assert "open for writing already" in refused
        assert "Nothing was changed" in refused
        assert operator.post("/forget/request", plan=plan, reason="ticket 812")
    with LedgerReader(operator.ledger) as ledger:
        [request] = ledger.waiting()
        assert (request.client, request.reason) == ("a", "ticket 812")
    assert "ticket 812" in operator.get("/")
    again = operator.post("/forget/request", code=409, plan=plan)
    assert "request" in again
    operator.post("/requests/cancel", number=1)
    with LedgerReader(operator.ledger) as ledger:
        assert not ledger.waiting()
    assert "request" in operator.post("/requests/cancel", code=409, number=1)


def test_waiting_requests_are_answered_from_the_overview(operator: Browser) -> None:
    run("request", "add", operator.ledger, "b")
    done = operator.finish(operator.post("/requests/apply"))
    assert "Request 1, b: applied" in done
    assert states(operator)["b"] == "erased"
    assert "No request was waiting" in operator.finish(operator.post("/requests/apply"))


def test_a_second_forgetting_is_refused_while_one_goes_on(operator: Browser) -> None:
    plan = planned(operator, "a")
    begun, go_on = threading.Event(), threading.Event()

    def slow(say: object) -> None:
        begun.set()
        go_on.wait(30)

    operator.console.jobs.start("forget", "Forgetting", ("d",), slow)
    begun.wait(30)
    said = operator.post("/forget/now", code=409, plan=plan, typed="a")
    assert "d is being forgotten just now" in said
    assert "Forgetting: d" in operator.get("/clients")
    assert "is under way" in operator.get("/clients")
    go_on.set()


def test_only_a_preview_that_is_done_can_be_confirmed(operator: Browser) -> None:
    verified = operator.post("/storage/verify")
    operator.finish(verified)
    for plan in (number_of(verified), 99):
        found = operator.client.post(
            "/forget/now",
            data={"secret": operator.secret(), "plan": str(plan), "typed": "a"},
            headers={"origin": "http://127.0.0.1:8765"},
        )
        assert found.status_code in (404, 409)
    assert "choose at least one" in operator.post("/forget/plan", code=409)
    assert "no client is called" in operator.post("/forget/plan", code=404, client="x")


def test_verification_names_what_is_damaged(operator: Browser) -> None:
    page = operator.finish(operator.post("/storage/verify"))
    assert "Intact: 4 rounds" in page
    assert "Intact" in operator.get("/storage")
    array_of(operator.ledger, round_=2, client="b").flip(-1)
    page = operator.finish(operator.post("/storage/verify"))
    assert "round 2" in page
    assert "the last verification found" in operator.get("/")


def test_certificates_are_checked_and_downloaded(
    operator: Browser, tmp_path: Path
) -> None:
    pytest.importorskip("securesystemslib", reason="needs the extra sign")
    run("key", "new")
    run("forget", operator.ledger, "a")
    name = "event-1.json"
    assert "signed" in operator.get("/certificates")
    page = operator.finish(operator.post("/certificates/check", name=name))
    assert "no key that you trust" in page
    run("key", "trust", tmp_path / "config/fastfedul/signing.pem.pub")
    page = operator.finish(operator.post("/certificates/check", name=name))
    assert "a key that you trust signed it" in page
    assert "You may not conclude" in page
    found = operator.client.get(f"/certificates/{name}")
    file = operator.ledger.parent / "certificates" / name
    assert found.content == file.read_bytes()
    assert "attachment" in found.headers["content-disposition"]
    changed = json.loads(file.read_text())
    [signature] = changed["signatures"]
    signature["sig"] = "AAAA" + signature["sig"][4:]
    file.write_text(json.dumps(changed))
    page = operator.finish(operator.post("/certificates/check", name=name))
    assert "It does not hold: signature" in page
    file.unlink()
    assert "missing" in operator.get("/certificates")
    assert operator.get(f"/certificates/{name}", code=409)
    assert operator.post("/certificates/check", code=409, name="../../x.json")


def test_a_preview_judges_by_images_and_says_why_it_cannot(measured: Browser) -> None:
    file = io.BytesIO()
    np.savez(file, images=np.zeros((2, 8, 8), np.uint8))
    files = {"validation": ("own.npz", file.getvalue())}
    page = measured.finish(measured.post("/forget/plan", client="eve", files=files))
    assert "need the trainer torch" in page
    assert not list(measured.console.uploads.iterdir())


def test_a_file_that_cannot_be_traced_is_refused_by_one_line(
    measured: Browser,
) -> None:
    files = {"inputs": ("bad.npz", b"no archive")}
    page = measured.finish(measured.post("/trace", files=files))
    assert 'role="alert"' in page
    assert not list(measured.console.uploads.iterdir())
    assert "bad.npz" in measured.get("/trace")
    empty = {"inputs": ("", b"")}
    found = measured.client.post(
        "/trace",
        data={"secret": measured.secret()},
        files=empty,
        headers={"origin": "http://127.0.0.1:8765"},
    )
    assert found.status_code in (409, 422)


def test_work_that_fails_in_any_way_is_a_failed_job() -> None:
    jobs = Jobs()

    def refused(say: object) -> None:
        raise FastFedULError("no room")

    def broken(say: object) -> None:
        raise ZeroDivisionError("by <zero>")

    try:
        first = jobs.start("trace", "x", (), refused)
        second = jobs.start("verify", "x", (), broken)
    finally:
        jobs.close()
    assert (first.state, first.error) == ("failed", "no room")
    # What waited when the console closed never began.
    assert second.state in ("failed", "waiting")


def test_old_jobs_give_way_and_too_many_are_refused() -> None:
    jobs = Jobs()
    go_on = threading.Event()
    try:
        for _ in range(60):
            job = jobs.start("verify", "x", (), lambda say: None)
            while job.is_open:
                pass
        assert jobs.find(1) is None
        assert jobs.newest("verify") is job
        jobs.start("trace", "x", (), lambda say: go_on.wait(30))
        for _ in range(KEPT_JOBS // 2 - 1):
            jobs.start("trace", "x", (), lambda say: None)
        with pytest.raises(FastFedULError, match="too many jobs"):
            jobs.start("trace", "x", (), lambda say: None)
    finally:
        go_on.set()
        jobs.close()


@pytest.mark.slow
def test_the_attacker_behind_wrong_answers_is_traced_and_judged(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="training needs the extra torch")
    config = RunConfig.from_options(attack="pixel", rounds=20, workers=1)
    train(config, tmp_path / "run")
    prepared = prepare(config)
    bad, own = io.BytesIO(), io.BytesIO()
    np.savez(bad, images=prepared.backdoor.images[:10])
    test = prepared.dataset
    np.savez(own, images=test.test_images[:50], labels=test.test_labels[:50])
    for browser in browser_at(tmp_path / "run"):
        browser.get(f"/?token={browser.console.sessions.token}")
        files = {"inputs": ("bad.npz", bad.getvalue())}
        page = browser.finish(browser.post("/trace", files=files))
        assert "client-0 stands out" in page
        assert "/forget?client=client-0" in page
        files = {"validation": ("own.npz", own.getvalue())}
        page = browser.finish(
            browser.post("/forget/plan", client="client-0", files=files)
        )
        assert "Your 50 images" in page
        assert "right before" in page
        assert "Attack success" in browser.get("/compare")
