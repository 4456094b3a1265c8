"""Applying requests and certifying them: all or nothing, and nothing uncertified."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    FastFedUL,
    InvalidInputError,
    Keep,
    LedgerReader,
    Model,
    NoSkew,
    Params,
    Removal,
    Round,
    Scalar,
    UnlearnRequest,
    add_request,
    apply_requests,
    cancel_request,
    forget,
    verify,
)
from fastfedul.errors import FastFedULError
from fastfedul.forgetting.certificates import read_certificate
from fastfedul.forgetting.checking import audit
from fastfedul.forgetting.requests import has_waiting
from fastfedul.forgetting.signing import SigningKey
from fastfedul.rng import stream

pytest.importorskip("cryptography")

SIZE = 3000
CLIENTS = ("a", "b", "c", "d")
START = Params.of({"w": np.zeros(SIZE, np.float32)})
KEY = SigningKey.of_bytes(bytes(range(32)))


def round_of(index: int, clients: tuple[str, ...] = CLIENTS) -> Round:
    """The round with this number: always the same, in every process."""
    rng = stream(7, "applying", index)
    vectors = {name: rng.normal(size=SIZE).astype(np.float32) for name in CLIENTS}
    updates = (
        ClientUpdate(name, 1 / len(clients), Params(START.layout, vectors[name]))
        for name in clients
    )
    return Round(index, tuple(updates))


def record(path: Path, num_rounds: int = 3, keep: Keep | None = None) -> Path:
    """Return a new, closed ledger."""
    with DiskLedger.create(path, Model(START)) as ledger:
        for index in range(num_rounds):
            round_ = round_of(index)
            ledger.append(keep(round_) if keep else round_)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return record(tmp_path / "ledger")


def holds(path: Path, file: Path) -> bool:
    with LedgerReader(path) as ledger:
        assert verify(ledger).problems == ()
        return audit(read_certificate(file), ledger, [KEY.public]).ok


def test_requests_are_applied_in_order_and_certified(
    path: Path, tmp_path: Path
) -> None:
    add_request(path, "c", "first")
    add_request(path, "a")
    folder = tmp_path / "somewhere" / "else"
    with DiskLedger(path) as ledger:
        assert has_waiting(ledger)
        done = apply_requests(ledger, certificates=folder, key=KEY)
        assert not has_waiting(ledger)
        assert apply_requests(ledger, certificates=folder, key=KEY) == ()
        assert [event.clients for event in ledger.events()] == [("c",), ("a",)]
        states = {name: entry.state for name, entry in ledger.clients().items()}
        assert states == {"a": "erased", "b": "active", "c": "erased", "d": "active"}
        with pytest.raises(InvalidInputError, match="was forgotten"):
            ledger.append(round_of(3))
        ledger.append(round_of(3, ("b", "d")))
    assert [one.request.client for one in done] == ["c", "a"]
    assert [one.request.state for one in done] == ["applied", "applied"]
    assert [one.certificate for one in done] == [folder / "1.json", folder / "2.json"]
    assert all(one.signed and holds(path, folder / "1.json") for one in done)
    found = read_certificate(folder / "1.json").predicate
    assert found.clients == ["c"]
    assert found.requests[0].reason == "first"
    assert (found.rounds.recorded, found.rounds.taken_part) == (3, 3)
    assert found.history == "erased"
    assert found.coverage.all == 1
    by_hand = record(tmp_path / "by hand")
    with DiskLedger(by_hand) as other, LedgerReader(path) as ledger:
        forget(other, ["c"], erase=True)
        forget(other, ["a"], erase=True)
        other.append(round_of(3, ("b", "d")))
        assert other.chain == ledger.chain
        same = other.final.params.flat.tobytes() == ledger.final.params.flat.tobytes()
        assert same


def test_what_the_method_refuses_is_a_refused_request_with_the_reason(
    tmp_path: Path,
) -> None:
    with DiskLedger.create(tmp_path / "ledger", Model(START)) as ledger:
        for index in range(10):
            updates = tuple(
                replace(u, kept=u.client != "b" or index == 0, keep_probability=0.5)
                for u in round_of(index).updates
            )
            ledger.append(Round(index, updates))
        add_request(ledger.path, "b")
        add_request(ledger.path, "a")
        before = ledger.final.params.flat.tobytes()
        first, second = apply_requests(ledger, certificates=tmp_path / "certificates")
        assert first.request.state == "refused"
        assert "only 10% of what client 'b'" in (first.request.answer or "")
        assert first.certificate is None
        assert second.request.state == "applied"
        assert not second.signed
        assert ledger.clients()["b"].state == "active"
        assert ledger.final.params.flat.tobytes() != before
        assert verify(ledger).problems == ()
        # With another limit it can be asked again.
        add_request(ledger.path, "b")
        [third] = apply_requests(
            ledger,
            certificates=tmp_path / "certificates",
            method=FastFedUL(minimum_coverage=0, skew=NoSkew()),
            erase=False,
        )
        assert third.request.state == "applied"
        assert ledger.clients()["b"].state == "forgotten"
    names = {file.name for file in (tmp_path / "certificates").iterdir()}
    assert names == {"2.json", "3.json"}
    certificate = read_certificate(tmp_path / "certificates" / "3.json")
    assert not certificate.is_signed
    found = certificate.predicate
    assert found.history == "kept"
    assert found.coverage.by_client is not None
    [coverage] = found.coverage.by_client
    assert coverage == pytest.approx(0.1)
    assert found.bound is not None
    assert found.bound.distance is None


class Cancelling(FastFedUL):
    """Somebody cancels the request while the method is at work."""

    def __call__(self, request: UnlearnRequest) -> Removal:
        cancel_request(request.ledger.ledger.path, 1)  # type: ignore[attr-defined]
        return FastFedUL()(request)


def test_a_request_cancelled_at_the_last_moment_is_not_applied(
    path: Path, tmp_path: Path
) -> None:
    add_request(path, "a")
    with DiskLedger(path) as ledger:
        before = ledger.final.params.flat.tobytes()
        folder = tmp_path / "certificates"
        assert apply_requests(ledger, certificates=folder, method=Cancelling()) == ()
        assert ledger.requests()[0].state == "cancelled"
        assert ledger.clients()["a"].state == "active"
        assert ledger.final.params.flat.tobytes() == before
    assert not folder.exists()


def test_a_missing_certificate_is_written_again_to_the_same_bytes(
    path: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "certificates"
    add_request(path, "a", "raison d'être \U0001f600")
    with DiskLedger(path) as ledger:
        apply_requests(ledger, certificates=folder, key=KEY)
        forget(ledger, ["b"], erase=False)
        text = (folder / "1.json").read_bytes()
        (folder / "1.json").unlink()
        assert apply_requests(ledger, certificates=folder, key=KEY) == ()
    assert (folder / "1.json").read_bytes() == text
    assert holds(path, folder / "event-2.json")


def test_a_certificate_without_signature_is_signed_once_there_is_a_key(
    path: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "certificates"
    add_request(path, "a")
    with DiskLedger(path) as ledger:
        apply_requests(ledger, certificates=folder)
        assert not read_certificate(folder / "1.json").is_signed
        apply_requests(ledger, certificates=folder, key=KEY)
        signed = (folder / "1.json").read_bytes()
        other = SigningKey.of_bytes(bytes(32))
        apply_requests(ledger, certificates=folder, key=other)
        apply_requests(ledger, certificates=folder)
    assert (folder / "1.json").read_bytes() == signed
    assert holds(path, folder / "1.json")


def test_another_ledgers_certificates_are_not_written_over(
    path: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "certificates"
    folder.mkdir()
    (folder / "1.json").write_text("somebody else's")
    add_request(path, "a")
    with DiskLedger(path) as ledger:
        [done] = apply_requests(ledger, certificates=folder, key=KEY)
    assert (folder / "1.json").read_text() == "somebody else's"
    assert done.certificate is not None
    assert holds(path, done.certificate)
    assert len(list(folder.iterdir())) == 2


def test_a_folder_that_cannot_be_written_loses_nothing(
    path: Path, tmp_path: Path
) -> None:
    blocked = tmp_path / "certificates"
    blocked.write_text("a file in the way")
    add_request(path, "a")
    with DiskLedger(path) as ledger:
        with pytest.raises(FastFedULError, match="is forgotten, but the certificate"):
            apply_requests(ledger, certificates=blocked, key=KEY)
        assert ledger.requests()[0].state == "applied"
        blocked.unlink()
        apply_requests(ledger, certificates=blocked, key=KEY)
    assert holds(path, blocked / "1.json")


PROGRAM = """
import json, os, signal, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import test_requests as here

path, folder, last = sys.argv[2], sys.argv[3], int(sys.argv[4])
seen = []


def watch(event, arguments):
    if event in ("open", "os.rename", "os.remove", "os.mkdir"):
        if len(seen) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        seen.append(f"{event} {arguments[0]}")


with here.DiskLedger(path) as ledger:
    sys.addaudithook(watch)
    here.apply_requests(ledger, certificates=Path(folder), key=here.KEY)
    print(json.dumps(seen))
"""


def apply_in_process(path: Path, folder: Path, last: int) -> str:
    """Apply in another process, which dies before it touches a file once more."""
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", PROGRAM, here, str(path), str(folder), str(last)]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120)
    assert found.returncode in (0, -signal.SIGKILL)
    assert (found.returncode == 0) == bool(found.stdout)
    return found.stdout


@pytest.mark.slow
def test_a_process_killed_while_applying_leaves_each_request_whole(
    tmp_path: Path,
) -> None:
    full = record(tmp_path / "full", 4)
    asked = CLIENTS[:3]
    for client in asked:
        add_request(full, client, f"by {client}")
    whole = tmp_path / "whole"
    shutil.copytree(full, whole)
    touched = json.loads(apply_in_process(whole, tmp_path / "all", -1))
    with LedgerReader(whole) as ledger:
        chain, model = ledger.chain, ledger.final.params.flat.tobytes()
    # Around each certificate, and here and there in between.
    papers = [i for i, text in enumerate(touched) if "/all" in text]
    between = range(3, len(touched), len(touched) // 6)
    counts = set()
    for last in sorted({*papers[:2], *papers[-4:], *between}):
        path, folder = tmp_path / f"killed-{last}", tmp_path / f"papers-{last}"
        shutil.copytree(full, path)
        assert not apply_in_process(path, folder, last)
        with DiskLedger(path) as ledger:
            assert verify(ledger).problems == ()
            assert verify(ledger).num_strays == 0
            states = [request.state for request in ledger.requests()]
            gone = [ledger.clients()[client].state for client in asked]
            assert set(states) <= {"waiting", "applied"}
            assert [s == "applied" for s in states] == [s == "erased" for s in gone]
            counts.add(states.count("applied"))
            apply_requests(ledger, certificates=folder, key=KEY)
            assert ledger.chain == chain
            assert ledger.final.params.flat.tobytes() == model
        for request in range(1, 4):
            assert holds(path, folder / f"{request}.json")
        assert read_certificate(folder / "1.json").predicate.clients == ["a"]
    assert counts == {0, 1, 2, 3}


def test_a_skew_that_does_not_fit_uses_up_no_request(tmp_path: Path) -> None:
    start = Model(Params.of({"w": np.zeros(3, np.float32)}))
    layout = start.params.layout
    with DiskLedger.create(tmp_path / "ledger", start, history="sums") as ledger:
        for index in range(2):
            updates = tuple(
                ClientUpdate(
                    name,
                    1 / 3,
                    Params(layout, np.full(3, index + place, np.float32)),
                )
                for place, name in enumerate("abc")
            )
            ledger.append(Round(index, updates))
        add_request(tmp_path / "ledger", "b")

        with pytest.raises(InvalidInputError, match="the requests still wait"):
            apply_requests(
                ledger,
                certificates=tmp_path / "certificates",
                method=FastFedUL(skew=Scalar()),
            )

        assert [request.state for request in ledger.requests()] == ["waiting"]


def test_a_request_may_ask_for_its_method(path: Path) -> None:
    asked = add_request(path, "b", method="fast-fedul", settings={"damping": 0.07})
    assert (asked.method, asked.settings) == ("fast-fedul", {"damping": 0.07})
    add_request(path, "c")
    with DiskLedger(path) as ledger:
        expected = FastFedUL(skew=Scalar(0.07))(
            UnlearnRequest(ledger, frozenset({"b"}))
        )
        first, second = apply_requests(ledger, method=FastFedUL(skew=NoSkew()), key=KEY)
        details = [entry.details for entry in ledger.events()]
    assert first.forgetting is not None
    assert second.forgetting is not None
    np.testing.assert_allclose(
        first.forgetting.model.params.flat, expected.params.flat, atol=1e-6
    )
    assert details[0]["settings"] == {**FastFedUL(skew=Scalar(0.07)).settings()}
    assert details[1]["settings"] == {**FastFedUL(skew=NoSkew()).settings()}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"client": 3}, "a client name is text, not 3"),
        ({"client": ["a"]}, "a client name is text"),
        ({"path": None}, "a path is text, .* returned, not None"),
        ({"reason": 3}, "the reason of a request is text, not 3"),
        ({"method": "fast-fedul", "settings": 3}, "settings is a mapping by name"),
    ],
)
def test_arguments_of_wrong_types_get_one_line(
    path: Path, arguments: dict[str, object], said: str
) -> None:
    with pytest.raises(InvalidInputError, match=said):
        add_request(**{"path": path, "client": "a", **arguments})  # type: ignore[arg-type]
    with LedgerReader(path) as ledger:
        assert not ledger.requests()


@pytest.mark.parametrize(
    ("method", "settings", "said"),
    [
        ("os.path:join", None, "installed method"),
        ("nothing", None, "installed method"),
        ("federaser", None, "help of clients"),
        ("fast-fedul", {"colour": 1}, "no such setting"),
        (None, {"damping": 0.1}, "name of their method"),
    ],
)
def test_a_request_cannot_ask_for_every_method(
    path: Path, method: str | None, settings: dict[str, object] | None, said: str
) -> None:
    with pytest.raises(InvalidInputError, match=said):
        add_request(path, "b", method=method, settings=settings)
    with LedgerReader(path) as ledger:
        assert ledger.requests() == ()
