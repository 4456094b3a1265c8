"""The lineage: every model that a ledger had, also those that are gone."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from fastfedul import DiskLedger, InvalidInputError, LedgerReader, Model, erase, forget
from fastfedul.ledger.store.arrays import file_digest
from fastfedul.ledger.store.schema import digest_of
from fastfedul.ledger.verify import verify
from fastfedul.report.lineage_chart import draw_lineage, stages_of
from tests.support.audited import CLIENTS, START, round_of
from tests.support.commands import run, run_json


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger with five rounds, and two forgettings after the third."""
    path = tmp_path / "ledger"
    with DiskLedger.create(path, Model(START)) as ledger:
        for index in range(3):
            ledger.append(round_of(index, CLIENTS))
        forget(ledger, ["a"])
        forget(ledger, ["b"], erase=False)
        for index in range(3, 5):
            ledger.append(round_of(index, CLIENTS[2:]))
    return path


def test_every_model_is_a_node_with_its_parent(tmp_path: Path) -> None:
    digests = []
    with DiskLedger.create(tmp_path / "ledger", Model(START)) as ledger:
        digests.append(file_digest(ledger.model_path).hex())
        ledger.append(round_of(0, CLIENTS))
        digests.append(file_digest(ledger.model_path).hex())
        forget(ledger, ["a"], erase=False)
        digests.append(file_digest(ledger.model_path).hex())
        # Erasing alone changes no model.
        erase(ledger, ["a"])
        ledger.append(round_of(1, CLIENTS[1:]))
        digests.append(file_digest(ledger.model_path).hex())
        found = ledger.lineage()
        log = ledger.log()
        assert verify(ledger).problems == ()
    assert [model.digest for model in found] == digests
    assert [model.parent for model in found] == [None, *digests[:-1]]
    assert [(model.origin, model.at) for model in found] == [
        ("initial", 0),
        ("round", 0),
        ("forgetting", 1),
        ("round", 1),
    ]
    assert log[0].event.details["model_before"] == found[2].parent
    assert log[0].event.details["model_after"] == found[2].digest


@pytest.mark.parametrize(
    ("sql", "problem"),
    [
        ("UPDATE models SET model = zeroblob(32) WHERE id = 8", "lead from"),
        ("UPDATE models SET model = zeroblob(32) WHERE id = 1", "lead from"),
        ("UPDATE models SET model = zeroblob(32) WHERE id = 5", "the log differ"),
        ("UPDATE models SET at = 9 WHERE id = 3", "each round"),
        ("UPDATE models SET id = 9 WHERE id = 8", "is missing"),
    ],
)
def test_a_lineage_that_was_rewritten_with_fitting_digests_is_found(
    sql: str, problem: str, path: Path
) -> None:
    index = sqlite3.connect(path / "index.sqlite", isolation_level=None)
    index.execute(sql)
    for row in index.execute("SELECT * FROM models").fetchall():
        digest = digest_of("models", *row[:-1])
        index.execute("UPDATE models SET digest = ? WHERE id = ?", (digest, row[0]))
    index.close()
    with LedgerReader(path) as ledger:
        assert any(problem in text for text in verify(ledger).problems)


def test_rounds_that_follow_each_other_are_one_box(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with LedgerReader(path) as ledger:
        models = ledger.lineage()
    titles = [
        "initial model",
        "rounds 0 to 2",
        "forgetting, entry 1",
        "forgetting, entry 2",
        "rounds 3 to 4",
    ]
    stages = stages_of(models)
    assert [stage.title for stage in stages] == titles
    picture = tmp_path / "lineage.svg"
    draw_lineage(models, picture)
    text = picture.read_text()
    for stage in stages:
        assert stage.title in text
        assert stage.last.digest[:16] in text
    for wrong in (tmp_path / "lineage.nonsense", tmp_path / "nowhere" / "a.svg"):
        with pytest.raises(InvalidInputError, match="cannot write") as caught:
            draw_lineage(models, wrong)
        assert "\n" not in str(caught.value)


def test_the_command_shows_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with LedgerReader(path) as ledger:
        models, ledger_id = ledger.lineage(), ledger.ledger_id
    shown = run("ledger", "lineage", path).stdout
    assert "rounds 3 to 4" in shown
    assert models[-1].digest in shown
    found = run_json("ledger", "lineage", path)
    assert found["ledger_id"] == ledger_id
    assert [row["digest"] for row in found["models"]] == [m.digest for m in models]
