"""Methods as ledgers, requests and users meet them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    FastFedUL,
    ForgetRequest,
    InvalidInputError,
    Model,
    Needs,
    Params,
    Round,
    UnlearnRefusedError,
    UnlearnRequest,
    forget,
)
from fastfedul.forgetting.requests import method_for
from fastfedul.methods.registry import find_installed, find_method
from fastfedul.params import Layout

LAYOUT = Layout.of({"w": np.zeros(3)})


@pytest.mark.parametrize(
    "name",
    [
        "federaser",
        "fedaccum",
        "fedrecover",
        "kd",
        "fast-fedul-paper",
        "fast-fedul-1",
        "fast-fedul-2",
        "fast-fedul-3",
    ],
)
def test_sums_are_refused_with_what_to_do(name: str, tmp_path: Path) -> None:
    start = Model(Params.zeros(LAYOUT))
    with DiskLedger.create(tmp_path / "ledger", start, history="sums") as ledger:
        one = Params(LAYOUT, np.ones(3, np.float32))
        updates = tuple(ClientUpdate(client, 0.5, one) for client in ("ann", "bob"))
        ledger.append(Round(0, updates))

        with pytest.raises(
            UnlearnRefusedError, match="keeps sums per client; use the default method"
        ):
            find_method(name)(UnlearnRequest(ledger, frozenset({"ann"})))


OWN = """
from dataclasses import dataclass
from typing import ClassVar
from fastfedul import Needs

open("imported", "w").close()


@dataclass(frozen=True)
class Own:
    name: ClassVar[str] = "own"
    needs: ClassVar[Needs] = Needs()

    def __call__(self, request): ...
"""


def test_a_user_may_name_a_class_of_the_working_folder_and_a_file_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "methods_in_this_folder.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = "methods_in_this_folder:Own"
    with pytest.raises(InvalidInputError, match="no installed method is called"):
        find_installed(name)
    asked = ForgetRequest(
        1, "ann", "2026-01-01T00:00:00+00:00", None, "waiting", None, None, None, name
    )
    with pytest.raises(InvalidInputError, match="no installed method is called"):
        method_for(asked, FastFedUL())
    assert not (tmp_path / "imported").exists()
    assert find_method(name).name == "own"


def test_a_method_must_give_back_a_result(tmp_path: Path) -> None:
    class Silent:
        name = "silent"
        needs = Needs()

        def __call__(self, request: UnlearnRequest) -> None:
            return None

    start = Model(Params.zeros(LAYOUT))
    with DiskLedger.create(tmp_path / "ledger", start) as ledger:
        one = Params(LAYOUT, np.ones(3, np.float32))
        ledger.append(Round(0, (ClientUpdate("ann", 1.0, one),)))
        wrong: Any = Silent()
        with pytest.raises(InvalidInputError, match="the result of silent is"):
            forget(ledger, ["ann"], wrong)
        assert ledger.clients()["ann"].state == "active"
