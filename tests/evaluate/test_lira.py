"""U-LiRA: by hand, at chance without a trace, and on models that memorise."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats  # type: ignore[import-untyped]

from fastfedul.errors import InvalidInputError
from fastfedul.evaluate.lira import attack_rates, lira_scores
from fastfedul.evaluate.membership import found_at

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def pairs(count: int, examples: int, seed: int) -> Mask:
    """Return members of shadows in pairs of opposite halves."""
    first = np.random.default_rng(seed).random((count // 2, examples)) < 0.5
    return np.stack([first, ~first], axis=1).reshape(count, examples)


def margins(members: Mask, trace: float, seed: int) -> Floats:
    """Return margins with hard and easy examples; members have a trace more."""
    rng = np.random.default_rng(seed)
    easy = rng.normal(0, 3, members.shape[1])
    noise: Floats = rng.normal(0, 1, members.shape)
    return easy + noise + trace * members


@pytest.mark.parametrize("count", [8, 64])
def test_scores_are_the_likelihood_ratio_of_the_other_pairs(count: int) -> None:
    members = pairs(count, 5, 1)
    values = margins(members, 2.0, 2)
    inside, outside = lira_scores(values, members)
    pair, example = 2, 3
    rest = np.ones(count, bool)
    rest[2 * pair : 2 * pair + 2] = False
    spreads, means = {}, {}
    for side in (True, False):
        rows = [values[rest & (members[:, e] == side), e] for e in range(5)]
        own = [row.var(ddof=1) for row in rows]
        spreads[side] = own[example] if count >= 64 else np.mean(own)
        means[side] = rows[example].mean()
    for side, found in ((True, inside), (False, outside)):
        row = 2 * pair + (members[2 * pair, example] != side)
        fits = [
            stats.norm(means[own], np.sqrt(spreads[own])).logpdf(values[row, example])
            for own in (True, False)
        ]
        assert found[pair, example] == pytest.approx(fits[0] - fits[1])


def test_a_model_that_memorises_is_found_and_an_independent_one_is_not() -> None:
    members = pairs(64, 200, 3)
    scores = {
        name: lira_scores(margins(members, trace, 4), members)
        for name, trace in (("memorises", 5.0), ("chance", 0.0))
    }
    found = attack_rates(scores, "chance")
    known, chance = found["memorises"], found["chance"]
    tpr, nominal = known.found["1 %"], chance.found["1 %"]
    assert tpr is not None
    assert nominal is not None
    assert known.auc.value > 0.99
    assert tpr.value > 0.9
    assert known.auc.differs
    assert tpr.differs
    assert tpr.more == pytest.approx(tpr.value - nominal.value)
    low, high = chance.auc.interval
    assert low <= 0.5 <= high
    assert 0.005 < nominal.value < 0.02
    assert chance.auc.more_interval == (0.0, 0.0)
    assert not chance.auc.differs
    assert known.num_members == 200 * 32


def test_the_threshold_gives_the_nominal_rate_on_new_non_members() -> None:
    members = pairs(64, 400, 5)
    inside, outside = lira_scores(margins(members, 1.0, 6), members)
    assert found_at(-inside.ravel(), -outside.ravel(), 100) > 0.05
    half = outside.shape[0] // 2
    # What the threshold of one half lets through in the other half.
    told = found_at(-outside[half:].ravel(), -outside[:half].ravel(), 100)
    assert told == pytest.approx(0.01, abs=0.005)


@pytest.mark.parametrize("count", [8, 16])
def test_without_a_trace_few_pairs_are_at_chance_too(count: int) -> None:
    areas = []
    for seed in range(200):
        members = pairs(count, 20, seed)
        scores = lira_scores(margins(members, 0.0, 1000 + seed), members)
        inside, outside = scores
        wins = inside.ravel()[:, None] > outside.ravel()
        areas.append(float(wins.mean()))
    error = np.std(areas) / np.sqrt(len(areas))
    assert np.mean(areas) == pytest.approx(0.5, abs=4 * error)


def test_a_rate_needs_enough_non_members() -> None:
    members = pairs(16, 70, 7)
    scores = {"one": lira_scores(margins(members, 0.0, 8), members)}
    [found] = attack_rates(scores, "one").values()
    assert (found.num_members, found.num_shadows) == (560, 16)
    assert found.found["1 %"] is not None
    assert found.found["0.1 %"] is None


def test_models_that_are_all_alike_are_at_chance() -> None:
    members = pairs(8, 3, 9)
    scores = {"same": lira_scores(np.ones((8, 3)), members)}
    assert attack_rates(scores, "same")["same"].auc.value == 0.5


@pytest.mark.parametrize(
    ("count", "change", "said"),
    [
        (6, None, "needs 8 or more"),
        (9, None, "in pairs"),
        (8, "same", "opposite members"),
        (8, "nan", "finite margins"),
        (8, "shape", "do not fit"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    count: int, change: str | None, said: str
) -> None:
    members = np.zeros((count, 3), bool)
    members[::2] = True
    values = np.ones((count, 3))
    if change == "same":
        members[1] = True
    if change == "nan":
        values[0, 0] = np.nan
    if change == "shape":
        values = values[:, :2]
    with pytest.raises(InvalidInputError, match=said):
        lira_scores(values, members)
