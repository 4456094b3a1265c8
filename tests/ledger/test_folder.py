"""Where a ledger is, where one can be, and what is swept out of it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    FastFedULError,
    LedgerError,
    LedgerReader,
    Model,
    Params,
    Round,
    verify,
)
from fastfedul.ledger.store.folder import find_ledger, new_folder

START = Params.of({"w": np.zeros(5, np.float32)})


def round_of(index: int) -> Round:
    return Round(index, (ClientUpdate("ann", 1.0, START),))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with DiskLedger.create(tmp_path / "ledger", Model(START)) as made:
        made.append(round_of(0))
    return tmp_path / "ledger"


@pytest.mark.parametrize("name", ["x" * 300, "x\0y", "\ud800"])
@pytest.mark.parametrize("look", [find_ledger, new_folder, LedgerReader, DiskLedger])
def test_an_impossible_path_is_refused_in_one_line(
    look: type[LedgerReader], name: str, tmp_path: Path
) -> None:
    refusal = "cannot use the path|is no path; name a file or a folder"
    with pytest.raises(FastFedULError, match=refusal) as caught:
        look(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_link_that_leads_in_a_circle_is_not_nothing(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(LedgerError, match="symbolic links"):
        find_ledger(tmp_path / "loop")


def test_a_new_ledger_goes_where_nothing_is(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "none", "none/deeper"):
        assert new_folder(tmp_path / name) == tmp_path / name
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("full", "full/file", "dangling"):
        with pytest.raises(LedgerError, match="exists already"):
            new_folder(tmp_path / name)


def test_what_is_not_ours_is_named_and_left_alone(path: Path) -> None:
    arrays = path / "arrays"
    ours = ["00000099.safetensors", "123456789.safetensors"]
    odd = ["readme.txt", "weights.safetensors", ".new-0123", "0000099.safetensors"]
    odd += [f"{'a' * 64}.safetensors", "00000098.safetensors.bak"]
    for name in [*ours, *odd]:
        (arrays / name).write_bytes(b"bytes")
    (arrays / "sub").mkdir()
    (arrays / ".new-folder").mkdir()
    (arrays / "00000097.safetensors").symlink_to(arrays / "readme.txt")
    foreign = {p.name for p in arrays.iterdir() if p.is_dir() or p.is_symlink()}
    foreign |= set(odd)
    with LedgerReader(path) as reader:
        found = verify(reader)
    assert found.problems == ()
    assert found.num_strays == len(ours)
    assert set(found.foreign) == foreign
    with DiskLedger(path) as ledger:
        ledger.append(round_of(1))
        found = verify(ledger)
    assert found.num_strays == 0
    assert set(found.foreign) == foreign
    assert foreign <= {p.name for p in arrays.iterdir()}
    assert not set(ours) & {p.name for p in arrays.iterdir()}


def test_a_folder_of_arrays_that_cannot_be_listed_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(place: Path) -> None:
        raise PermissionError(13, "Permission denied", str(place))

    monkeypatch.setattr(os, "scandir", refuse)
    with LedgerReader(path) as reader, pytest.raises(LedgerError) as caught:
        verify(reader)
    assert str(caught.value) == f"cannot list {path / 'arrays'}: Permission denied"
    with pytest.raises(LedgerError, match="cannot list"):
        DiskLedger(path)
