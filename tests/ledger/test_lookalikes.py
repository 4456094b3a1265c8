"""One client has one spelling, and names that look alike are pointed out."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import numpy as np
import pytest

from fastfedul import (
    DiskLedger,
    InvalidInputError,
    MemoryLedger,
    Model,
    Params,
    add_request,
    forget,
    preview,
)
from fastfedul.ledger.lookalikes import alphabets_of, lookalike_warnings
from tests.support.rounds import random_round

START = Params.of({"w": np.zeros(6, np.float32)})
COMPOSED, APART = (unicodedata.normalize(form, "Orléans") for form in ("NFC", "NFD"))
WIDE, CYRILLIC = "Ｃlient-3", "сlient-3"


def test_one_client_cannot_be_two_by_its_spelling(tmp_path: Path) -> None:
    assert COMPOSED != APART
    rng = np.random.default_rng(1)
    with DiskLedger.create(tmp_path / "ledger", Model(START)) as disk:
        for ledger in (disk, MemoryLedger.create(Model(START))):
            ledger.append(random_round(0, (COMPOSED, "b"), START.layout, rng))
            with pytest.raises(InvalidInputError, match="form NFC") as caught:
                ledger.append(random_round(1, (APART, "b"), START.layout, rng))
            assert repr(COMPOSED) in str(caught.value)
            assert ascii(APART) in str(caught.value)
            assert ledger.num_rounds == 1
            with pytest.raises(InvalidInputError, match="form NFC"):
                forget(ledger, [APART])
        with pytest.raises(InvalidInputError, match="form NFC"):
            add_request(disk.path, APART)
        add_request(disk.path, COMPOSED)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("client-3", WIDE),
        ("client-3", "Client-3"),
        ("client-3", "client\N{ZERO WIDTH SPACE}-3"),
        ("client-3", "client-3 "),
        ("straße", "STRASSE"),
        ("ﬁrst", "first"),
    ],
)
def test_names_that_look_the_same_are_pointed_out(name: str, other: str) -> None:
    for one, two in ((name, other), (other, name)):
        [text] = lookalike_warnings([one], {one, two, "somebody else"})
        assert ascii(one) in text
        assert ascii(two) in text
    assert lookalike_warnings(["somebody else"], {name, other, "somebody else"}) == ()


def test_alphabets_that_look_alike_are_pointed_out_if_mixed() -> None:
    assert alphabets_of(CYRILLIC) == ("CYRILLIC", "LATIN")
    [text] = lookalike_warnings([CYRILLIC], {CYRILLIC, "client-3"})
    assert "Cyrillic and Latin" in text
    for plain in ("больница-7", "hospital-7", "病院 7 east", "naïve é", "νοσοκομείο"):
        assert lookalike_warnings([plain], {plain, "other"}) == ()


def test_whoever_forgets_is_told() -> None:
    ledger = MemoryLedger.create(Model(START))
    names = ("client-3", WIDE, "b")
    ledger.append(random_round(0, names, START.layout, np.random.default_rng(2)))
    assert any("looks like" in text for text in preview(ledger, [WIDE]).warnings)
    assert not any("looks like" in text for text in preview(ledger, ["b"]).warnings)
    assert any("looks like" in text for text in forget(ledger, ["client-3"]).warnings)
