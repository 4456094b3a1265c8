"""Measures of a run: a row for each method, beside three retrainings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fastfedul.errors import NothingToPoisonError, UnlearnRefusedError
from fastfedul.evaluate.comparison import Answers, Questions, ask, score
from fastfedul.evaluate.membership import membership, per_example_loss
from fastfedul.federation.trainer import TrainingError
from fastfedul.federation.workers.pool import Workers, open_workers
from fastfedul.ledger.keeping import Keep
from fastfedul.ledger.reader import LedgerReader
from fastfedul.methods.fast_fedul.method import FastFedUL
from fastfedul.methods.fast_fedul.skews import Kronecker, Scalar
from fastfedul.methods.protocol import (
    Method,
    UnlearnRequest,
    UnlearnResult,
    measured,
)
from fastfedul.methods.retrain import Retrain
from fastfedul.params import Flat, Params
from fastfedul.records import Model
from fastfedul.runs.comparison import find_methods
from fastfedul.runs.exam import questions_of
from fastfedul.runs.preparation import Prepared, federation_for, prepare, start_workers
from fastfedul.runs.training import train
from paper.board.measured import Measured
from paper.board.retired import old_difference
from paper.board.runs import HONEST, Run, config_of, setting_for
from paper.recoding import recoded

Row = dict[str, Any]
"""The measures of one method, as JSON values."""

WHOLE_RUN = "run"
"""The only row of a run that could not be made."""

BEFORE = "before"
RETRAINED = ("retrained-1", "retrained-2", "retrained-3")
KRONECKER_ALL, KRONECKER_64 = "kronecker-all", "kronecker-64"
KRONECKER_SUMS = "kronecker-sums"
SCALAR, SCALAR_BEST = "scalar-0.07", "scalar-best"
AUTO, DIRECTION = "auto", "direction"
FEDERASER, FEDRECOVER, KD, MEASURED = "federaser", "fedrecover", "kd", "measured"
KRONECKER = (KRONECKER_ALL, KRONECKER_64, KRONECKER_SUMS)
TRAINING_FREE = (SCALAR, SCALAR_BEST, AUTO, DIRECTION)
RIVALS = (FEDERASER, FEDRECOVER, KD, MEASURED)
METHODS = (*KRONECKER, *TRAINING_FREE, *RIVALS)
CELLS = (BEFORE, *RETRAINED, *METHODS)

RETIRED = (AUTO, DIRECTION)
"""Rows that an older commit computes; see `retired.py`."""

TRIED_DAMPINGS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7)
_ORDER_SEED = 1_000_000
"""Added once, twice, thrice to a run's seed for the batch order of a retraining."""


def cells_of(run: Run) -> tuple[str, ...]:
    """Return the names of a run's rows."""
    return tuple(name for name in CELLS if run.rivals or name not in RIVALS)


def measure(
    run: Run,
    folder: Path,
    diamonds: str,
    old_software: Path,
    cells: Sequence[str] | None = None,
) -> list[Row]:
    """Train a run, forget in every way, and return a row for each.

    Args:
        run: The run.
        folder: Where its ledgers go; the caller removes it.
        diamonds: The file of the diamonds table.
        old_software: Where to import the software from that has the retired skews.
        cells: Names of the rows to make, without retrainings; None for all.
    """
    wanted = cells_of(run) if cells is None else (*RETRAINED, *cells)
    names = [name for name in cells_of(run) if name in wanted]
    try:
        made = _trained(run, folder, diamonds)
    except (NothingToPoisonError, TrainingError) as error:
        return [{**run.facts, "method": WHOLE_RUN, "refused": str(error)}]
    with _Bench(made, folder, old_software) as bench:
        return [bench.row(name) for name in names]


@dataclass(frozen=True, slots=True)
class _Made:
    """A trained run, with the seed that was taken."""

    run: Run
    prepared: Prepared
    seconds: float


def _trained(run: Run, folder: Path, diamonds: str) -> _Made:
    """Train a run with the first of its seeds that lets every attacker attack.

    Raises:
        NothingToPoisonError: If none does.
        TrainingError: If the training ran away.
    """
    refusal: NothingToPoisonError | None = None
    for seed in run.seeds:
        own = replace(run, seed=seed)
        config = config_of(own, diamonds)
        try:
            prepared = prepare(config)
        except NothingToPoisonError as error:
            refusal = refusal or error
            continue
        started = time.perf_counter()
        train(config, folder / "run")
        return _Made(own, prepared, time.perf_counter() - started)
    assert refusal is not None
    raise refusal


class _Bench:
    """A trained run with its three retrainings, and every way to forget on it."""

    def __init__(self, made: _Made, folder: Path, old_software: Path) -> None:
        self._run = made.run
        self._prepared = made.prepared
        self._train_seconds = made.seconds
        self._folder = folder
        self._old_software = old_software
        self._stack = ExitStack()
        leavers = tuple(made.prepared.attack.attackers)
        self._forget = leavers or made.prepared.names[: made.run.leavers]

    def __enter__(self) -> _Bench:
        prepared = self._prepared
        self._questions: Questions = questions_of(prepared, self._forget)
        self._workers = self._stack.enter_context(start_workers(prepared))
        self._ledger = self._stack.enter_context(LedgerReader(self._folder / "run"))
        self._retrained = [
            self._retrain(order) for order in range(1, 1 + len(RETRAINED))
        ]
        finals = [done.params.flat.astype(np.float64) for done in self._retrained]
        self._mean: Flat = np.mean(finals, axis=0)
        answers = [self._ask(self._model(done)) for done in self._retrained]
        self._wanted = _mean_scores([self._shares(own) for own in answers])
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.__exit__(None, None, None)

    def row(self, name: str) -> Row:
        """Return the measures of one method."""
        try:
            return self._row_of(name)
        except (UnlearnRefusedError, TrainingError) as error:
            return {**self._run.facts, "method": name, "refused": str(error)}

    def _row_of(self, name: str) -> Row:
        if name == BEFORE:
            return self._row(name, self._ledger.final, seconds=self._train_seconds)
        if name in RETRAINED:
            done = self._retrained[RETRAINED.index(name)]
            return self._row_of_result(name, done)
        if name == SCALAR_BEST:
            return self._best_scalar()
        if name in RETIRED:
            return self._retired(name)
        ledger = self._sums() if name == KRONECKER_SUMS else self._ledger
        done = measured(self._method(name), self._request(ledger, self._workers))
        return self._row_of_result(name, done)

    def _method(self, name: str) -> Method:
        simple: dict[str, Callable[[], Method]] = {
            KRONECKER_ALL: lambda: FastFedUL(skew=Kronecker("all")),
            KRONECKER_64: lambda: FastFedUL(skew=Kronecker(64)),
            KRONECKER_SUMS: lambda: FastFedUL(skew=Kronecker()),
            SCALAR: lambda: FastFedUL(skew=Scalar()),
            MEASURED: Measured,
        }
        if name in simple:
            return simple[name]()
        known = setting_for(self._run).methods
        settings = {name: known[name]} if name in known else {}
        return find_methods([name], self._prepared, None, settings)[name]

    def _best_scalar(self) -> Row:
        """Return the row of the damping that comes nearest, which takes the answer."""
        started = time.perf_counter()
        request = self._request(self._ledger, self._workers)
        swept = [FastFedUL(skew=Scalar(d))(request) for d in TRIED_DAMPINGS]
        seconds = time.perf_counter() - started
        final = self._ledger.final
        answers = [self._ask(done.model(final)) for done in swept]
        curve = [self._shares(own) for own in answers]
        gaps = [_gap(shares, self._wanted) for shares in curve]
        best = int(np.argmin(gaps))
        row = self._row_of_result(
            SCALAR_BEST, replace(swept[best], seconds=seconds), answers[best]
        )
        tried = [
            [damping, *shares]
            for damping, shares in zip(TRIED_DAMPINGS, curve, strict=True)
        ]
        return {**row, "damping": TRIED_DAMPINGS[best], "curve": tried}

    def _retired(self, name: str) -> Row:
        """Return the row of a skew that the software does not have any more."""
        found = old_difference(
            self._ledger, self._forget, name, self._old_software, self._folder
        )
        final = self._ledger.final
        moved = Params(final.params.layout, final.params.flat + found.vector)
        return self._row(
            name,
            replace(final, params=moved),
            seconds=found.seconds,
            bytes_read=found.bytes_read,
        )

    def _retrain(self, order: int) -> UnlearnResult:
        """Return a retraining whose batches come in an order of their own."""
        prepared = self._prepared
        seed = prepared.config.seed + order * _ORDER_SEED
        with open_workers(
            prepared.trainer, prepared.clients, seed=seed, num_workers=1
        ) as workers:
            return measured(Retrain(), self._request(self._ledger, workers))

    def _request(self, ledger: LedgerReader, workers: Workers) -> UnlearnRequest:
        federation = federation_for(self._prepared, workers)
        return UnlearnRequest(ledger, frozenset(self._forget), federation)

    def _sums(self) -> LedgerReader:
        """Return the run as a ledger of sums would have recorded it."""
        path = self._folder / "sums"
        recoded(self._ledger, path, "float32", "float32", Keep("sums")).close()
        return self._stack.enter_context(LedgerReader(path))

    def _model(self, done: UnlearnResult) -> Model:
        return done.model(self._ledger.final)

    def _ask(self, model: Model) -> Answers:
        return ask(self._prepared.trainer.predict, model, self._questions)

    def _shares(self, answers: Answers) -> tuple[float, float | None]:
        main, backdoor = score(answers, self._questions)
        assert main.value is not None
        return main.value, backdoor.value if backdoor else None

    def _row_of_result(
        self, name: str, done: UnlearnResult, answers: Answers | None = None
    ) -> Row:
        return self._row(
            name,
            self._model(done),
            answers,
            seconds=done.seconds,
            bytes_read=done.bytes_read,
            client_calls=done.client_calls,
            warnings=done.warnings,
        )

    def _row(
        self,
        name: str,
        model: Model,
        answers: Answers | None = None,
        *,
        seconds: float,
        bytes_read: int = 0,
        client_calls: int = 0,
        warnings: Sequence[str] = (),
    ) -> Row:
        found = answers or self._ask(model)
        main, backdoor = score(found, self._questions)
        far = np.linalg.norm(model.params.flat.astype(np.float64) - self._mean)
        return {
            **self._run.facts,
            "method": name,
            "main_correct": main.successes,
            "main_total": main.total,
            "backdoor_hits": backdoor.successes if backdoor else None,
            "backdoor_total": backdoor.total if backdoor else None,
            "mia_auc": self._auc(found),
            "distance": float(f"{far:.6g}"),
            "seconds": round(seconds, 3),
            "bytes_read": bytes_read,
            "client_calls": client_calls,
            "warnings": list(warnings),
            "refused": None,
        }

    def _auc(self, answers: Answers) -> float | None:
        """Return how well the loss tells an honest leaver's examples from others."""
        if self._run.attack != HONEST:
            return None
        questions = self._questions
        found = membership(
            per_example_loss(answers.target, questions.target_labels),
            per_example_loss(answers.test, questions.test_labels),
        )
        return round(found.auc, 6)


def _mean_scores(
    scores: Sequence[tuple[float, float | None]],
) -> tuple[float, float | None]:
    backdoors = [backdoor for _, backdoor in scores if backdoor is not None]
    main = float(np.mean([main for main, _ in scores]))
    return main, float(np.mean(backdoors)) if backdoors else None


def _gap(
    shares: tuple[float, float | None], wanted: tuple[float, float | None]
) -> float:
    return sum(
        abs(own - other)
        for own, other in zip(shares, wanted, strict=True)
        if own is not None and other is not None
    )
