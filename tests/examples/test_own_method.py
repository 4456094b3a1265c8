"""A method of another package: installed into a fresh environment, found and used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from fastfedul import DiskLedger, Model, Params
from fastfedul.forgetting.certificates import read_certificate
from fastfedul.rng import stream
from tests.support.rounds import random_round

pytestmark = pytest.mark.deploy

PACKAGE = Path(__file__).resolve().parents[2] / "examples" / "own_method"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the example; everything else comes from this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    [site] = folder.glob("lib/python*/site-packages")
    paths = [sysconfig.get_paths()["purelib"], *sys.path]
    lines = dict.fromkeys(p for p in paths if p and Path(p).is_dir())
    (site / "others.pth").write_text("\n".join(lines) + "\n")
    # The builder is in this environment, so nothing has to be fetched for it.
    options = ("-q", "--no-deps", "--no-build-isolation")
    subprocess.run([python, "-m", "pip", "install", *options, PACKAGE], check=True)
    return python


def run(python: Path, *arguments: object) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("COV")}
    done = subprocess.run(
        [str(python), "-m", "fastfedul", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=clean,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_listed_and_forgets(python: Path, tmp_path: Path) -> None:
    listed = json.loads(run(python, "methods", "--json"))["methods"]
    [entry] = [method for method in listed if method["name"] == "halfway"]
    assert entry["note"].startswith("Moves the model part of the way")
    note = "Which part of the way, from 0 to 1."
    assert entry["settings"] == [{"name": "part", "default": 0.5, "note": note}]
    start = Params.of({"w": np.zeros((4, 3), np.float32)})
    with DiskLedger.create(tmp_path / "ledger", Model(start)) as ledger:
        for index in range(3):
            rng = stream(1, "own method", index)
            clients = ("ann", "bob", "cyd")
            ledger.append(random_round(index, clients, start.layout, rng))
    folder = tmp_path / "ledger"
    whole = json.loads(run(python, "forget", folder, "bob", "--dry-run", "--json"))
    options = ("--method", "halfway", "--set", "part=0.25", "--json")
    done = json.loads(run(python, "forget", folder, "bob", *options))
    assert done["method"] == "halfway"
    assert done["delta_norm"] == pytest.approx(whole["delta_norm"] / 4, rel=1e-4)
    method = read_certificate(Path(done["certificate"])).predicate.method
    assert method is not None
    assert (method.name, method.settings) == ("halfway", {"part": 0.25})


def test_it_keeps_the_laws(python: Path) -> None:
    code = (
        "from halfway import Halfway; from fastfedul.testing import check_method; "
        "check_method(Halfway); print('kept')"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "kept", done.stderr
