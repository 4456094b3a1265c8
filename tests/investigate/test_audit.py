"""Shadow federations, the noise floor, and what the numbers allow to conclude."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastfedul.evaluate.comparison import BEFORE, RETRAINED
from fastfedul.evaluate.intervals import Proportion
from fastfedul.evaluate.lira import Attacked, Measured
from fastfedul.investigate.audit.auditing import audit
from fastfedul.investigate.audit.findings import Row, conclusions
from fastfedul.investigate.audit.kept import LEAVER, Kept
from fastfedul.investigate.audit.shadows import Shadows, recorded
from fastfedul.investigate.audit.whole import (
    Course,
    Whole,
    gaps,
    noise_of,
    retrained_again,
)
from fastfedul.ledger.memory import MemoryLedger
from fastfedul.ledger.reader import LedgerReader
from fastfedul.methods.fast_fedul.method import FastFedUL
from fastfedul.runs.afterwards import Point
from fastfedul.runs.config import RunConfig
from fastfedul.runs.preparation import prepare, retrain, start_workers
from fastfedul.runs.training import train

pytest.importorskip("torch", reason="training needs the extra torch")
pytestmark = pytest.mark.slow

CLIENT = "client-0"


def config(**more: object) -> RunConfig:
    usual = {"clients": 4, "train_size": 240, "rounds": 3, "epochs": 1, "workers": 1}
    return RunConfig.from_options({**usual, **more})


def test_shadows_are_pairs_of_opposite_halves_with_chances_of_their_own() -> None:
    shadows = Shadows(prepare(config()), CLIENT)
    members = np.array([shadows.members(number) for number in range(6)])
    assert (members[::2] != members[1::2]).all()
    assert members.sum(axis=1).tolist() == [30] * 6
    assert (members[0] != members[2]).any()
    found = [
        dict(shadows.measured(number, {}, {BEFORE, RETRAINED}, {}))
        for number in (0, 1, 0)
    ]
    np.testing.assert_equal(found[0], found[2])
    for kind in (BEFORE, RETRAINED):
        assert (found[0][kind][LEAVER] != found[1][kind][LEAVER]).all()


@pytest.mark.parametrize(
    "options", [{}, {"keep": "sums"}, {"dtype": "bfloat16", "keep": "optimal:2"}]
)
def test_a_whole_training_is_the_run_with_the_ledger_that_the_run_keeps(
    tmp_path: Path, options: dict[str, str]
) -> None:
    own = config(**options)
    train(own, tmp_path / "run")
    prepared = prepare(own)
    with (
        start_workers(prepared) as workers,
        recorded(prepared, workers, frozenset()) as ledger,
    ):
        assert isinstance(ledger, MemoryLedger) == (options == {})
        assert ledger.settings.history == own.keep_policy.history
        assert ledger.settings.update_dtype == own.recording.dtype
        with LedgerReader(tmp_path / "run") as run:
            assert (ledger.final.params.flat == run.final.params.flat).all()


def test_another_order_of_batches_changes_the_order_alone() -> None:
    prepared = prepare(config())
    with start_workers(prepared) as workers:
        one = retrain(prepared, workers, {CLIENT})
    other = retrained_again(prepared, frozenset([CLIENT]), 0)
    apart = np.linalg.norm(one.params.flat - other.params.flat)
    assert 0 < apart < 0.5 * np.linalg.norm(one.params.flat)
    # With one batch in a round there is one order.
    whole = prepare(config(batch_size=300, epochs=1))
    with start_workers(whole) as workers:
        one = retrain(whole, workers, {CLIENT})
    other = retrained_again(whole, frozenset([CLIENT]), 0)
    np.testing.assert_allclose(one.params.flat, other.params.flat, atol=1e-4)


def test_noise_is_the_largest_distance_of_two_retrained_models() -> None:
    def whole(right: int, backdoor: int | None, kl: float) -> Whole:
        attack = None if backdoor is None else Proportion(backdoor, 100)
        course = Course((), None)
        point = Point(0, Proportion(right, 100), attack, 0.1)
        return Whole(point, right / 100, kl, course, course)

    found = noise_of([whole(90, 3, 0.0), whole(95, 2, 0.1), whole(88, 3, 0.2)])
    assert found == pytest.approx(
        {"main": 0.07, "backdoor": 0.01, "auc": 0.07, "kl": 0.2}
    )
    assert noise_of([whole(90, None, 0.0), whole(95, None, 0.1)])["backdoor"] is None


def test_methods_share_shadows_and_a_later_method_joins_them(tmp_path: Path) -> None:
    train(config(), tmp_path / "run")
    first = audit(tmp_path / "run", CLIENT, shadows=8)
    kept = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").glob("audit-*/*")}
    refusing = FastFedUL(minimum_coverage=0.5)
    both = audit(tmp_path / "run", CLIENT, ["fast-fedul", "kd", refusing], shadows=8)
    assert {p: p.stat().st_mtime_ns for p in kept} == kept
    rows = {row.name: row for row in both.rows}
    assert rows["fast-fedul"] == first.rows[2]
    assert "server's own" in str(rows["kd"].refused)
    assert rows["kd"].attack is None
    assert "fast-fedul, minimum coverage 0.5" in rows
    noise = both.noise["main"]
    assert noise is not None
    retrained = rows[RETRAINED].whole
    assert retrained is not None
    assert gaps(retrained, retrained)["main"] == 0


def test_margins_of_other_examples_are_not_taken_for_kept_ones(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "work", {LEAVER: 3})
    kept.keep_margins(0, "x", {LEAVER: np.ones(3, np.float32)})
    assert kept.margins(0, "x") is not None
    assert kept.margins(1, "x") is None
    assert Kept(tmp_path / "work", {LEAVER: 4}).margins(0, "x") is None
    kept.keep_margins(0, "x", {LEAVER: np.full(3, np.nan, np.float32)})
    assert kept.margins(0, "x") is None


def attacked(more: float, half: float = 0.01) -> Attacked:
    """Return an attack that finds more than in the retrained models."""
    ends = (more - half, more + half)
    own = Measured(0.01 + more, (0, 1), more, ends)
    area = Measured(0.5 + more, (0, 1), more, ends)
    return Attacked(area, {"1 %": own, "0.1 %": None}, 4600, 64)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (0.2, 0.1, "It finds more of the client than after retraining"),
        (0.2, 0.0, "does not tell the model from a retrained one"),
        (0.2, -0.1, "It finds less of the client than after retraining"),
        (0.0, 0.0, "finds nothing in the model as trained either"),
    ],
)
def test_conclusions_follow_from_intervals(
    before: float, after: float, said: str
) -> None:
    rows = tuple(
        Row(name, {}, attack=attacked(more))
        for name, more in ((BEFORE, before), (RETRAINED, 0.0), ("method", after))
    )
    may, may_not = conclusions(rows, 64, by_backdoor=True)
    assert said in may[0]
    assert "After method the attack tells examples apart" in may[0]
    assert any("0.1 % false positives" in text for text in may_not)
    few = tuple(replace(row, attack=None) for row in rows)
    may, may_not = conclusions(few, 6, by_backdoor=True)
    assert may == []
    assert "6 shadow federations are done" in may_not[-1]
