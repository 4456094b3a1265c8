"""`ledger import --arrays`, `backup` and `restore` as a user runs them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.commands import one_line, run, run_json
from tests.support.s3_server import S3Server, reached, server

__all__ = ["reached", "server"]


def save_models(folder: Path, num_rounds: int = 2) -> Path:
    """Models of two clients, as somebody saves them without a ledger."""
    for index in range(num_rounds + 1):
        models = {"global": folder / "global" / f"{index}.npz"}
        if index < num_rounds:
            own = folder / "clients" / str(index)
            models |= {name: own / f"{name}.npz" for name in ("a", "b")}
        # The server's next model is the mean of the clients' models.
        for ahead, path in zip((0, 0.5, 1.5), models.values(), strict=False):
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path, w=np.full(3, index + ahead, np.float32))
    return folder


@pytest.mark.slow
def test_a_ledger_is_imported_backed_up_lost_and_restored(
    tmp_path: Path, server: S3Server
) -> None:
    saved, ledger = save_models(tmp_path / "saved"), tmp_path / "ledger"
    address = f"s3://{server.bucket()}/here"
    run("ledger", "import", saved, ledger, "--arrays", address)
    facts = run_json("ledger", "info", ledger)
    assert (facts["arrays_at"], facts["rounds"]) == (address, 2)
    run("request", "add", ledger, "a")
    assert run_json("ledger", "backup", ledger)["rounds"] == 2
    ledger.rename(tmp_path / "lost")
    assert run_json("ledger", "restore", address, ledger)["rounds"] == 2
    assert run_json("ledger", "info", ledger)["chain"] == facts["chain"]
    [request] = run_json("request", "list", ledger)["requests"]
    assert request["state"] == "waiting"
    assert run_json("ledger", "verify", ledger)["ok"]
    run("forget", ledger, "a")
    refused = one_line(run("forget", tmp_path / "lost", "b", code=1))
    assert "restored to another folder" in refused


def test_an_import_that_fails_leaves_no_object(
    tmp_path: Path, server: S3Server
) -> None:
    saved, bucket = save_models(tmp_path / "saved", 3), server.bucket()
    (saved / "clients" / "2" / "b.npz").write_bytes(b"no model")
    words = ("ledger", "import", saved, tmp_path / "new", "--arrays")
    assert "b.npz" in one_line(run(*words, f"s3://{bucket}/x", code=2))
    assert server.versions(bucket) == []
    assert not (tmp_path / "new").exists()
    assert "no such bucket" in one_line(run(*words, "s3://nowhere/x", code=1))


def test_a_ledger_in_its_own_folder_is_backed_up_by_copying_it(tmp_path: Path) -> None:
    run("ledger", "import", save_models(tmp_path / "saved"), tmp_path / "ledger")
    found = one_line(run("ledger", "backup", tmp_path / "ledger", code=1))
    assert "copy the folder" in found


@pytest.mark.slow
def test_a_run_keeps_its_array_files_on_a_store(
    tmp_path: Path, server: S3Server
) -> None:
    bucket, folder = server.bucket(), tmp_path / "run"
    words = ("--train-size", 60, "--clients", 3, "--epochs", 1, "--arrays")
    address = f"s3://{bucket}/run"
    run("train", folder, "--rounds", 2, *words, address)
    assert run_json("ledger", "info", folder)["arrays_at"] == address
    run("train", folder, "--resume", "--rounds", 3)
    assert run_json("ledger", "info", folder)["rounds"] == 3
    run("forget", folder, "client-0")
    assert run_json("ledger", "verify", folder)["ok"]
    assert any("/arrays/" in key for key in server.objects(bucket))
    other = tmp_path / "other"
    refused = one_line(run("train", other, *words, address, code=2))
    assert "holds objects already" in refused
    assert not other.exists()
