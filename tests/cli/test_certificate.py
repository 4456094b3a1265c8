"""`fastfedul certificate` and `fastfedul key`, run as a user runs them."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fastfedul import DiskLedger, Model
from tests.support.audited import CLIENTS, START, round_of
from tests.support.commands import one_line, run, run_json

pytest.importorskip("cryptography")

pytestmark = pytest.mark.usefixtures("own_configuration")


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "history"
    with DiskLedger.create(path, Model(START), federation="Four of us") as made:
        for index in range(3):
            made.append(round_of(index, CLIENTS))
    return path


def check(*words: object, code: int = 0) -> dict[str, Any]:
    return run_json("certificate", "check", *words, code=code)


@pytest.mark.slow
@pytest.mark.parametrize("skew", ["kronecker", "scalar", "none"])
def test_every_forgetting_has_a_certificate_and_kept_history_is_recomputed(
    ledger: Path, skew: str
) -> None:
    assert run_json("forget", ledger, "b", "--dry-run")["certificate"] is None
    assert not (ledger / "certificates").exists()
    found = run_json("forget", ledger, "b", "--skew", skew, "--keep-history")
    assert found["signed"] is False
    assert found["certificate"] == str(ledger / "certificates" / "event-1.json")
    checks = check(found["certificate"], code=3)["checks"]
    assert {c["name"]: c["verdict"] for c in checks}["recomputed"] == "holds"
    public = run_json("key", "new")["public_path"]
    later = run_json("forget", ledger, "b")
    assert later["certificate"] == str(ledger / "certificates" / "event-2.json")
    assert check(later["certificate"], "--public-key", public)["signed"] is True
    # The first one was signed too, once there was a key.
    first = check(found["certificate"], "--public-key", public)
    assert first["ok"] is first["signed"] is True


@pytest.mark.slow
def test_only_a_trusted_key_gives_exit_code_0(ledger: Path, tmp_path: Path) -> None:
    made = run_json("key", "new")
    certificate = run_json("forget", ledger, "b")["certificate"]
    # A key of one's own proves nothing to anybody else.
    alone = tmp_path / "alone.json"
    shutil.copy(certificate, alone)
    for file in (certificate, alone):
        shown = run("certificate", "check", file, code=3)
        [line] = shown.stderr.strip().splitlines()
        assert line.startswith("not authenticated: you trust no key; ")
        assert "You may conclude" not in shown.stdout
    assert check(alone, "--public-key", made["public_path"])["ok"] is True
    pinned = run_json("key", "trust", made["public_path"])
    assert pinned["fingerprint"] == made["fingerprint"]
    assert run_json("key", "trust", made["public_path"]) == pinned
    assert [key["fingerprint"] for key in run_json("key", "trusted")["keys"]] == [
        made["fingerprint"]
    ]
    good = run("certificate", "check", alone).stdout
    assert f"holds signature: the trusted key {made['fingerprint']}" in good
    assert "Four of us" in good
    assert "You may not conclude" in good
    # A key on the command line counts alone.
    other = run_json("key", "new", tmp_path / "other.pem")
    wrong = run(
        "certificate", "check", alone, "--public-key", other["public_path"], code=3
    )
    assert "not authenticated: no key that you trust signed it" in wrong.stderr
    assert made["fingerprint"] in wrong.stderr
    facts = check(alone, "--public-key", other["public_path"], code=3)
    assert facts["ok"] is facts["authenticated"] is False
    run_json("key", "distrust", made["fingerprint"][:12])
    run("certificate", "check", alone, code=3)
    assert "0 trusted keys" in one_line(
        run("key", "distrust", made["fingerprint"], code=2)
    )
    assert "trust no key yet" in run("key", "trusted").stdout


@pytest.mark.slow
def test_a_check_says_what_does_not_hold_and_exits_with_1(
    ledger: Path, tmp_path: Path
) -> None:
    public = run_json("key", "new")["public_path"]
    certificate = Path(run_json("forget", ledger, "b")["certificate"])
    envelope = json.loads(certificate.read_text())
    payload = base64.b64decode(envelope["payload"])
    changed = payload.replace(b'"taken_part":3', b'"taken_part":2')
    assert changed != payload
    envelope["payload"] = base64.b64encode(changed).decode()
    alone = tmp_path / "alone.json"
    alone.write_text(json.dumps(envelope))
    key = ("--public-key", public)
    bad = run("certificate", "check", alone, "--run", ledger, *key, code=1)
    assert "fails signature" in bad.stdout
    assert "fails log: entry 1 of the log says otherwise about: rounds" in bad.stdout
    assert "You may conclude" not in bad.stdout
    assert "does not hold: signature, log fails" in bad.stderr
    shutil.copy(certificate, alone)
    wrong = run("certificate", "check", alone, *key, "--ledger-id", "0" * 32, code=1)
    assert "does not hold: ledger fails" in wrong.stderr
    twin = tmp_path / "twin"
    with DiskLedger.create(twin, Model(START)) as other:
        other.append(round_of(0, CLIENTS))
    failed = check(certificate, "--run", twin, *key, code=1)["checks"][-1]
    assert (failed["name"], failed["verdict"]) == ("ledger", "fails")


def test_a_check_exits_with_2_where_there_is_nothing_to_check(
    ledger: Path, tmp_path: Path
) -> None:
    certificate = run_json("forget", ledger, "b")["certificate"]
    nothing = tmp_path / "nothing.json"
    assert "cannot read" in one_line(run("certificate", "check", nothing, code=2))
    nothing.write_text("{}")
    assert "no certificate" in one_line(run("certificate", "check", nothing, code=2))
    key = ("--public-key", nothing)
    assert "no usable public key" in one_line(
        run("certificate", "check", certificate, *key, code=2)
    )
    where = ("--run", tmp_path / "nowhere")
    assert "nothing at" in one_line(
        run("certificate", "check", certificate, *where, code=2)
    )
    run("certificate", "check", code=2)
    # A folder of trusted keys in which a key has another's name.
    public = Path(run_json("key", "new")["public_path"])
    pinned = Path(run_json("key", "trust", public)["path"])
    pinned.rename(pinned.with_name(f"{'0' * 64}.pub"))
    assert "does not hold the key of its name" in one_line(
        run("certificate", "check", certificate, code=2)
    )


def test_keys_are_made_once_and_shown_without_the_private_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "key new" in one_line(run("key", "show", code=2))
    made = run_json("key", "new")
    path = Path(made["path"])
    assert path == tmp_path / "config" / "fastfedul" / "signing.pem"
    assert path.stat().st_mode & 0o777 == 0o600
    assert "not overwritten" in one_line(run("key", "new", code=1))
    shown = run_json("key", "show", "--public-key", tmp_path / "signer.pub")
    assert shown["fingerprint"] == made["fingerprint"]
    assert (tmp_path / "signer.pub").read_text() == made["public_key"]
    assert "cannot write" in one_line(
        run("key", "show", "--public-key", tmp_path / "signer.pub", code=2)
    )
    secret = path.read_text().splitlines()[1]
    text = run("key", "show", f"file:{path}").stdout
    assert secret not in text
    assert made["fingerprint"] in text
    elsewhere = run("key", "new", tmp_path / "another.pem").stdout
    assert "export FASTFEDUL_KEY=" in elsewhere
    monkeypatch.setenv("FASTFEDUL_KEY", "awskms:alias/forgetting")
    assert "which is no file" in one_line(run("key", "new", code=2))
    path.chmod(0o644)
    assert "chmod 600" in one_line(run("key", "show", path, code=2))
