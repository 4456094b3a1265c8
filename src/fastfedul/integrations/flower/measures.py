"""Measures the model of a recorded federation after each round."""

from __future__ import annotations

import time
from dataclasses import replace
from logging import ERROR, INFO
from pathlib import Path

from flwr.supercore.logger import log

from fastfedul.federation.local import USERS_OWN, one_line
from fastfedul.federation.own_functions import is_own_function
from fastfedul.ledger.reader import LedgerReader
from fastfedul.limits import require_type
from fastfedul.records import Model
from fastfedul.runs import metrics_file
from fastfedul.runs.evaluation_source import EvaluationSource, write_source
from fastfedul.runs.exam import Exam, exam_of
from fastfedul.runs.metrics_file import RoundMetrics


class Measures:
    """Lines of `LEDGER.metrics.jsonl`, one for each round of this process.

    Args:
        path: Folder of the ledger.
        source: Network and test examples.
    """

    def __init__(self, path: Path, source: EvaluationSource) -> None:
        require_type("evaluate", source, EvaluationSource, "an EvaluationSource")
        if not is_own_function(source.test):
            # The ledger may be in another folder than this process.
            source = replace(source, test=str(Path(source.test).absolute()))
        self._path, self._source = path, source
        self._exam: Exam | None = None
        self._last = 0.0

    def open(self, ledger: LedgerReader) -> None:
        """Write the file that tells other processes, and load the examples.

        Raises:
            InvalidInputError: If network and examples do not fit the ledger's model.
        """
        write_source(self._path, self._source)
        self._exam = exam_of(ledger, self._path)
        self._last = time.perf_counter()

    def after_round(self, index: int, model: Model) -> None:
        """Add the line of a round. A failure ends no training: the log has it."""
        assert self._exam is not None
        try:
            main, _ = self._exam.score(model)
            now = time.perf_counter()
            own = RoundMetrics(index, main.value, None, now - self._last)
            self._last = now
            metrics_file.append(metrics_file.metrics_beside(self._path), own)
        except USERS_OWN as error:
            log(ERROR, "round %s has no metrics: %s", index + 1, one_line(error))
            return
        log(INFO, "accuracy after round %s: %.4f", index + 1, main.value)
