"""Names that no client can have, and odd ones that are plain data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfedul import (
    DiskLedger,
    FastFedUL,
    InvalidInputError,
    LedgerReader,
    NoSkew,
    forget,
    read_round,
    verify,
)
from tests.support.refusals import LAYOUT, WritableLedger, assert_refused, round_of


@pytest.mark.parametrize(
    ("name", "named"),
    [
        (7, "7"),
        (None, "None"),
        (b"bytes", "b'bytes'"),
        (("a",), "('a',)"),
        ("", "''"),
        ("\ud800", "Unicode"),
        ("a\udfffb", "Unicode"),
        ("x" * 65_537, "65537 bytes"),
        ("\u00e9" * 40_000, "80000 bytes"),
    ],
)
@pytest.mark.parametrize("companions", [(), ("a", "b")])
def test_a_name_that_cannot_be_one(
    ledger: WritableLedger, name: Any, named: str, companions: tuple[str, ...]
) -> None:
    assert_refused(ledger, round_of(2, *companions, name), named)


ODD_NAMES = [
    "../../etc/passwd",
    "/etc/passwd",
    "a/b",
    "a\\b",
    ".",
    "..",
    "a\0b",
    "a\0c",
    "😀",
    "x" * 10_000,
    "x" * 65_536,
    " ",
    "\n",
    "two\nlines",
    "%00",
    "%",
    "_",
    "*",
    "'; DROP TABLE clients; --",
    '"quoted"',
    "A",
    "caf\u00e9",
    "\ufeff",
    "nan",
    "1",
    "01",
    "1.0",
]


def test_odd_names_are_plain_data(ledger: WritableLedger, tmp_path: Path) -> None:
    for start in range(0, len(ODD_NAMES), 7):
        ledger.append(round_of(ledger.num_rounds, *ODD_NAMES[start : start + 7]))
    ledger.append(round_of(ledger.num_rounds, *ODD_NAMES, "a"))
    assert set(ledger.clients()) == {*ODD_NAMES, *"abcd"}
    assert [u.client for u in ledger.updates_in(ledger.num_rounds - 1)] == sorted(
        [*ODD_NAMES, "a"]
    )
    for name in ODD_NAMES:
        assert ledger.clients()[name].num_updates == 2
        assert [u.client for u in ledger.updates_of(name)] == [name, name]
        own = np.zeros(LAYOUT.size)
        for index in (update.round for update in ledger.updates_of(name)):
            recorded = read_round(ledger, index)
            assert recorded.step is not None
            [update] = [u for u in recorded.updates if u.client == name]
            assert update.delta is not None
            away = recorded.step.flat.astype(np.float64) - update.delta.flat
            own += update.share / (1 - update.share) * away
        np.testing.assert_allclose(
            ledger.own_difference(name), own, rtol=1e-4, atol=1e-5
        )
    if isinstance(ledger, DiskLedger):
        assert verify(ledger).problems == ()
        assert_only_expected_files(tmp_path)


def assert_only_expected_files(folder: Path) -> None:
    expected = re.compile(
        r"certificates(/event-\d+\.json)?|"
        r"ledger(/(index\.sqlite|lock|requests|arrays(/[0-9]{8}\.safetensors)?))?"
    )
    for path in folder.rglob("*"):
        assert expected.fullmatch(str(path.relative_to(folder))), path


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_client_with_an_odd_name_can_be_forgotten_and_erased(
    ledger: WritableLedger, name: str, tmp_path: Path
) -> None:
    ledger.append(round_of(2, "a", name))
    one = forget(ledger, [name], FastFedUL(skew=NoSkew()), erase=True)
    assert one.clients == (name,)
    assert ledger.clients()[name].state == "erased"
    assert ledger.events()[-1].clients == (name,)
    with pytest.raises(InvalidInputError) as caught:
        ledger.append(round_of(3, "a", name))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    if isinstance(ledger, DiskLedger):
        assert verify(ledger).problems == ()
        ledger.close()
        with LedgerReader(ledger.path) as reader:
            assert reader.clients()[name].state == "erased"
        assert_only_expected_files(tmp_path)
