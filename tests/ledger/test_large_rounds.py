"""Rounds too large for a shared file: the step and groups of updates lie apart."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from fastfedul import DiskLedger, LedgerReader, forget, verify
from fastfedul.ledger.changes import append, rewrite
from fastfedul.ledger.protocol import vector as stored_vector
from fastfedul.ledger.store import transaction
from fastfedul.ledger.store.arrays import PAGE
from fastfedul.ledger.store.schema import RoundRow, UpdateRow
from fastfedul.params import Layout
from fastfedul.records import VectorRef
from tests.support.damage import (
    READINGS,
    assert_no_wrong_answer,
    flip,
    images_of,
    live_vectors,
)
from tests.support.disk_ledgers import (
    CLIENTS,
    initial_model,
    problems_of,
    round_of,
    snapshot_of,
)

MANY = tuple(f"client-{number:03d}" for number in range(150))


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of rounds as if 4 MiB were four pages; so that small models do."""
    for module in (transaction, append, rewrite):
        monkeypatch.setattr(module, "SHARED_BYTES", 4 * PAGE)


def places_of(path: Path) -> tuple[dict[int, RoundRow], list[UpdateRow]]:
    with LedgerReader(path) as reader, reader.snapshot():
        rounds = {row.round: row for row in reader.index.rows(RoundRow)}
        return rounds, reader.index.rows(UpdateRow)


def test_the_step_and_groups_of_updates_have_files_of_their_own(tmp_path: Path) -> None:
    layout = Layout.of({"w": np.zeros(300_000)})
    path = tmp_path / "ledger"
    with DiskLedger.create(path, initial_model(layout)) as ledger:
        for index in range(2):
            ledger.append(round_of(index, layout=layout))
        assert verify(ledger).problems == ()
    rounds, updates = places_of(path)
    for index, round_ in rounds.items():
        files = [update.file for update in updates if update.round == index]
        assert round_.start is None
        assert round_.file not in files
        # Three of 1.2 MB are below 4 MiB; the fourth is alone.
        assert sorted(files.count(file) for file in set(files)) == [1, 3]
    for file in live_vectors(path):
        [image] = images_of(file.read_bytes())
        assert image.stop == file.stat().st_size <= transaction.SHARED_BYTES


def test_an_update_above_the_limit_is_alone_in_its_file(tmp_path: Path) -> None:
    layout = Layout.of({"w": np.zeros(1_100_000)})
    path = tmp_path / "ledger"
    with DiskLedger.create(path, initial_model(layout)) as ledger:
        ledger.append(round_of(0, layout=layout, clients=("a", "b")))
    assert [len(vectors) for vectors in live_vectors(path).values()] == [1, 1, 1]


@pytest.mark.usefixtures("small_files")
def test_a_round_of_very_many_clients_is_not_very_many_files(tmp_path: Path) -> None:
    many = tuple(f"{number:05d}" for number in range(8_000))
    path = tmp_path / "ledger"
    with DiskLedger.create(path, initial_model()) as ledger:
        ledger.append(round_of(0, clients=many))
        assert verify(ledger).problems == ()
    assert len(live_vectors(path)) <= 64 + 2


@pytest.fixture
def mixed(small_files: None, tmp_path: Path) -> Path:
    """Small rounds, with two large ones among them; small ones go on sharing."""
    path = tmp_path / "mixed"
    with DiskLedger.create(path, initial_model()) as ledger:
        for index in range(7):
            clients = (*CLIENTS, *MANY) if index in (2, 5) else CLIENTS
            ledger.append(round_of(index, clients=clients))
    return path


def test_small_rounds_share_their_file_across_a_large_one(mixed: Path) -> None:
    rounds, _ = places_of(mixed)
    starts = {index: row.start for index, row in rounds.items()}
    assert starts == {
        **{0: 0, 1: PAGE, 2: None, 3: 2 * PAGE, 4: 3 * PAGE},
        **{5: None, 6: 0},
    }
    assert len({rounds[index].file for index in (0, 1, 3, 4)}) == 1
    with LedgerReader(mixed) as reader:
        assert verify(reader).problems == ()
        for index in range(7):
            for update in reader.updates_in(index):
                assert stored_vector(reader, VectorRef(index, update.client)).any()


@pytest.mark.usefixtures("small_files")
def test_erasing_from_a_large_round_leaves_the_other_updates_where_they_are(
    mixed: Path,
) -> None:
    gone = MANY[7]
    rounds, updates = places_of(mixed)
    with LedgerReader(mixed) as reader:
        row = reader.index.client(gone)
        assert row is not None
        sent = [stored_vector(reader, VectorRef(i, gone)).tobytes() for i in (2, 5)]
        sent += [stored_vector(reader, VectorRef(i)).tobytes() for i in (2, 5)]
    own = {update.file for update in updates if update.client == row.id}
    old = own | {rounds[index].file for index in (2, 5)}
    before = states(mixed)
    with DiskLedger(mixed) as ledger:
        forget(ledger, [gone], erase=True)
        assert verify(ledger).problems == ()
        others = {u.client for u in updates} - {row.id}
        assert len(ledger.updates_in(2)) == len(others)
    after = states(mixed)
    names = {f"{number:08d}.safetensors" for number in old}
    assert not names & after.keys()
    # The current and the first model.
    models = before.keys() - after.keys() - names
    assert len(models) == 2
    for name in before.keys() - names - models:
        assert after[name] == before[name], name
    assert len(before) - len(names) > 4
    content = b"".join(data for _, _, data in after.values())
    assert not any(data in content for data in sent)


def states(path: Path) -> dict[str, tuple[int, int, bytes]]:
    """Inode, time of the last change and content of every array file."""
    return {
        file.name: (file.stat().st_ino, file.stat().st_mtime_ns, file.read_bytes())
        for file in (path / "arrays").iterdir()
    }


@pytest.mark.usefixtures("small_files")
def test_erasing_from_small_and_large_rounds_agrees_with_a_ledger_of_small_ones(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    small = tmp_path / "small"
    with DiskLedger.create(small, initial_model()) as ledger:
        for index in range(7):
            clients = (*CLIENTS, *MANY) if index in (2, 5) else CLIENTS
            ledger.append(round_of(index, clients=clients))
    rounds, _ = places_of(small)
    assert all(row.start is not None for row in rounds.values())
    chains = []
    for path in (mixed, small):
        with DiskLedger(path) as ledger:
            before = ledger.chain
            forget(ledger, ["b"], erase=True)
            forget(ledger, [MANY[3], MANY[90]], erase=True)
            ledger.append(round_of(7, clients=("a", "c")))
            assert verify(ledger).problems == ()
            assert verify(ledger).num_strays == 0
            chains.append((before, ledger.chain))
    # The chain says what was recorded, not in which file.
    assert chains[0] == chains[1]


@pytest.mark.usefixtures("small_files")
def test_a_failed_append_of_a_large_round_leaves_no_file(
    mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot_of(mixed)

    def fail(change: transaction.Transaction) -> None:
        raise OSError(5, "Input/output error")

    with DiskLedger(mixed) as ledger, monkeypatch.context() as patch:
        patch.setattr(transaction.Transaction, "finish", fail)
        with pytest.raises(Exception, match="round 7 was not recorded"):
            ledger.append(round_of(7, clients=MANY))
    assert snapshot_of(mixed) == before


def test_a_changed_byte_of_a_large_round_is_found_and_never_believed(
    mixed: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(mixed, damaged)
    wanted = ("answer", "updates in", "final", "models", "chain")
    with LedgerReader(mixed) as reader:
        truth = {name: READINGS[name](reader) for name in wanted}
    rounds, updates = places_of(mixed)
    of_updates = sorted({u.file or 0 for u in updates if u.round == 2})
    for number in (rounds[2].file, of_updates[0], of_updates[-1]):
        file = damaged / "arrays" / f"{number:08d}.safetensors"
        sound = file.read_bytes()
        [image] = images_of(sound)
        header = (0, 7, 9, image.data // 2, image.data - 1)
        for position in (*header, image.data, image.stop - 1):
            flip(file, position, bit=position % 8)
            problems = problems_of(damaged)
            assert any("round 2" in p and file.name in p for p in problems), position
            assert_no_wrong_answer(damaged, truth)
            file.write_bytes(sound)
    assert problems_of(damaged) == ()
