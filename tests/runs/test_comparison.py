"""The whole story on digits: train, attack, compare ways to forget, show it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.commands import run as run_command

pytest.importorskip("torch", reason="training needs the extra torch")

from fastfedul import (
    DiskLedger,
    FastFedUL,
    FastFedULError,
    InvalidInputError,
    LedgerReader,
    Method,
    NoSkew,
    Scalar,
    add_request,
    forget,
)
from fastfedul.ledger.store.model_files import read_model
from fastfedul.runs.comparison import Comparison, compare, find_methods
from fastfedul.runs.training import RunConfig, train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run with a backdoor."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = RunConfig.from_options(
        clients=5,
        rounds=8,
        epochs=4,
        lr=0.05,
        momentum=0.0,
        attack="pixel",
        poison_ratio=0.5,
        seed=7,
        workers=1,
    )
    train(config, folder)
    return folder


@pytest.fixture(scope="module")
def found(run: Path) -> Comparison:
    methods = ["fast-fedul", "fast-fedul-paper", "fast-fedul-2"]
    return compare(run, methods=methods, damping=0.1)


def fastfedul(*arguments: object, code: int = 0) -> str:
    done = run_command(*arguments, code=code)
    return done.stdout if code == 0 else done.stderr


def test_the_rows_are_before_retrained_and_one_per_method(found: Comparison) -> None:
    assert [row.method for row in found.rows] == [
        "before",
        "retrained",
        "fast-fedul",
        "fast-fedul-paper",
        "fast-fedul-2",
    ]
    before, retrained, usual, paper, _ = found.rows
    assert before.backdoor is not None
    assert retrained.backdoor is not None
    assert usual.backdoor is not None
    assert paper.backdoor is not None
    assert before.backdoor.value is not None
    assert before.backdoor.value > 0.5
    assert retrained.backdoor.value is not None
    assert retrained.backdoor.value < 0.2
    assert usual.backdoor.successes < before.backdoor.successes
    assert paper.backdoor.successes < before.backdoor.successes
    assert usual.client_calls == paper.client_calls == 0
    assert retrained.client_calls == 4 * 8
    assert retrained.seconds > paper.seconds


def test_the_reference_is_at_distance_zero_from_itself(found: Comparison) -> None:
    retrained = found.rows[1]
    assert retrained.closeness is not None
    assert retrained.closeness.distance == 0
    assert retrained.kl == pytest.approx(0, abs=1e-6)
    assert all(row.closeness and row.closeness.distance > 0 for row in found.rows[2:])


def test_membership_and_change_are_about_the_targets_own_images(
    found: Comparison,
) -> None:
    before, *_, last = found.rows
    assert before.change == 0
    assert last.change is not None
    assert last.change > 0
    assert found.prepared is not None
    size = found.prepared.sizes[found.forget[0]]
    assert last.membership is not None
    assert last.membership.num_members == size


def test_what_was_held_back_is_told_layer_by_layer(run: Path) -> None:
    found = compare(run, methods=["fast-fedul"])
    assert found.reaction is not None
    with LedgerReader(run) as ledger:
        names = [slot.name for slot in ledger.settings.layout.slots]
    kept = dict(found.reaction.removed_by_layer)
    assert list(kept) == names
    assert any(part is not None and part < 1 for part in kept.values())
    assert found.reaction.num_unknown == 0, "a run knows how its clients train"
    paper = compare(run, methods=["fast-fedul-paper"], damping=0.1)
    assert paper.reaction is None


def test_an_attackers_chance_of_being_kept_is_reported(found: Comparison) -> None:
    keeping = found.keeping
    assert keeping.num_kept == 2
    assert keeping.attackers is not None
    assert keeping.others is not None
    assert keeping.attackers + 4 * keeping.others == pytest.approx(2)


def test_comparing_leaves_the_run_as_it_was_and_retrains_once(
    run: Path, found: Comparison
) -> None:
    [kept] = run.glob("retrained-*.safetensors")
    content = kept.read_bytes()
    again = compare(run, methods=["fast-fedul"], damping=0.1)
    assert again.rows[1].seconds == found.rows[1].seconds
    assert kept.read_bytes() == content
    with LedgerReader(run) as ledger:
        assert {entry.state for entry in ledger.clients().values()} == {"active"}
        retrained = read_model(kept, layout=ledger.settings.layout)
    assert np.isfinite(retrained.params.flat).all()


def test_a_request_is_not_kept_waiting_and_a_change_is_noticed(
    run: Path, found: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastfedul.ledger.store.index.TIMEOUT_SECONDS", 0.1)
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    asked: list[object] = []

    def forget_meanwhile(name: str, _done: int, _total: int) -> None:
        if name == "fast-fedul-2" and not asked:
            asked.append(add_request(folder, "client-1"))
            with DiskLedger(folder) as ledger:
                forget(ledger, ["client-1"], erase=True)

    with pytest.raises(FastFedULError, match="changed while its methods"):
        compare(
            folder,
            methods=["fast-fedul", "fast-fedul-2"],
            damping=0.1,
            say=forget_meanwhile,
        )
    assert asked


def test_a_client_that_is_forgotten_already_cannot_be_compared(tmp_path: Path) -> None:
    config = RunConfig.from_options(clients=3, rounds=2, epochs=1, workers=1)
    train(config, tmp_path / "run")
    with pytest.raises(
        InvalidInputError, match="name the clients to forget, as --forget"
    ):
        compare(tmp_path / "run")
    assert compare(tmp_path / "run", ["client-1"], methods=[]).rows[0].backdoor is None
    fastfedul("forget", tmp_path / "run", "client-1")
    with pytest.raises(InvalidInputError, match="forgotten already"):
        compare(tmp_path / "run", ["client-1"])


@pytest.mark.slow
def test_the_command_line_compares_and_reports(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    answer: dict[str, Any] = json.loads(
        fastfedul("compare", run, "--methods", "fast-fedul", "--out", page, "--json")
    )
    assert answer["report"] == str(page)
    assert {
        "method",
        "main",
        "backdoor",
        "main_count",
        "backdoor_count",
        "mia_auc",
        "distance",
        "angle_degrees",
        "seconds",
        "client_calls",
        "history_bytes",
    } <= set(answer["rows"][0])
    assert all(0 <= part <= 1.5 for part in answer["removed_by_layer"].values())
    text = page.read_text("utf-8")
    assert "client-0" in text
    assert "<svg" in text
    assert "What was removed where" in text
    measured = json.loads(fastfedul("evaluate", run, "--json"))
    assert measured["main"] == answer["rows"][0]["main"]
    assert measured["backdoor_count"] == answer["rows"][0]["backdoor_count"]
    assert measured["attackers"] == ["client-0"]
    assert "unknown method" in fastfedul("compare", run, "--methods", "magic", code=2)
    assert "did you mean" in fastfedul("compare", run, "--forget", "client-9", code=2)
    assert "accuracy" in fastfedul("compare", run, "--methods", "fast-fedul")


@pytest.mark.slow
def test_rivals_are_compared_and_what_cannot_run_is_named(run: Path) -> None:
    """The run has no images of the server's own, so distillation is left out."""
    methods = ["--methods", "fedaccum,kd,cdp,fedrecover", "--set", "cdp.rounds=1"]
    facts = json.loads(fastfedul("compare", run, *methods, "--json"))
    rows = {row["method"]: row for row in facts["rows"]}
    assert list(rows) == ["before", "retrained", "fedaccum", "cdp", "fedrecover"]
    assert list(facts["refused"]) == ["kd"]
    assert "--server-images" in facts["refused"]["kd"]
    # 5 clients, one forgotten, 8 rounds; a look and one round for the pruning.
    calls = {name: row["client_calls"] for name, row in rows.items()}
    assert calls["retrained"] == 4 * 8
    assert calls["fedaccum"] == 0
    assert calls["cdp"] == 4 + 4
    assert 0 < calls["fedrecover"] <= 0.3 * 4 * 8
    assert "class, not a client" in Path(facts["report"]).read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--methods", "kd"], "images of the server's own"),
        (["--methods", "magic"], "unknown method 'magic'; choose from retrain"),
        (["--set", "interval=4"], "write METHOD.NAME=VALUE"),
        (["--set", "kd.lr=0.1"], "add it to the methods"),
        (["--methods", "kd", "--set", "kd.speed=1"], "kd has no such setting: speed"),
        (["--methods", "kd", "--set", "kd.lr=-1"], "the learning rate is -1"),
        (["--methods", "kd", "--set", "kd.lr=fast"], "the learning rate is 'fast'"),
    ],
)
def test_wrong_methods_and_settings_get_one_line(
    run: Path, arguments: list[str], reason: str
) -> None:
    code = 1 if "server's own" in reason else 2
    assert reason in " ".join(fastfedul("compare", run, *arguments, code=code).split())


def test_the_demo_refuses_to_replace_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("keep me")
    assert "no run of ours" in fastfedul("demo", "--out", tmp_path, code=2)
    assert (tmp_path / "letters.txt").read_text() == "keep me"


@pytest.mark.slow
def test_the_demo_shows_an_attack_that_is_forgotten(tmp_path: Path) -> None:
    answer = json.loads(
        fastfedul("demo", "--out", tmp_path / "demo", "--seed", 100, "--json")
    )
    rows = {row["method"]: row for row in answer["rows"]}
    assert rows["before"]["backdoor"] > 0.8
    assert rows["fast-fedul"]["backdoor"] <= rows["retrained"]["backdoor"] + 0.10
    assert rows["fast-fedul"]["main"] >= rows["retrained"]["main"] - 0.07
    assert Path(answer["report"]).is_file()


@pytest.mark.slow
def test_a_report_after_forgetting_shows_the_model_as_it_is(
    run: Path, tmp_path: Path
) -> None:
    """The order of the README: train, forget, train on, report."""
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    deployed = folder / "model.safetensors"
    before = deployed.read_bytes()
    fastfedul("forget", folder, "client-0", "--erase")
    assert deployed.read_bytes() != before
    with LedgerReader(folder) as ledger:
        layout = ledger.settings.layout
        np.testing.assert_array_equal(
            read_model(deployed, layout=layout).params.flat, ledger.final.params.flat
        )
    fastfedul("train", folder, "--resume", "--rounds", 10)
    fastfedul("report", folder)
    page = (folder / "report.html").read_text("utf-8")
    assert "A model of digits without client-0" in page
    assert "client-0 after round 8" in page
    assert ">Now<" in page
    assert ">Retrained<" in page
    assert "every attacker has gone" in fastfedul("compare", folder, code=2)


@pytest.mark.slow
def test_a_run_that_nobody_left_has_a_report(tmp_path: Path) -> None:
    train(
        RunConfig.from_options(clients=2, rounds=1, epochs=1, workers=1),
        tmp_path / "run",
    )
    fastfedul("report", tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert "<h1>A model of digits</h1>" in page
    assert ">Retrained<" not in page


@pytest.mark.slow
@pytest.mark.parametrize("place", ["config.toml", "ledger/page.html", "metrics.jsonl"])
def test_a_page_is_not_written_over_the_run(run: Path, place: str) -> None:
    before = sorted(run.rglob("*")), (run / "config.toml").read_bytes()
    for command in ("report", "compare"):
        said = fastfedul(command, run, "--out", run / place, code=2)
        assert "place of the run" in said
    assert (sorted(run.rglob("*")), (run / "config.toml").read_bytes()) == before


@pytest.mark.slow
def test_a_damaged_retrained_model_is_made_anew(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    rows = compare(folder, methods=["fast-fedul"]).rows
    [facts] = folder.glob("retrained-*.json")
    for damaged in (facts, facts.with_suffix(".safetensors")):
        damaged.write_bytes(b"{")
        again = compare(folder, methods=["fast-fedul"]).rows
        assert [row.main for row in again] == [row.main for row in rows]


@pytest.mark.slow
def test_a_planned_forgetting_that_is_refused_says_how_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = (
        *("--rounds", 2, "--clients", 4, "--epochs", 1, "--train-size", 200),
        *("--workers", 1, "--keep", "optimal:1", "--forget", "client-0@1"),
    )
    said = fastfedul("train", folder, *options, code=1)
    assert "--minimum-coverage 0" in said
    fastfedul("forget", folder, "client-0", "--minimum-coverage", 0)
    fastfedul("train", folder, "--resume")


def test_applying_a_request_replaces_the_model_of_the_run(
    run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    fastfedul("request", "add", folder, "client-0")
    fastfedul("request", "apply", folder)
    with LedgerReader(folder) as ledger:
        deployed = read_model(
            folder / "model.safetensors", layout=ledger.settings.layout
        )
        np.testing.assert_array_equal(deployed.params.flat, ledger.final.params.flat)


def test_methods_of_one_name_are_told_apart_by_settings() -> None:
    scalar, none = FastFedUL(skew=Scalar(0.07)), FastFedUL(skew=NoSkew())

    def names(*methods: str | Method) -> list[str]:
        return list(find_methods(methods, None, None, {}))

    apart = ["fast-fedul", "fast-fedul, skew none", "fast-fedul, damping 0.07"]
    assert names("fast-fedul", none, scalar) == apart
    assert names(FastFedUL(), none, scalar) == apart
    assert names(scalar, FastFedUL(skew=Scalar(0.2))) == [
        "fast-fedul, damping 0.07",
        "fast-fedul, damping 0.2",
    ]
    # Nothing tells the same method from itself.
    assert names("fast-fedul", FastFedUL()) == ["fast-fedul", "fast-fedul (2)"]
