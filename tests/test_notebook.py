"""What a notebook shows of a ledger."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    InvalidInputError,
    LedgerReader,
    MemoryLedger,
    Model,
    Params,
    Round,
    add_request,
    apply_requests,
    erase,
    forget,
    open_ledger,
    preview,
)
from fastfedul.ledger.protocol import WritableLedger
from fastfedul.ledger.settings import LedgerSettings
from fastfedul.limits import path_of
from fastfedul.notebook import ledger_to_html
from fastfedul.records import History
from fastfedul.runs.training import RunSummary

START = Params.of({"w": np.zeros((4, 3), np.float32)})


def fill(ledger: WritableLedger) -> None:
    for index in range(2):
        updates = tuple(
            ClientUpdate(name, 1 / 3, Params(START.layout, START.flat + number))
            for number, name in enumerate(("ann", "<bob>", "cyd"))
        )
        ledger.append(Round(index, updates))


def test_a_ledger_says_who_took_part_and_what_it_keeps(tmp_path: Path) -> None:
    folder = tmp_path / "<b>"
    with DiskLedger.create(folder, Model(START), update_dtype="float16") as ledger:
        fill(ledger)
        forget(ledger, ["<bob>"], erase=False, key=None)
        chain = ledger.chain.hex()
    with LedgerReader(folder) as ledger:
        shown = ledger_to_html(ledger)
    assert "&lt;b&gt;" in shown
    assert "<b>" not in shown
    for text in ("2 active, 1 forgotten", "as float16", ">12<", ">2<", chain, " bytes"):
        assert text in shown


def test_a_closed_ledger_says_so_in_place_of_a_traceback(tmp_path: Path) -> None:
    with DiskLedger.create(tmp_path / "ledger", Model(START)) as ledger:
        pass
    assert "closed" in ledger_to_html(ledger)


def test_a_ledgers_text_has_its_place_and_size(tmp_path: Path) -> None:
    place = tmp_path / "ledger"
    with DiskLedger.create(place, Model(START)) as ledger:
        fill(ledger)
        assert repr(ledger) == f"<DiskLedger {place}: 2 rounds, 3 clients>"
    assert "closed" in repr(ledger)
    in_memory = MemoryLedger.create(Model(START))
    assert repr(in_memory) == "<MemoryLedger: 0 rounds, 0 clients>"


def test_forgetting_takes_a_place_or_a_run_and_closes_it(tmp_path: Path) -> None:
    place = tmp_path / "ledger"
    with DiskLedger.create(place, Model(START)) as ledger:
        fill(ledger)
    run = RunSummary(place, 2, None, None, "", 0.0, ("ann", "<bob>", "cyd"), ())
    assert path_of(run) == place
    assert preview(run, ["ann"]).clients == ("ann",)
    assert forget(run, ["<bob>"], erase=False, key=None).committed
    assert erase(str(place), ["<bob>"], key=None).erased
    assert add_request(run, "cyd").number == 1
    assert [one.request.client for one in apply_requests(run, key=None)] == ["cyd"]
    with open_ledger(run) as ledger:
        assert ledger.clients()["cyd"].state == "erased"
    for wrong in (3, None, b"bytes"):
        with pytest.raises(
            InvalidInputError, match=r"a path is text, .*train returned"
        ):
            open_ledger(wrong)  # type: ignore[call-overload]
    assert "<th>attackers</th><td>none</td>" in run._repr_html_()


@pytest.mark.parametrize("history", ["rounds", "sums"])
def test_a_ledger_in_memory_is_shown_too(history: History) -> None:
    settings = LedgerSettings(layout=START.layout, history=history)
    ledger = MemoryLedger(Model(START), settings)
    assert "none yet" in ledger_to_html(ledger)
    fill(ledger)
    shown = ledger_to_html(ledger)
    assert "Ledger in memory" in shown
    assert "3 active" in shown
    assert ("a sum for each client" in shown) == (history == "sums")
