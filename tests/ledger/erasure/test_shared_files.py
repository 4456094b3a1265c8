"""Erasing a client from files that rounds, or sums, share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from fastfedul import DiskLedger, LedgerReader, erase, forget, verify
from fastfedul.ledger.protocol import vector as stored_vector
from fastfedul.ledger.store import codec, transaction
from fastfedul.ledger.store.arrays import PAGE
from fastfedul.ledger.store.schema import RoundRow
from fastfedul.records import History, StorageDtype, VectorRef
from tests.support.damage import images_of, live_vectors
from tests.support.disk_ledgers import (
    CLIENTS,
    initial_model,
    round_of,
    vector,
)

TARGET = "b"
OTHERS = ("a", "c", "d")
WITH_TARGET = (0, 1, 4, 13)
"""Rounds that the target takes part in, of sixteen; four rounds share a file."""


@pytest.fixture
def four_to_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction, "SHARED_BYTES", 4 * PAGE)


def append_sixteen(ledger: DiskLedger) -> None:
    for index in range(16):
        clients = CLIENTS if index in WITH_TARGET else OTHERS
        ledger.append(round_of(index, clients=clients))


def files_by_round(path: Path) -> dict[int, str]:
    with LedgerReader(path) as reader, reader.snapshot():
        rows = reader.index.rows(RoundRow)
    return {row.round: f"{row.file:08d}.safetensors" for row in rows}


def states(path: Path) -> dict[str, tuple[int, int, bytes]]:
    """Inode, time of the last change and content of every array file."""
    return {
        file.name: (file.stat().st_ino, file.stat().st_mtime_ns, file.read_bytes())
        for file in (path / "arrays").iterdir()
    }


def own_bytes(dtype: StorageDtype) -> list[bytes]:
    """What the ledger stores of the target's updates: scales, if any, and values."""
    found = []
    for index in WITH_TARGET:
        encoded = codec.encode(vector(1, index, CLIENTS.index(TARGET)), dtype)
        found.append(encoded.values.tobytes())
        if encoded.scales is not None and dtype == "int8":
            found.append(encoded.scales.tobytes())  # of float16, often just 1
    return found


def content_of(path: Path) -> bytes:
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return b"\0".join(file.read_bytes() for file in files)


@pytest.mark.usefixtures("four_to_a_file")
@pytest.mark.parametrize("dtype", codec.STORAGE_DTYPES)
@pytest.mark.parametrize("at_once", [True, False])
def test_only_the_files_with_a_round_of_the_client_are_rewritten(
    dtype: StorageDtype, at_once: bool, tmp_path: Path
) -> None:
    path = tmp_path / "ledger"
    with DiskLedger.create(path, initial_model(), update_dtype=dtype) as ledger:
        append_sixteen(ledger)
        steps = [
            stored_vector(ledger, VectorRef(index)).tobytes() for index in WITH_TARGET
        ]
        tells = [*own_bytes(dtype), *steps]
        before, places = states(path), files_by_round(path)
        assert all(tell in content_of(path) for tell in tells)
        if at_once:
            forget(ledger, [TARGET], erase=True)
        else:
            forget(ledger, [TARGET], erase=False)
            erase(ledger, [TARGET])
        after, new_places = states(path), files_by_round(path)
        assert not any(tell in content_of(path) for tell in tells)
        assert verify(ledger).problems == ()
        assert verify(ledger).num_strays == 0
    touched = {places[index] for index in WITH_TARGET}
    assert len(set(places.values())) == 4
    assert len(touched) == 3
    assert not touched & after.keys()
    stay = {name for name in places.values() if name not in touched}
    assert stay
    for name in stay:
        assert after[name] == before[name], name
    # The first model goes, too.
    assert "00000001.safetensors" not in after
    for index in range(16):
        same = places[index] == new_places[index]
        assert same == (places[index] not in touched)
    # Rounds that shared a file still do, and as many files are left.
    assert len(set(new_places.values())) == 4
    for index in range(15):
        together = places[index] == places[index + 1]
        assert (new_places[index] == new_places[index + 1]) == together


@pytest.mark.usefixtures("four_to_a_file")
def test_what_the_others_sent_is_copied_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with DiskLedger.create(path, initial_model(), update_dtype="int8") as ledger:
        append_sixteen(ledger)
        refs = [VectorRef(i, name) for i in range(16) for name in OTHERS]
        before = {ref: stored_vector(ledger, ref).tobytes() for ref in refs}
        forget(ledger, [TARGET], erase=True)
        assert {r: stored_vector(ledger, r).tobytes() for r in refs} == before
        # Training goes on in the file that was rewritten last, on a new page.
        ledger.append(round_of(16, clients=OTHERS))
        assert verify(ledger).problems == ()
    for file in live_vectors(path):
        assert all(i.start % PAGE == 0 for i in images_of(file.read_bytes()))


def test_an_erasure_leaves_no_byte_that_does_not_count(tmp_path: Path) -> None:
    """Neither of rounds nor of sums: between vectors there are headers and zeros."""
    for history in ("rounds", "sums"):
        path = tmp_path / history
        with DiskLedger.create(path, initial_model(), history=history) as ledger:
            for index in range(6):
                ledger.append(round_of(index))
            forget(ledger, [TARGET], erase=True)
        for file, spans in live_vectors(path).items():
            content = file.read_bytes()
            rest = bytearray(content)
            for image in images_of(content):
                rest[image.start : image.data] = bytes(image.data - image.start)
            for start, stop in spans:
                rest[start:stop] = bytes(stop - start)
            assert not any(rest), file.name


def test_no_earlier_sum_of_an_erased_client_is_left(tmp_path: Path) -> None:
    """Each round wrote a new sum, and left the old one where it was."""
    path = tmp_path / "ledger"
    with DiskLedger.create(path, initial_model(), history="sums") as ledger:
        tells: list[bytes] = []
        others: list[bytes] = []
        for index in range(8):
            present = ("a", TARGET, "c") if index % 2 else (TARGET, "c", "d")
            ledger.append(round_of(index, clients=present))
            tells.append(ledger.own_difference(TARGET).tobytes())
            others.append(ledger.own_difference("c").tobytes())
        refs = pairs_with(ledger, TARGET)
        tells += [stored_vector(ledger, ref).tobytes() for ref in refs]
        found = [tell for tell in tells if tell in content_of(path)]
        assert len(found) > len(refs) + 1, "an earlier sum lies beside one that counts"
        forget(ledger, [TARGET], erase=True)
        content = content_of(path)
        assert not any(tell in content for tell in tells)
        assert not any(other in content for other in others), "corrected, all of them"
        assert pairs_with(ledger, TARGET) == []
        assert verify(ledger).problems == ()


def pairs_with(ledger: DiskLedger, client: str) -> list[VectorRef]:
    return [
        VectorRef(pair.round, pair.client, pair.other)
        for pair in ledger.pairs()
        if client in (pair.client, pair.other)
    ]


@pytest.mark.parametrize("history", ["rounds", "sums"])
def test_the_products_of_the_others_with_an_erased_step_are_gone(
    history: History, tmp_path: Path
) -> None:
    """They tell something of the old step, which had the client in it."""
    path = tmp_path / "ledger"
    with DiskLedger.create(path, initial_model(), history=history) as ledger:
        append_equal_parts(ledger)
        before = products(ledger)
        assert None not in before.values()
        forget(ledger, [TARGET], erase=True)
        after = products(ledger)
    assert {index for index, _ in after} == set(range(6))
    for (index, client), product in after.items():
        gone = index % 2 == 0
        assert product == (None if gone else before[index, client]), (index, client)


def append_equal_parts(ledger: DiskLedger) -> None:
    """Six rounds; the target takes part in every other one."""
    for index in range(6):
        clients: Sequence[str] = CLIENTS if index % 2 == 0 else OTHERS
        ledger.append(round_of(index, clients=tuple(clients)))


def products(ledger: LedgerReader) -> dict[tuple[int, str], float | None]:
    return {
        (update.round, update.client): update.step_product
        for index in range(ledger.num_rounds)
        for update in ledger.updates_in(index)
    }
