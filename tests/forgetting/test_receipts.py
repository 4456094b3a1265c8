"""Receipts: what the ledger has of a client, proved without anybody else's name."""

from __future__ import annotations

import json
import shutil
import sqlite3
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.altered_envelopes import change, places_of, value_at
from fastfedul import (
    DiskLedger,
    InvalidInputError,
    LedgerDamagedError,
    LedgerReader,
    Model,
    forget,
    verify,
)
from fastfedul.forgetting.envelopes import Envelope
from fastfedul.forgetting.receipts import (
    make_receipt,
    other_rounds,
    parse_receipt,
    wrong_rounds,
)
from fastfedul.ledger.merkle_tree import Place, Proof, is_included, prove, root_of
from fastfedul.ledger.roots import tag_of
from fastfedul.ledger.store.schema import digest_of
from tests.support.audited import START, key_of, round_of
from tests.support.commands import one_line, run, run_json

pytest.importorskip("cryptography")
KEY = key_of(1)
CLIENTS = ("anna-hospital", "berlin-clinic", "carla-practice", "dora-centre", "emil")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("receipts") / "ledger"
    with DiskLedger.create(path, Model(START)) as ledger:
        for index in range(4):
            # Somebody else is missing in every round.
            names = tuple(n for i, n in enumerate(CLIENTS) if i != index)
            ledger.append(round_of(index, names))
    return path


@pytest.fixture
def path(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "ledger"))


TAGS = st.lists(st.binary(min_size=32, max_size=32), unique=True, max_size=20)


@settings(max_examples=200)
@given(tags=TAGS, other=st.binary(min_size=32, max_size=32))
def test_a_tag_is_proved_to_be_there_or_not(tags: list[bytes], other: bytes) -> None:
    tags = sorted(tags)
    root = root_of(tags)
    for tag in tags:
        assert is_included(tag, prove(tags, tag), root) is True
    assert is_included(other, prove(tags, other), root) is (other in tags)
    # No proof of a tree proves the opposite, nor anything about another tree.
    for tag in tags:
        proof = prove(tags, tag)
        assert is_included(tag, proof, root_of([*tags, b"\xff" * 33])) is None
        without = [t for t in tags if t != tag]
        assert is_included(tag, prove(without, tag), root) is None


def test_neighbours_that_are_not_beside_each_other_prove_nothing() -> None:
    tags = [bytes([number]) * 32 for number in (1, 3, 5, 7, 9)]
    root = root_of(tags)
    hidden = tags[2]
    one, three, seven, nine = (prove(tags, tags[i]).places[0] for i in (0, 1, 3, 4))
    for places in (
        (three, seven),
        (one, nine),
        (three,),
        (seven,),
        (),
        (seven, three),
        (one, three),
        (Place(three.tag, 2, three.path), seven),
    ):
        for size in (5, 3, 0):
            assert is_included(hidden, Proof(size, places), root) is None


def test_the_tree_of_three_by_hand() -> None:
    a, b, c = (bytes([number]) * 32 for number in (1, 2, 3))

    def leaf(tag: bytes) -> bytes:
        return sha256(b"\x00" + tag).digest()

    two = sha256(b"\x01" + leaf(a) + leaf(b)).digest()
    top = sha256(b"\x01" + two + leaf(c)).digest()
    expected = sha256(b"\x02" + (3).to_bytes(8, "big") + top).digest()
    assert root_of([a, b, c]) == expected


def test_a_receipt_says_and_proves_each_round(path: Path) -> None:
    with DiskLedger(path) as ledger:
        receipt = make_receipt(ledger, CLIENTS[0], KEY)
        assert receipt.included == (1, 2, 3)
        assert wrong_rounds(receipt) == ()
        read = parse_receipt(receipt.envelope.to_text())
        assert read == receipt
        others = [make_receipt(ledger, name, KEY) for name in CLIENTS[1:]]
        # Everybody sees the same roots, and each a secret of its own.
        for other in others:
            roots = [one.root for one in other.said.rounds]
            assert roots == [one.root for one in receipt.said.rounds]
        secrets = {one.said.secret for one in (receipt, *others)}
        assert len(secrets) == len(CLIENTS)
        stranger = make_receipt(ledger, "never seen", KEY)
        assert stranger.included == ()
        assert wrong_rounds(stranger) == ()
        forget(ledger, [CLIENTS[0]])
        after = make_receipt(ledger, CLIENTS[0], KEY)
    assert after.included == ()
    assert wrong_rounds(after) == ()
    assert after.said.secret == receipt.said.secret
    for before, now in zip(receipt.said.rounds[1:], after.said.rounds[1:], strict=True):
        assert now.size == before.size - 1
        assert now.root != before.root


def test_a_receipt_is_made_from_the_stored_roots_and_checks_against_them(
    path: Path, tmp_path: Path
) -> None:
    with DiskLedger(path) as ledger:
        old = [make_receipt(ledger, name, KEY) for name in CLIENTS]
        stored = [ledger.root_of(index).hex() for index in range(4)]
        assert [one.root for one in old[0].said.rounds] == stored
        assert old[0].said.root_chain == ledger.root_chain.hex()
        assert other_rounds(old[0], ledger) == ()
        forget(ledger, [CLIENTS[0]])
        assert verify(ledger).problems == ()
        new = [make_receipt(ledger, name, KEY) for name in CLIENTS]
        for receipt in new:
            assert wrong_rounds(receipt) == ()
            assert other_rounds(receipt, ledger) == ()
        # Round 0 had no erased client, so its root is the same for good.
        for receipt in old:
            assert other_rounds(receipt, ledger) == (1, 2, 3)
    assert [receipt.included for receipt in new] == [
        (),
        *(receipt.included for receipt in old[1:]),
    ]
    with DiskLedger.create(tmp_path / "other", Model(START)) as other:
        with pytest.raises(InvalidInputError, match="the receipt is of ledger"):
            other_rounds(new[0], other)
        other.append(round_of(0, CLIENTS))
        longer = make_receipt(other, CLIENTS[0], KEY)
    shutil.rmtree(tmp_path / "other")
    said = longer.said.model_copy(update={"ledger": new[0].said.ledger})
    rounds = said.rounds * 5
    longer = replace(longer, said=said.model_copy(update={"rounds": rounds}))
    with (
        LedgerReader(path) as reader,
        pytest.raises(InvalidInputError, match="it is an older copy"),
    ):
        other_rounds(longer, reader)


def test_a_root_that_was_rewritten_gives_no_receipt(path: Path) -> None:
    index = sqlite3.connect(path / "index.sqlite", isolation_level=None)
    index.execute("UPDATE rounds SET root = zeroblob(32) WHERE round = 2")
    [row] = index.execute("SELECT * FROM rounds WHERE round = 2").fetchall()
    digest = digest_of("rounds", *row[:-1])
    index.execute("UPDATE rounds SET digest = ? WHERE round = 2", (digest,))
    index.close()
    with LedgerReader(path) as ledger:
        with pytest.raises(LedgerDamagedError, match="round 2: the root"):
            make_receipt(ledger, CLIENTS[0], KEY)
        assert any("round 2: the root" in text for text in verify(ledger).problems)


def test_a_receipt_names_nobody_else_and_tags_say_nothing_across_rounds(
    path: Path,
) -> None:
    with LedgerReader(path) as ledger:
        receipts = [make_receipt(ledger, name, None) for name in CLIENTS]
        seen: list[str] = []
        for receipt, name in zip(receipts, CLIENTS, strict=True):
            text = receipt.envelope.payload.decode()
            assert [other for other in CLIENTS if other in text] == [name]
            rounds = receipt.said.rounds
            seen += [place.tag for one in rounds for place in one.places]
    # A tag belongs to one client in one round.
    own = {
        tag_of(bytes.fromhex(r.said.secret), r.said.ledger.id, index).hex()
        for r in receipts
        for index in range(4)
    }
    assert len(own) == 4 * len(CLIENTS)
    assert set(seen) <= own


def test_no_changed_receipt_proves_anything(path: Path) -> None:
    """Whoever holds the key itself changes a field, and signs."""
    with LedgerReader(path) as ledger:
        receipt = make_receipt(ledger, CLIENTS[0], KEY)
    statement: Any = json.loads(receipt.envelope.payload)
    kept = {"made", "client", "chain", "root_chain", "federation"}
    for place in places_of(statement):
        if kept & set(place):
            continue
        old = value_at(statement, place)
        if isinstance(old, bool):
            new: object = not old
        elif isinstance(old, int):
            new = old + 1
        else:
            new = ("1" if old[:1] == "0" else "0") + old[1:]
        text = json.dumps(change(statement, place, new))
        signed = Envelope(text.encode()).signed_by(KEY).to_text()
        try:
            changed = parse_receipt(signed)
        except InvalidInputError as error:
            assert "\n" not in str(error)  # noqa: PT017
            continue
        assert wrong_rounds(changed), place


@pytest.mark.slow
def test_the_commands_make_and_check_it(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FASTFEDUL_KEY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "receipt.json"
    made = run_json("receipt", "make", path, CLIENTS[0], "--out", file)
    assert made["included"] == [1, 2, 3]
    assert made["signed"] is False
    assert file.stat().st_mode & 0o777 == 0o600
    again = run("receipt", "make", path, CLIENTS[0], "--out", file, code=2)
    assert "choose another file" in one_line(again)
    shown = run("receipt", "check", file, code=3)
    assert shown.stderr.startswith("not authenticated: ")
    assert made["warnings"] == []
    nobody = run("receipt", "make", path, "nobody", "--out", tmp_path / "nobody.json")
    assert "no recorded round has nobody" in nobody.stderr
    public = run_json("key", "new")["public_path"]
    file.unlink()
    run("receipt", "make", path, CLIENTS[0], "--out", file)
    found = run_json("receipt", "check", file, "--public-key", public)
    assert (found["ok"], found["included"]) == (True, [1, 2, 3])
    assert "1, 2, 3" in run("receipt", "check", file, "--public-key", public).stdout
    checked = ("receipt", "check", file, "--public-key", public, "--ledger", path)
    assert run_json(*checked)["other_roots"] == []
    run("forget", path, CLIENTS[1])
    bad = run(*checked, code=1)
    assert "the ledger has another root for round 0; it erased a client" in bad.stderr
    assert "receipt make" in bad.stderr
    assert run_json(*checked, code=1)["erased_since"] is not None
    envelope = parse_receipt(file.read_text()).envelope
    false = envelope.payload.replace(b'"included":true', b'"included":false')
    file.write_text(Envelope(false, envelope.signatures).to_text())
    bad = run("receipt", "check", file, "--public-key", public, code=1)
    assert "the proof of round 1 fails" in bad.stderr
    run("receipt", "check", public, code=2)
