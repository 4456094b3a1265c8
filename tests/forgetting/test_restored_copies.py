"""A ledger or model file that somebody put back, beside what happened since."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from fastfedul import (
    DiskLedger,
    LedgerDamagedError,
    LedgerReader,
    apply_requests,
    forget,
)
from fastfedul.forgetting.folder import (
    RUN_CONFIG,
    RUN_MODEL,
    require_newest,
    run_model_problem,
    write_run_model,
)
from fastfedul.ledger.store.model_files import read_model, write_model
from tests.support.commands import run
from tests.support.disk_ledgers import record, round_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a run whose ledger has four rounds."""
    path = tmp_path / "run"
    path.mkdir()
    with DiskLedger(record(path / "ledger", 4)) as ledger:
        write_run_model(ledger, path / RUN_MODEL)
    (path / RUN_CONFIG).write_text("")
    return path


def leaver_of(folder: Path) -> str:
    with LedgerReader(folder) as ledger:
        return sorted(ledger.clients())[0]


def test_an_older_copy_of_the_ledger_is_told_by_its_certificates(folder: Path) -> None:
    client = leaver_of(folder)
    shutil.copytree(folder / "ledger", folder.parent / "backup")
    with DiskLedger(folder) as ledger:
        forget(ledger, [client])
        require_newest(ledger)
    shutil.rmtree(folder / "ledger")
    shutil.copytree(folder.parent / "backup", folder / "ledger")
    with DiskLedger(folder) as ledger:
        for use in (
            lambda: require_newest(ledger),
            lambda: forget(ledger, [client]),
            lambda: apply_requests(ledger),
        ):
            with pytest.raises(LedgerDamagedError, match="restore the newest copy"):
                use()
        assert ledger.clients()[client].state == "active"
    told = run("ledger", "verify", folder, code=1)
    assert "is older than" in " ".join(told.stderr.split())
    # Its way out: the old certificate is kept elsewhere, the client forgotten again.
    shutil.move(folder / "certificates", folder.parent / "old-certificates")
    with DiskLedger(folder) as ledger:
        assert forget(ledger, [client]).certificate


def test_certificates_of_another_ledger_do_not_count(
    folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other" / "ledger"
    with DiskLedger(record(other, 3)) as ledger:
        done = forget(ledger, [sorted(ledger.clients())[0]])
    assert done.certificate
    (folder / "certificates").mkdir()
    shutil.copy(done.certificate, folder / "certificates" / "foreign.json")
    (folder / "certificates" / "broken.json").write_text("{")
    with LedgerReader(folder) as reader:
        require_newest(reader)


def test_the_model_file_of_a_run_is_compared_value_by_value(folder: Path) -> None:
    place, client = folder / RUN_MODEL, leaver_of(folder)
    before = place.read_bytes()
    with DiskLedger(folder) as ledger:
        assert run_model_problem(ledger) is None
        ledger.append(round_of(ledger.num_rounds))
        assert run_model_problem(ledger) is None, "training may have gone on"
        certificate = forget(ledger, [client]).certificate
        assert run_model_problem(ledger) is None
    after = place.read_bytes()
    place.write_bytes(before)
    assert "from before the last forgetting" in _verified(folder)
    told = run("certificate", "check", certificate, code=1).stdout
    assert "from before the last forgetting" in " ".join(told.split())
    place.write_bytes(after[:-1] + bytes([after[-1] ^ 1]))
    assert "does not hold the model that it names" in _verified(folder)
    run("request", "apply", folder)
    assert place.read_bytes() == after
    run("ledger", "verify", folder)


def _verified(folder: Path) -> str:
    return " ".join(run("ledger", "verify", folder, code=1).stderr.split())


def test_a_model_without_a_note_is_replaced(folder: Path) -> None:
    with DiskLedger(folder) as ledger:
        layout = ledger.settings.layout
        stranger = read_model(
            folder / RUN_MODEL, buffers=frozenset(ledger.final.buffers)
        )
        write_model(folder / RUN_MODEL, stranger)
        assert run_model_problem(ledger) is not None
        apply_requests(ledger)
        found = read_model(
            folder / RUN_MODEL,
            layout=layout,
            buffers=frozenset(ledger.final.buffers),
        )
        assert np.array_equal(found.params.flat, ledger.final.params.flat)


def test_retrained_models_with_a_forgotten_client_are_removed(folder: Path) -> None:
    client = leaver_of(folder)
    for name, without in (("with", []), ("without", [client])):
        (folder / f"retrained-{name}.safetensors").write_bytes(b"model")
        facts = {"seconds": 1, "client_calls": 1, "without": without}
        (folder / f"retrained-{name}.json").write_text(json.dumps(facts))
    with DiskLedger(folder) as ledger:
        forget(ledger, [client])
    left = sorted(path.name for path in folder.glob("retrained-*"))
    assert left == ["retrained-without.json", "retrained-without.safetensors"]
