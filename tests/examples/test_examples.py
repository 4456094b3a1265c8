"""Every example runs and shows what it promises."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from fastfedul import LedgerReader
from tests.support.commands import run_program

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_the_numpy_federation_forgets_its_poisoner() -> None:
    found = run_program(sys.executable, EXAMPLES / "digits_numpy.py")
    rows = {
        name: [float(value) for value in re.findall(r"([\d.]+)%", line)]
        for line in found.stdout.splitlines()
        for name in re.findall(r"(before|forgotten|retrained)", line)
        if "%" in line
    }
    assert rows["before"][1] > 40
    assert rows["forgotten"][1] < 5
    assert rows["forgotten"][0] > rows["retrained"][0] - 5
    assert "intact" in found.stdout


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--freeze-a",)])
def test_a_federation_of_adapters_forgets_its_poisoner(options: tuple[str]) -> None:
    program = EXAMPLES / "adapters" / "adapters.py"
    found = run_program(sys.executable, program, *options)
    rows = {
        line.split()[0]: [float(value) for value in re.findall(r"([\d.]+)%", line)]
        for line in found.stdout.splitlines()
        if "backdoor" in line
    }
    assert "the ledger records 2,179 of 22,790 values" in found.stdout
    [gap] = re.findall(r"mean\(B\) mean\(A\) is (\d+)% away", found.stdout)
    assert (int(gap) == 0) == ("--freeze-a" in options)
    if options:
        return  # With A as drawn, twelve rounds are too few for good models.
    assert rows["before"][1] > rows["retrained"][1] + 5
    assert rows["forgotten"][1] < rows["retrained"][1] + 4
    assert rows["forgotten"][0] > rows["retrained"][0] - 4


def run(folder: Path, *arguments: object, code: int = 0) -> str:
    found = run_program(sys.executable, *arguments, code=code, cwd=folder)
    return found.stderr if code else found.stdout


def run_json(folder: Path, *arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        run(folder, "-m", "fastfedul", *arguments, "--json")
    )
    return found


TUMOURS = ("--data", "tumours.npz", "--trainer", "tumour_trainer:make_trainer")
FLIPPED = ("--attack", "label-flip", "--target-label", 1, "--attackers", "Bergen")


@pytest.fixture(scope="module")
def clinics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clinics") / "own_trainer"
    shutil.copytree(EXAMPLES / "own_trainer", folder)
    run(folder, "make_data.py", "tumours.npz")
    return folder


@pytest.mark.slow
def test_a_trainer_of_ones_own_trains_compares_and_forgets(clinics: Path) -> None:
    options = (*TUMOURS, *FLIPPED, "--rounds", 15)
    trained = run_json(clinics, "train", "run", *options, "--workers", 1)
    names = ["Aarhus", "Bergen", "Chania", "Delft", "Evora"]
    assert trained["clients"] == names
    assert trained["attackers"] == ["Bergen"]
    assert trained["main"] > 0.9
    again = run_json(clinics, "train", "again", *options, "--workers", 2)
    assert again["chain"] == trained["chain"]

    rows = {row["method"]: row for row in run_json(clinics, "compare", "run")["rows"]}
    assert rows["retrained"]["main"] > 0.9
    before, after = rows["before"]["backdoor"], rows["fast-fedul"]["backdoor"]
    assert after < before
    assert (clinics / "run" / "report.html").is_file()
    assert run_json(clinics, "evaluate", "run")["clients"] == names

    run(clinics, "-m", "fastfedul", "forget", "run", "Bergen")
    longer = run_json(clinics, "train", "run", "--resume", "--rounds", 17)
    assert longer["rounds"] == 17
    assert run_json(clinics, "evaluate", "run")["forgotten"] == ["Bergen"]


@pytest.mark.slow
def test_the_example_forgets_while_it_trains(clinics: Path) -> None:
    options = (*TUMOURS, *FLIPPED, "--forget", "Bergen@5", "--damping", 0.07)
    run_json(clinics, "train", "planned", *options, "--rounds", 8)
    assert run_json(clinics, "evaluate", "planned")["forgotten"] == ["Bergen"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (TUMOURS[:2], "give a trainer of your own as --trainer"),
        ((*TUMOURS, "--attack", "pixel"), "the attack pixel needs images"),
        ((*TUMOURS, "--attack", "edge-case"), "the attack edge-case needs images"),
        ((*TUMOURS, "--clients", 4), "so leave out --clients"),
        ((*TUMOURS, "--partition", "iid"), "so leave out --partition"),
        ((*TUMOURS, "--forget", "Oslo@3"), "there is no client 'Oslo'"),
        ((*TUMOURS, "--per-round", 6), "there are 5 clients; choose 1 to 5"),
        ((*TUMOURS, "--train-size", 2), "has no example left to train on"),
        ((*TUMOURS, "--model", "wide"), "--model is 'wide'; give a width"),
        ((*TUMOURS[:3], "tumour_trainer:TumourTrainer"), "keywords shape, num_classes"),
        ((*TUMOURS[:3], "tumour_trainer:MISSED_TUMOUR"), "is not a function"),
    ],
)
def test_what_the_example_cannot_do_is_said_in_one_line(
    options: tuple[object, ...], message: str, clinics: Path
) -> None:
    said = run(clinics, "-m", "fastfedul", "train", "bad", *options, code=2)
    [line] = said.splitlines()
    assert message in line
    assert not (clinics / "bad").exists()


@pytest.mark.slow
def test_a_client_of_the_file_that_never_took_part_is_known(clinics: Path) -> None:
    options = (*TUMOURS, "--rounds", 1, "--per-round", 1)
    run_json(clinics, "train", "short", *options)
    with LedgerReader(clinics / "short") as ledger:
        [drawn] = ledger.clients()
    absent = "Aarhus" if drawn != "Aarhus" else "Bergen"
    said = run(clinics, "-m", "fastfedul", "forget", "short", absent, code=2)
    assert "never took part" in said
