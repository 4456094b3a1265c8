"""A watched mark under Flower: silence before, a warning when it is back."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

if os.environ.get("CI") != "true":
    pytest.importorskip("flwr", reason="needs the extra flower")

from fastfedul import ClientUpdate, Model, Params, Round, add_request
from fastfedul.errors import InvalidInputError
from fastfedul.integrations.flower import Watch
from fastfedul.integrations.flower.arrays import buffer_rule, to_record
from fastfedul.integrations.flower.rounds import RoundSettings
from fastfedul.integrations.flower.run import Answering, RecordedRun
from fastfedul.ledger.keeping import Keep
from fastfedul.methods.fast_fedul.method import FastFedUL

MARK = 2
"""The value of the model that only client `a` moves, until somebody else does."""


def mark_of(model: Model) -> float:
    return float(model.params.flat[MARK])


def recorded(path: Path, score: Callable[[Model], float]) -> RecordedRun:
    """Return an open run that watches a mark."""
    answering = Answering(
        method=FastFedUL(), erase=True, certificates=path / "certificates", key=None
    )
    watch = Watch(score=score, alarm=0.4)
    settings = RoundSettings(keep=Keep.parse("all"))
    run = RecordedRun(path, settings, answering, buffer_rule(None), None, None, watch)
    start = Model(Params.of({"w": np.zeros(3, np.float32)}))
    run.open(to_record(start, ("w",)))
    return run


def train(run: RecordedRun, **marks: float) -> None:
    """Record a round in which each client moves the mark by so much."""
    updates = tuple(
        ClientUpdate(name, 1 / len(marks), Params.of({"w": np.array([1.0, 1.0, mark])}))
        for name, mark in marks.items()
    )
    run.append(Round(run.num_rounds, updates))


def test_the_log_warns_once_when_a_forgotten_mark_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = recorded(tmp_path / "ledger", mark_of)
    with caplog.at_level("INFO", logger="flwr"):
        train(run, a=1.0, b=0.0, c=0.0)
        train(run, a=1.0, b=0.0, c=0.0)
        assert mark_of(run.model) > 0.4
        assert "watched mark" not in caplog.text
        add_request(run.path, "a")
        run.answer_waiting()
        assert "score of the watched mark after forgetting" in caplog.text
        assert mark_of(run.model) < 0.4
        train(run, b=0.1, c=0.1)
        assert "is there" not in caplog.text
        train(run, b=0.8, c=0.8)
        train(run, b=0.1, c=0.1)
        assert caplog.text.count("is there after round 4") == 1
        assert "is there after round 5" not in caplog.text
        train(run, b=-2.0, c=-2.0)
        train(run, b=2.0, c=2.0)
        assert "is there after round 7" in caplog.text
    run.close()


def test_a_score_that_fails_or_is_no_number_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scores = iter([0.0])

    def score(model: Model) -> float:
        found = next(scores, None)
        return 1 / 0 if found is None else found

    run = recorded(tmp_path / "ledger", score)
    with caplog.at_level("INFO", logger="flwr"):
        train(run, a=1.0, b=0.0, c=0.0)
        add_request(run.path, "a")
        run.answer_waiting()
        train(run, b=0.1, c=0.1)
        assert "no score after round 2: ZeroDivisionError" in caplog.text
        assert run.num_rounds == 2
        scores = iter([float("nan")])
        train(run, b=0.1, c=0.1)
        assert "is there after round 3: score nan" in caplog.text
    run.close()


def test_a_watch_needs_a_function_and_a_number(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="a function of a model"):
        Watch(score=3, alarm=0.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="alarm of a watch"):
        Watch(score=mark_of, alarm=float("nan"))
