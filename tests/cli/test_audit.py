"""`fastfedul audit`, as a user runs it, on a tiny run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from fastfedul import audit
from tests.support.commands import COMMAND, interrupt, one_line, run, run_json

pytest.importorskip("torch", reason="training needs the extra torch")
pytestmark = pytest.mark.slow

KEPT = "audit-*/shadow-*.safetensors"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny attacked run, one that is half trained, and a ledger."""
    folder = tmp_path_factory.mktemp("audit")
    usual = ("--clients", 4, "--train-size", 240, "--epochs", 1, "--workers", 1)
    attack = ("--attack", "pixel", "--poison-ratio", 0.5, "--lr", 0.1)
    run("train", "run", *usual, *attack, "--rounds", 3, cwd=folder)
    shutil.copytree(folder / "run", folder / "short")
    config = folder / "short" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 3", "rounds = 4"))
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, so that no test finds what another one kept."""
    shutil.copytree(trained / "run", tmp_path / "run")
    return tmp_path


def files_of(run_: Path) -> dict[str, bytes]:
    """Return the files of a run that an audit must not change."""
    return {
        str(path.relative_to(run_)): path.read_bytes()
        for path in sorted(run_.rglob("*"))
        if path.is_file() and not path.parts[len(run_.parts)].startswith("audit-")
    }


def test_an_audit_has_every_number_and_changes_nothing(folder: Path) -> None:
    run("compare", "run", "--methods", "fast-fedul", cwd=folder)
    before = files_of(folder / "run")
    words = ("audit", "run", "client-0", "--shadows", 16, "--out", "page.html")
    found = run_json(*words, cwd=folder)
    assert files_of(folder / "run") == before
    assert found["kind"] == "fastfedul audit v1"
    assert (found["client"], found["shadows"], found["rounds"]) == ("client-0", 16, 3)
    assert found["examples"] == {"leaver": 60, "others": 180, "test": 360}
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["before", "retrained", "fast-fedul"]
    for row in rows.values():
        low, high = row["attack"]["auc"]["interval"]
        assert low <= row["attack"]["auc"]["value"] <= high
        assert row["attack"]["num_members"] == 60 * 8
        # 480 non-members are too few for one in a hundred.
        assert row["attack"]["found"] == {"1 %": None, "0.1 %": None}
        assert set(row["klom"]) == {"leaver", "others", "test"}
        points = row["whole"]["relapse"]["points"]
        assert [point["rounds"] for point in points] == list(range(6))
    assert rows["retrained"]["gaps"]["kl"] == 0
    assert set(rows["retrained"]["differences"].values()) == {"none"}
    assert rows["before"]["whole"]["relearn"]["reached"] == 0
    said = " ".join(found["may_not_conclude"])
    assert "Anything at 1 % false positives" in said
    assert any("After fast-fedul the attack" in text for text in found["may_conclude"])
    page = (folder / "page.html").read_text()
    assert "Is client-0 gone?" in page
    assert "Relapse: further rounds without the client." in page
    shown = run("audit", "run", "client-0", "--shadows", 16, cwd=folder)
    assert "You may not conclude:" in shown.stdout
    assert "area by loss" in shown.stdout
    assert re.search(r"Noise of .*: accuracy [\d.]+, .*area by loss", shown.stdout)
    assert not re.search(r"\b(main|auc)\b", shown.stdout)


def test_a_budget_stops_it_and_the_same_command_goes_on(folder: Path) -> None:
    words = ("audit", "run", "client-1", "--shadows", 8)
    found = run_json(*words, "--budget", 0.0001, cwd=folder)
    assert found["shadows"] == 0
    assert found["notes"] == [
        "0 of 8 shadow federations are done; the same command goes on"
    ]
    stopped = run(*words, "--budget", 0.0001, cwd=folder)
    assert "1 of 8" not in stopped.stderr
    assert found["rows"][2]["attack"] is None
    assert found["rows"][2]["whole"]["point"]["loss"] > 0
    assert "0 shadow federations are done" in found["may_not_conclude"][-1]
    told = run(*words, "--json", cwd=folder)
    assert json.loads(told.stdout)["rows"][2]["attack"] is not None
    said: list[tuple[str, int, int]] = []
    audit(folder / "run", "client-1", shadows=8, say=lambda *step: said.append(step))
    assert ("shadow federations, 8 kept from before", 8, 8) in said
    assert not any(what == "shadow federations" for what, _, _ in said)


def test_after_ctrl_c_it_goes_on_and_a_damaged_file_is_measured_again(
    folder: Path,
) -> None:
    words = ("audit", "run", "client-0", "--shadows", 8)

    def begun() -> bool:
        return len(list((folder / "run").glob(KEPT))) >= 4

    _, said = interrupt(*COMMAND, *words, ready=begun, cwd=folder)
    assert "stopped; to go on: fastfedul audit run client-0 --shadows 8" in said
    kept = sorted((folder / "run").glob(KEPT))
    whole = {path: path.stat().st_mtime_ns for path in kept}
    kept[0].write_bytes(kept[0].read_bytes()[:-7])
    resumed = run_json(*words, cwd=folder)
    again = {path: path.stat().st_mtime_ns for path in kept}
    assert [path for path in kept if again[path] != whole[path]] == [kept[0]]
    shutil.rmtree(next((folder / "run").glob("audit-*")))
    # The rows have seconds, and the digest is over the rows too.
    moved = run_json(*words, "--work", folder / "other", cwd=folder)
    left_out = {"rows": None, "digest": None}
    assert moved | left_out == resumed | left_out
    assert not list((folder / "run").glob("audit-*"))


def test_a_client_that_has_gone_can_be_audited(folder: Path) -> None:
    words = ("audit", "run", "client-0", "--shadows", 8, "--budget", 0.0001)
    before = run_json(*words, cwd=folder)
    run("forget", "run", "client-0", cwd=folder)
    after = run_json(*words, cwd=folder)
    assert "has gone already" in after["notes"][-1]
    for row, same in zip(before["rows"], after["rows"], strict=True):
        one, other = (own["whole"]["point"] for own in (row, same))
        assert one.pop("loss") == pytest.approx(other.pop("loss"), abs=1e-5)
        assert one == other


def test_the_certificate_names_the_audit(folder: Path) -> None:
    words = ("--shadows", 8, "--budget", 0.0001)
    own, other = (
        run("audit", "run", name, *words, "--json", cwd=folder).stdout
        for name in ("client-0", "client-1")
    )
    (folder / "own.json").write_text(own)
    (folder / "other.json").write_text(other)
    told = run("forget", "run", "client-0", "--audit", "other.json", code=2, cwd=folder)
    assert "is an audit of client 'client-1'" in " ".join(one_line(told).split())
    skew = ("--skew", "none", "--audit", "own.json")
    told = run("forget", "run", "client-0", *skew, code=2, cwd=folder)
    assert "of other methods" in " ".join(one_line(told).split())
    done = run_json("forget", "run", "client-0", "--audit", "own.json", cwd=folder)
    check = ("certificate", "check", done["certificate"])
    for name, verdict, code in (("own", "holds", 3), ("other", "fails", 1)):
        found = run_json(*check, "--audit", f"{name}.json", code=code, cwd=folder)
        assert {c["name"]: c["verdict"] for c in found["checks"]}["audit"] == verdict
    again = ("forget", "run", "client-0", "--audit")
    assert run_json(*again, "own.json", cwd=folder)["already"] is True
    told = run(*again, "other.json", code=2, cwd=folder)
    assert "forgotten before without this audit" in " ".join(one_line(told).split())
    run(*again, "missing.json", code=2, cwd=folder)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "nobody"), "is not in this run"),
        (("run", "client-0", "--shadows", "9"), "choose 10"),
        (("run", "client-0", "--shadows", "4"), "8 or more"),
        (("run", "client-0", "--budget", "0"), "budget"),
        (("run", "client-0", "--method", "retrain"), "other than retraining"),
        (("run", "client-0", "--method", "magic"), "unknown method"),
        ((".", "client-0"), "is no run"),
        (("short", "client-0"), "only 3 of 4 rounds are trained"),
    ],
)
def test_bad_input_gets_one_line(
    trained: Path, words: tuple[str, ...], said: str
) -> None:
    assert said in one_line(run("audit", *words, code=2, cwd=trained, columns=300))
