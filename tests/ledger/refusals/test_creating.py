"""Models, settings and folders that no ledger can start from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfedul import (
    DiskLedger,
    FastFedULError,
    InvalidInputError,
    LedgerError,
    LedgerReader,
    MemoryLedger,
    Model,
    verify,
)
from tests.support.refusals import WritableLedger, params, round_of, with_value


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize(
    ("initial", "named"),
    [
        (Model(with_value(math.nan)), "NaN"),
        (Model(with_value(math.inf)), "NaN"),
        (Model(params(0), {"bias": np.zeros(2)}), "'bias'"),
        (Model(params(0), {"kind": np.array(["a"])}), "'kind'"),
        (Model(params(0), {"kind": np.array([1j])}), "'kind'"),
    ],
)
def test_a_model_no_ledger_can_start_from(
    kind: str, initial: Model, named: str, tmp_path: Path
) -> None:
    def create() -> WritableLedger:
        if kind == "memory":
            return MemoryLedger.create(initial)
        return DiskLedger.create(tmp_path / "ledger", initial)

    with pytest.raises(InvalidInputError) as caught:
        create()
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"update_dtype": "float8"}, "'float8'"),
        ({"step_dtype": "int4"}, "'int4'"),
        ({"history": "steps"}, "'steps'"),
        ({"budget": 0}, "choose more"),
        ({"budget": 100_000}, "steps of a round take at least"),
        ({"budget": 100_000, "history": "sums"}, "the models of this ledger take"),
        ({"aggregation": "FedAdam"}, "'FedAdam'"),
        ({"aggregation": "fed-avg-m"}, "'fed-avg-m'"),
    ],
)
def test_settings_no_ledger_can_have(
    settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        DiskLedger.create(tmp_path / "ledger", Model(params(0)), **settings)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        with pytest.raises(LedgerError, match=f"{name} exists already"):
            DiskLedger.create(tmp_path / name, Model(params(0)))
    with pytest.raises(LedgerError) as caught:
        DiskLedger.create(tmp_path / "file" / "under", Model(params(0)))
    assert "\n" not in str(caught.value)
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"
    assert (tmp_path / "file").read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir()} == {"full", "file"}


def test_the_folder_one_stands_in_is_taken_or_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused: FastFedULError | None = None
    try:
        DiskLedger.create(".", Model(params(0))).close()
    except FastFedULError as error:
        refused = error
    if refused is None:
        with LedgerReader(tmp_path) as reader:
            assert reader.num_rounds == 0
    else:
        assert "\n" not in str(refused)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [1e9, np.int64(10**9), True, "1e9"])
def test_a_budget_that_is_no_int_is_refused_and_the_ledger_stays(
    tmp_path: Path, value: Any
) -> None:
    path = tmp_path / "ledger"
    with DiskLedger.create(path, Model(params(0))) as ledger:
        ledger.append(round_of(0, "a", "b"))
        with pytest.raises(InvalidInputError, match="budget is a whole number"):
            ledger.set_budget(value)
    with pytest.raises(InvalidInputError, match="whole number"):
        DiskLedger.create(tmp_path / "other", Model(params(0)), budget=value)
    assert not (tmp_path / "other").exists()
    with LedgerReader(path) as reader:
        assert not verify(reader).problems


@pytest.mark.parametrize("name", ["a" * 300, "a" * 250, "x\0y"])
def test_a_name_that_no_folder_can_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(LedgerError):
        DiskLedger.create(tmp_path / name, Model(params(0)))
    assert not list(tmp_path.iterdir())
