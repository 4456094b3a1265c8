"""Computes missing cells: trains each run once, then calls every method on it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastfedul.errors import NothingToPoisonError, UnlearnRefusedError
from fastfedul.evaluate.comparison import Answers, Evaluation, Questions, ask, evaluate
from fastfedul.evaluate.intervals import Proportion
from fastfedul.federation.trainer import TrainingError
from fastfedul.federation.workers.pool import Workers
from fastfedul.forgetting.folder import RETRAINED_MODELS
from fastfedul.ledger.keeping import Keep
from fastfedul.ledger.reader import LedgerReader
from fastfedul.methods.fast_fedul.skews import Scalar
from fastfedul.methods.protocol import (
    Method,
    UnlearnRequest,
    bytes_to_keep,
    measured,
)
from fastfedul.records import Model
from fastfedul.runs.comparison import find_methods, retrained_model
from fastfedul.runs.config import CONFIG, RunConfig
from fastfedul.runs.exam import questions_of
from fastfedul.runs.preparation import (
    federation_for,
    prepare,
    score,
    start_workers,
)
from fastfedul.runs.training import load_config, resume, train
from paper.cells import (
    BEFORE,
    LEDGER_SETTINGS,
    RETRAINED,
    Cell,
    CellStore,
    run_key,
    without_ledger,
)
from paper.iterations import iterations
from paper.lemma import condition, keeping_by_round
from paper.measures import (
    EDITION,
    removal_facts,
    score_sevens,
    split_facts,
    unseen_sevens,
    without_draw,
)
from paper.memory import watched
from paper.recoding import recoded

Say = Callable[[str, int], None]
"""Gets the current step, and the number of cells that it finished."""


def is_missing(
    cell: Cell, store: CellStore, *, again: bool = False, timed: bool = True
) -> bool:
    """Return whether a cell has no result.

    With `again`, a result without the newest measures is missing, too. If `timed`, so
    is a result that was computed beside other programs.
    """
    found = store.read(cell)
    if found is None:
        return True
    if not again or cell.kind != "model":
        return False
    return found.get("edition", 1) < EDITION or (timed and UNTIMED in found)


def compute(
    cells: Sequence[Cell],
    store: CellStore,
    runs: Path,
    say: Say,
    *,
    keep_runs: bool = False,
    timed: bool = True,
) -> None:
    """Compute cells, run by run.

    Stopped at any moment it goes on where it was: cells that are done are kept, and
    a half-trained run is taken up again. The folder of a run is removed when its
    cells are done.

    Args:
        cells: The cells.
        store: Gets the results.
        runs: Folder for the runs.
        say: Told how far it is.
        keep_runs: Leave the folders of the runs there.
        timed: Whether nothing else uses the machine. If not, a result keeps the times
            and the memory of the result that it replaces, or has none.
    """
    by_run: dict[str, list[Cell]] = {}
    for cell in cells:
        by_run.setdefault(run_key(cell.run), []).append(cell)
    for key, missing in by_run.items():
        folder = runs / key
        try:
            _trained(folder, missing[0].run, say)
            _mark(folder, timed)
        except NothingToPoisonError as error:
            # This follows from the options and is a result; any other refusal, such as
            # of data that are not there, does not and is none.
            for cell in missing:
                store.write(cell, {"refused": str(error), **_ABOUT_RESULT})
                say(f"{_name(cell.run)}: cannot be run", 1)
            continue
        with _Bench(folder, missing[0].leavers, say) as bench:
            for cell in missing:
                say(f"{_name(cell.run)}: {cell.method}", 0)
                result = bench.result(cell)
                if not timed:
                    result = _with_earlier_times(result, store.read(cell))
                store.write(cell, {**result, **_ABOUT_RESULT})
                say(f"{_name(cell.run)}: {cell.method}", 1)
        if not keep_runs:
            shutil.rmtree(folder)


UNTIMED = "untimed"
"""Field of a result whose times were not measured with it, and a file of a run."""

_TIMES = ("seconds", "peak_bytes")


def _mark(folder: Path, timed: bool) -> None:
    """Mark a run as untimed, or remove the mark and a retraining without its time."""
    mark = folder / UNTIMED
    if not timed:
        mark.touch()
    elif mark.exists():
        for path in folder.glob(f"{RETRAINED_MODELS}*"):
            path.unlink()
        mark.unlink()


def _with_earlier_times(
    result: dict[str, Any], earlier: Mapping[str, Any] | None
) -> dict[str, Any]:
    if not result.get("seconds"):
        return result
    known = earlier or {}
    times = {name: known.get(name) for name in _TIMES if name in result}
    return {**result, **times, UNTIMED: True}


_RECODED = "recoded"


class _Bench:
    """A trained run with everything that its cells need, opened once."""

    def __init__(self, folder: Path, leavers: int, say: Say) -> None:
        self._folder = folder
        self._leavers = leavers
        self._say = say

    def __enter__(self) -> _Bench:
        self._prepared = prepare(load_config(self._folder))
        self._forget = tuple(sorted(self._prepared.attack.attackers))
        if not self._forget:
            self._forget = self._prepared.names[: self._leavers]
        self._questions = questions_of(self._prepared, self._forget)
        self._sevens = unseen_sevens(self._prepared)
        self._split = split_facts(self._prepared)
        self._workers: Workers = start_workers(self._prepared)
        self._ledger = LedgerReader(self._folder)
        self._others: dict[tuple[str, str], LedgerReader] = {}
        shutil.rmtree(self._folder / _RECODED, ignore_errors=True)
        self._known: dict[str, Answers] = {}
        return self

    def __exit__(self, *exception: object) -> None:
        for ledger in (self._ledger, *self._others.values()):
            ledger.close()
        self._workers.__exit__(*exception)

    def result(self, cell: Cell) -> dict[str, Any]:
        """Return the measures of a cell."""
        try:
            if cell.kind == "iterations":
                return self._iterations(cell)
            if cell.kind == "keeping":
                return self._keeping(cell)
            return self._model(cell)
        except UnlearnRefusedError as error:
            return {"refused": str(error)}
        except TrainingError as error:
            # The method drove the training to infinity: a result, and the end of the
            # workers.
            self._workers.__exit__(None, None, None)
            self._workers = start_workers(self._prepared)
            return {"refused": f"it failed: {error}"}

    def _model(self, cell: Cell) -> dict[str, Any]:
        reference, seconds, calls = self._retrained()
        final = self._ledger.final
        before = self._answers(BEFORE, final)
        again = self._answers(RETRAINED, reference)
        if cell.method == BEFORE:
            return self._row(final, self._evaluate(before, before, again))
        if cell.method == RETRAINED:
            row = self._evaluate(again, before, again, seconds, calls)
            return self._row(reference, row)
        method, request = self._method(cell), self._request(self._ledger_of(cell))
        drawn, drawn_request = without_draw(method, request)
        with watched() as peak:
            done = measured(drawn, drawn_request)
        model = done.model(final)
        answers = self._ask(model)
        row = self._evaluate(answers, before, again, done.seconds, done.client_calls)
        return {
            **self._row(model, row),
            "bytes_read": done.bytes_read,
            "stored_bytes": bytes_to_keep(method, request.ledger),
            "peak_bytes": peak.num_bytes,
            "warnings": list(done.warnings),
            **removal_facts(done),
        }

    def _row(self, model: Model, found: Evaluation) -> dict[str, Any]:
        sevens = score_sevens(self._prepared, self._sevens, model)
        return {**_row(found), **sevens, **self._split}

    def _keeping(self, cell: Cell) -> dict[str, Any]:
        keep = Keep.parse(cell.settings["keep"])
        found = keeping_by_round(self._ledger, keep, self._forget)
        return {**found, "condition": condition(self._prepared, self._ledger.final)}

    def _iterations(self, cell: Cell) -> dict[str, Any]:
        final, request = self._ledger.final, self._request(self._ledger)
        points = []
        for number, params in enumerate(iterations(request, Scalar(**cell.settings))):
            self._say(f"{_name(cell.run)}: iteration {number}", 0)
            model = Model(params, final.buffers)
            points.append(score(self._prepared, self._workers, model))
        return {"main": [m for m, _ in points], "backdoor": [b for _, b in points]}

    def _method(self, cell: Cell) -> Method:
        own = {cell.method: without_ledger(cell.settings)}
        found = find_methods([cell.method], self._prepared, None, own)
        [method] = found.values()
        return method

    def _ledger_of(self, cell: Cell) -> LedgerReader:
        """Return the run's ledger as the cell wants it stored."""
        dtype, history = (
            {**LEDGER_SETTINGS, **cell.settings}[key] for key in LEDGER_SETTINGS
        )
        if (dtype, history) == tuple(LEDGER_SETTINGS.values()):
            return self._ledger
        if (dtype, history) not in self._others:
            path = self._folder / _RECODED / f"{history}-{dtype}"
            keep = Keep("sums" if history == "sums" else "all")
            recoded(self._ledger, path, dtype, dtype, keep).close()
            self._others[dtype, history] = LedgerReader(path)
        return self._others[dtype, history]

    def _request(self, ledger: LedgerReader) -> UnlearnRequest:
        federation = federation_for(self._prepared, self._workers)
        return UnlearnRequest(ledger, frozenset(self._forget), federation)

    def _retrained(self) -> tuple[Model, float, int]:
        return retrained_model(
            self._folder,
            self._prepared,
            self._ledger,
            self._forget,
            lambda what, done, total: self._say(
                f"{_name(self._prepared.config)}: {what} {done}/{total}", 0
            ),
            self._workers,
        )

    def _answers(self, name: str, model: Model) -> Answers:
        if name not in self._known:
            self._known[name] = self._ask(model)
        return self._known[name]

    def _ask(self, model: Model) -> Answers:
        return ask(self._prepared.trainer.predict, model, self._questions)

    def _evaluate(
        self,
        answers: Answers,
        before: Answers,
        again: Answers,
        seconds: float = 0.0,
        calls: int = 0,
    ) -> Evaluation:
        questions: Questions = self._questions
        return evaluate(
            "",
            answers,
            questions,
            before=before,
            reference=again,
            seconds=seconds,
            client_calls=calls,
        )


_ABOUT_RESULT = {"software": version("fastfedul"), "edition": EDITION}


def _trained(folder: Path, run: RunConfig, say: Say) -> None:
    def progress(metrics: Any) -> None:
        say(f"{_name(run)}: training {metrics.round + 1}/{run.rounds}", 0)

    say(f"{_name(run)}: training", 0)
    if (folder / CONFIG).is_file():
        resume(folder, progress=progress)
    else:
        train(run, folder, progress)


def _name(run: RunConfig) -> str:
    split = "" if run.data.split.kind == "iid" else f", {run.data.split}"
    return f"{run.data.source}, {run.attack.kind}{split}, seed {run.seed}"


def _row(found: Evaluation) -> dict[str, Any]:
    near, member = found.closeness, found.membership
    return {
        **_counts("main", found.main),
        **_counts("backdoor", found.backdoor),
        "mia_auc": member.auc if member else None,
        "mia_tpr_at_1_fpr": member.tpr_at_1_fpr if member else None,
        "distance": near.distance if near else None,
        "angle_degrees": near.angle_degrees if near else None,
        "unit_angles": [
            None if math.isnan(angle) else round(angle, 4)
            for angle in (near.unit_angles if near and near.unit_angles else ())
        ],
        "kl": found.kl,
        "seconds": found.seconds,
        "client_calls": found.client_calls,
    }


def _counts(name: str, found: Proportion | None) -> dict[str, Any]:
    if found is None:
        return {name: None, f"{name}_count": None, f"{name}_total": None}
    return {
        name: found.value,
        f"{name}_count": found.successes,
        f"{name}_total": found.total,
    }
