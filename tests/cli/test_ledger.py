"""`fastfedul ledger` on paths, files and folders that are not as they should be."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fastfedul import (
    ClientUpdate,
    DiskLedger,
    LedgerReader,
    LocalSGD,
    Model,
    Params,
    Round,
)
from tests.support.commands import COMMAND, one_line, run, run_program

LONG = "x" * 300
POWERLESS = (
    ("setpriv", "--inh-caps=-all", "--bounding-set=-all") if os.geteuid() == 0 else ()
)
"""What takes from the superuser the right to read and write everything."""


def verified(path: Path, code: int) -> dict[str, Any]:
    found = run("ledger", "verify", path, "--json", code=code)
    facts: dict[str, Any] = json.loads(found.stdout)
    return facts


def refused(*arguments: object, before: tuple[str, ...] = (), code: int = 2) -> str:
    if before:
        return one_line(run_program(*before, *COMMAND, *arguments, code=code))
    return one_line(run(*arguments, code=code))


def make_ledger(path: Path, dtype: type[np.floating[Any]], start: float) -> Path:
    """Two rounds in which `ann` and `bob` cancel each other out."""
    initial = Params.of({"x": np.array([start, 1], dtype)})
    moved = np.array([20_000, 0], np.float32)
    with DiskLedger.create(path, Model(initial)) as made:
        for index in range(2):
            updates = (
                ClientUpdate("ann", 0.5, Params(initial.layout, -moved)),
                ClientUpdate("bob", 0.5, Params(initial.layout, moved)),
            )
            made.append(Round(index, updates))
    return path


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return make_ledger(tmp_path / "ledger", np.float32, 0)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """One round of one client, saved model by model."""
    folder = tmp_path / "saved"
    for place in ("global/0", "global/1", "clients/0/ann"):
        path = folder / f"{place}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"w": np.zeros(3, np.float32)}, path)
    return folder


def test_a_path_that_is_too_long_gets_one_line(ledger: Path, saved: Path) -> None:
    folder = ledger.parent
    for arguments in (
        ("ledger", "info", LONG),
        ("ledger", "verify", LONG),
        ("ledger", "compact", LONG, "--dry-run"),
        ("forget", LONG, "ann"),
        ("forget", ledger, "ann", "--out", folder / f"{LONG}.safetensors"),
        ("ledger", "import", LONG, folder / "new"),
        ("ledger", "import", saved, folder / LONG),
    ):
        line = refused(*arguments)
        assert LONG in line
        assert "File name too long" in line
    name = "y" * 250
    assert name in refused("ledger", "import", saved, folder / name)
    assert run("ledger", "info", ledger, "--json").stdout.count('"active": 2') == 1


def test_a_place_that_is_taken_gets_one_line(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("nowhere")
    for place in (".", "/", tmp_path / "dangling"):
        line = refused("ledger", "import", saved, place)
        assert f"{place} exists already" in line


@pytest.mark.slow
@pytest.mark.skipif(
    bool(POWERLESS)
    and shutil.which("setpriv") is None
    and os.environ.get("CI") != "true",
    reason="the superuser may read everything, and there is no setpriv",
)
def test_a_folder_without_permission_gets_one_line(
    ledger: Path, saved: Path, tmp_path: Path
) -> None:
    closed = tmp_path / "closed"
    shutil.copytree(ledger, closed / "ledger")
    closed.chmod(0)
    (ledger / "arrays").chmod(0o300)
    try:
        for arguments in (
            ("ledger", "info", closed / "ledger"),
            ("ledger", "verify", closed / "ledger"),
            ("forget", closed / "ledger", "ann"),
            ("ledger", "import", closed / "saved", tmp_path / "new"),
            ("ledger", "import", saved, closed / "new"),
            ("ledger", "verify", ledger),
            ("forget", ledger, "ann"),
        ):
            # Within a ledger it is the ledger that fails, and not the call.
            code = 1 if ledger in arguments else 2
            line = refused(*arguments, before=POWERLESS, code=code)
            assert "Permission denied" in line
            paths = [str(part) for part in arguments if isinstance(part, Path)]
            assert any(path in line for path in paths if path != str(saved)), line
        (ledger / "arrays").chmod(0o755)
        out = ("--out", closed / "clean.safetensors")
        line = refused("forget", ledger, "ann", *out, before=POWERLESS)
        assert "clean.safetensors: Permission denied" in line
    finally:
        closed.chmod(0o755)
        (ledger / "arrays").chmod(0o755)


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_a_model_that_its_dtype_cannot_hold_is_not_written(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    path = make_ledger(tmp_path / "half", np.float16, 60_000)
    out = tmp_path / "h.safetensors"
    arguments = ("forget", path, "ann", "--damping", 0)
    line = refused(*arguments, "--out", out, *options)
    assert "'x' is float16" in line
    assert not out.exists()
    with LedgerReader(path) as reader:
        assert reader.clients()["ann"].state == "active"
        assert reader.events() == ()
    run(*arguments)
    with LedgerReader(path) as reader:
        assert reader.final.params.flat[0] > 65_504


def test_the_model_written_is_the_finite_one(tmp_path: Path) -> None:
    path = make_ledger(tmp_path / "half", np.float16, 10)
    out = tmp_path / "h.safetensors"
    found = run("forget", path, "ann", "--damping", 0, "--out", out)
    assert "RuntimeWarning" not in found.stderr
    assert np.isfinite(load_file(out)["x"]).all()


def test_a_stray_folder_is_named_and_left_alone(ledger: Path) -> None:
    (ledger / "arrays" / "sub").mkdir()
    found = run("ledger", "verify", ledger)
    assert found.stdout.startswith("intact")
    assert "left alone" in found.stderr
    assert "sub" in found.stderr
    assert "will be removed" not in found.stderr
    facts = verified(ledger, 0)
    assert facts["ok"]
    assert facts["strays"] == 0
    assert facts["foreign"] == ["sub"]
    run("forget", ledger, "ann")
    assert (ledger / "arrays" / "sub").is_dir()


@pytest.mark.parametrize("damage", ["truncated", "empty", "random", "arrays"])
def test_verify_reports_what_cannot_be_opened_as_a_problem(
    damage: str, ledger: Path
) -> None:
    intact = verified(ledger, 0)
    index = ledger / "index.sqlite"
    data = index.read_bytes()
    if damage == "truncated":
        index.write_bytes(data[: len(data) // 2])
    elif damage == "empty":
        index.write_bytes(b"")
    elif damage == "random":
        index.write_bytes(np.random.default_rng(1).bytes(9000))
    else:
        shutil.rmtree(ledger / "arrays")
    found = verified(ledger, 1)
    assert found["ok"] is False
    assert str(ledger) in found["problems"][0]
    assert set(found) == set(intact)
    assert "damaged: " in run("ledger", "verify", ledger, code=1).stderr


def test_verify_of_what_is_no_ledger_stays_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        found = run("ledger", "verify", path, "--json", code=2)
        assert list(json.loads(found.stdout)) == ["error"]
        assert found.stderr == ""
        assert run("ledger", "verify", path, code=2).stderr.startswith("error: ")


def shown_training(path: Path) -> str:
    """The line of `ledger info` about local training, however it is wrapped."""
    text = " ".join(run("ledger", "info", path).stdout.split())
    return text.partition("local training ")[2].partition(" keeps ")[0]


def test_info_says_how_clients_trained(tmp_path: Path) -> None:
    zero = Params.of({"x": np.zeros(2, np.float32)})
    slow = LocalSGD(lr=0.05, momentum=0.9, batch_size=32, epochs=2)
    fast = LocalSGD(lr=0.5, momentum=0, batch_size=8, epochs=1)
    path = tmp_path / "ledger"
    words = "lr 0.05, momentum 0.9, batches of 32, 2 epochs"
    other = "lr 0.5, momentum 0, batches of 8, 1 epoch"
    more = f"{words} in rounds 0 to 1; {other} in round 3; {words} in round 4"
    said = {
        (): "no round yet",
        (None,): "not recorded",
        (slow, slow): words,
        (slow, None, slow): f"{words}; not recorded in 1 of 3 rounds",
        (slow, slow, fast): f"{words} in rounds 0 to 1; {other} in round 2",
        (slow, slow, None, fast, slow, fast): f"{more}; more changes in --json; "
        "not recorded in 1 of 6 rounds",
    }
    for number, (trainings, line) in enumerate(said.items()):
        path = tmp_path / str(number)
        with DiskLedger.create(path, Model(zero)) as ledger:
            for index, local in enumerate(trainings):
                updates = (ClientUpdate("ann", 1.0, zero),)
                ledger.append(Round(index, updates, local=local))
        assert shown_training(path) == line
    facts = json.loads(run("ledger", "info", path, "--json").stdout)
    assert facts["local_training"][1:3] == [
        {"first_round": 2, "last_round": 2, "training": None},
        {
            "first_round": 3,
            "last_round": 3,
            "training": {"lr": 0.5, "momentum": 0, "batch_size": 8, "epochs": 1},
        },
    ]


def test_an_import_can_say_how_clients_trained(saved: Path, tmp_path: Path) -> None:
    options = ("--lr", 0.05, "--momentum", 0.9, "--batch-size", 32, "--epochs", 2)
    run("ledger", "import", saved, tmp_path / "ledger", *options)
    line = "lr 0.05, momentum 0.9, batches of 32, 2 epochs"
    assert shown_training(tmp_path / "ledger") == line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--lr", 0.05), "add --momentum, --batch-size, --epochs, or give none"),
        (
            ("--lr", 0.05, "--momentum", 0, "--epochs", 1),
            "add --batch-size, or give none of the four",
        ),
        (
            ("--lr", 0, "--momentum", 0, "--batch-size", 32, "--epochs", 1),
            "the learning rate is 0.0",
        ),
        (
            ("--lr", 0.05, "--momentum", 1, "--batch-size", 32, "--epochs", 1),
            "the momentum is 1.0",
        ),
    ],
)
def test_an_import_refuses_half_of_a_local_training(
    options: tuple[object, ...], said: str, saved: Path, tmp_path: Path
) -> None:
    line = refused("ledger", "import", saved, tmp_path / "ledger", *options)
    assert said in line
    assert not (tmp_path / "ledger").exists()


SIZES = ("--parameters", 1_000, "--clients", 500, "--per-round", 20, "--rounds", 60)


def test_the_estimate_for_a_budget_compares_policies_and_recommends_one() -> None:
    found = run("ledger", "estimate", *SIZES, "--budget", "1MB")
    told = " ".join(found.stdout.split())
    facts = json.loads(
        run("ledger", "estimate", *SIZES, "--budget", "1MB", "--json").stdout
    )
    best = facts["options"][0]
    recommended = f"--keep {best['keep']} --dtype {best['dtype']} --budget 1MB"
    assert f"Recommended: {recommended}" in told
    assert {one["keep"].split(":")[0] for one in facts["options"]} >= {"sums"}
    assert all(0 <= one["forgettable"] <= 1 for one in facts["options"])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--budget", "1MB", "--keep", "all"), "leave out --keep"),
        (("--budget", "lots"), "write 500MB"),
        (("--budget", "1kB"), "cannot hold the models"),
    ],
)
def test_a_budget_that_cannot_be_used_gets_one_line(
    options: tuple[str, ...], reason: str
) -> None:
    assert reason in refused("ledger", "estimate", *SIZES, *options)
