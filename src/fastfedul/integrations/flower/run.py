"""The ledger of a run under Flower, and the model that goes with it, bit by bit."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from logging import INFO, WARNING
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord
from flwr.supercore.logger import log

from fastfedul.errors import InvalidInputError, LedgerError
from fastfedul.federation.server_optimizers import ServerOptimizer
from fastfedul.forgetting.folder import require_newest
from fastfedul.forgetting.requests import apply_requests, has_waiting
from fastfedul.forgetting.signing import SigningKey
from fastfedul.integrations.flower.arrays import IsBuffer, to_model, to_record
from fastfedul.integrations.flower.measures import Measures
from fastfedul.integrations.flower.replies import JudgedReplies
from fastfedul.integrations.flower.rounds import RoundSettings
from fastfedul.integrations.flower.watch import Watch
from fastfedul.ledger.changes.log import TAKES_OUT
from fastfedul.ledger.disk import DiskLedger
from fastfedul.ledger.estimate import require_room
from fastfedul.ledger.failures import FailureEntry, failures_of, note_failures
from fastfedul.ledger.protocol import now
from fastfedul.ledger.settings import LedgerSettings
from fastfedul.ledger.store.folder import INDEX
from fastfedul.limits import require_type
from fastfedul.methods.protocol import Method
from fastfedul.params import Array
from fastfedul.records import Model, Round
from fastfedul.runs.evaluation_source import EvaluationSource
from fastfedul.runs.stages import StageTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """How requests to forget are answered.

    Attributes:
        method: The method that forgets, with its settings.
        erase: Whether the clients' updates are erased from the ledger too.
        certificates: Folder for the certificates.
        key: Key that signs the certificates, if there is one.
    """

    method: Method
    erase: bool
    certificates: Path
    key: SigningKey | None


class RecordedRun:
    """The ledger of `Recorded` on disk, and the model that goes with it.

    Args:
        path: Folder of the ledger.
        settings: How rounds are made and stored.
        answering: How requests to forget are answered.
        rule: Tells buffers from parameters.
        federation: Name of the federation, if it has one.
        evaluate: How the model is measured after each round; None for not at all.
        watch: The mark to watch once a client was forgotten; None for none.
        metrics_port: Port on which to serve metrics while the ledger is open.
    """

    def __init__(
        self,
        path: Path,
        settings: RoundSettings,
        answering: Answering,
        rule: IsBuffer,
        federation: str | None = None,
        evaluate: EvaluationSource | None = None,
        watch: Watch | None = None,
        metrics_port: int | None = None,
    ) -> None:
        self.path = path
        self.stages = StageTimes()
        self._metrics_port = metrics_port
        self._served = ExitStack()
        self._measures = None if evaluate is None else Measures(path, evaluate)
        if watch is not None:
            require_type("watch", watch, Watch, "a Watch")
        self._watch = watch
        self._answering = answering
        self.failures = failures_of(path)
        self._settings = settings
        self._rule = rule
        self._federation = federation
        self._ledger: DiskLedger | None = None
        self._order: tuple[str, ...] = ()
        self._model: Model | None = None
        self._arrays: ArrayRecord | None = None

    def __str__(self) -> str:
        own = self._settings
        by = "" if own.optimizer is None else f", server optimizer {own.optimizer}"
        rule = f"{own.aggregation} of the updates{by}"
        return f"{rule}, stored as {own.dtype} in {self.path}"

    @property
    def ledger(self) -> DiskLedger:
        """The ledger, open for writing."""
        assert self._ledger is not None
        return self._ledger

    @property
    def num_rounds(self) -> int:
        """How many rounds are recorded."""
        return self.ledger.num_rounds

    @property
    def arrays(self) -> ArrayRecord:
        """The current model as Flower's arrays."""
        if self._arrays is None:
            self._arrays = to_record(self.model, self._order)
        return self._arrays

    @property
    def model(self) -> Model:
        """The current model."""
        if self._model is None:
            self._model = self.ledger.final
        return self._model

    def open(self, arrays: ArrayRecord, num_rounds: int = 1) -> bool:
        """Open the ledger, and answer requests that wait; return False if it was open.

        Args:
            arrays: The model to start from, if there is no ledger yet.
            num_rounds: Rounds for which the budget of a new ledger must have room.
        """
        if self._ledger is not None:
            return False
        initial = to_model(arrays, self._rule)
        self._order = tuple(arrays)
        if (self.path / INDEX).is_file():
            self._ledger = DiskLedger(self.path)
            try:
                require_newest(self._ledger, self._answering.certificates)
                self._check(initial)
            except BaseException:
                self.close()
                raise
        else:
            settings = LedgerSettings(
                layout=initial.params.layout,
                history=self._settings.keep.history,
                budget=self._settings.budget,
            )
            require_room(settings, num_rounds)
            self._ledger = DiskLedger.create(
                self.path,
                initial,
                aggregation=self._settings.aggregation,
                update_dtype=self._settings.dtype,
                history=self._settings.keep.history,
                sums_from=self._settings.keep.sums_from,
                budget=self._settings.budget,
                arrays=self._settings.arrays,
                federation=self._federation,
                optimizer=self._settings.optimizer,
            )
        self._refresh()
        try:
            if self._measures is not None:
                self._measures.open(self._ledger)
            self._serve()
        except BaseException:
            self.close()
            raise
        if self.ledger.requests() or self.ledger.events():
            self._answer()
        return True

    def _serve(self) -> None:
        """Serve metrics until the ledger is closed, if somebody gave a port."""
        if self._metrics_port is None:
            return
        from fastfedul.watching import HOST, served_metrics

        served = served_metrics(self.path, self._metrics_port, self.stages)
        port = self._served.enter_context(served)
        log(INFO, "metrics at http://%s:%s/metrics", HOST, port)

    def close(self) -> None:
        """Let another process write to the ledger."""
        self._served.close()
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    def append(self, round_: Round) -> None:
        """Record a round; when this returns, it survives power loss."""
        model = self.stages.timed("record", self.ledger.append)(round_)
        self._refresh()
        self._model = model
        if self._measures is not None:
            measure = self.stages.timed("evaluate", self._measures.after_round)
            measure(round_.index, model)
        if self._watch is not None and any(
            event.kind in TAKES_OUT for event in self.ledger.events()
        ):
            self._watch.look(model, f"after round {round_.index + 1}")

    def answer_waiting(self) -> None:
        """Answer the requests since the last round."""
        if has_waiting(self.ledger):
            self.stages.timed("forget", self._answer)()

    def _answer(self) -> None:
        """Answer all requests, and write certificates that a crash prevented."""
        own = self._answering
        answered = apply_requests(
            self.ledger,
            certificates=own.certificates,
            method=own.method,
            key=own.key,
            erase=own.erase,
        )
        for done in answered:
            request = done.request
            log(
                INFO,
                "request %s: %r is %s",
                request.number,
                request.client,
                request.state,
            )
            for text in done.forgetting.warnings if done.forgetting else ():
                log(WARNING, "request %s: %s", request.number, text)
        self._refresh()
        if self._watch is not None and any(done.forgetting for done in answered):
            self._watch.look(self.model, "after forgetting", always=True)

    def _refresh(self) -> None:
        """Read the model from the ledger again when it is needed."""
        self._model = self._arrays = None

    def require_current(self, arrays: ArrayRecord) -> Model:
        """Return the ledger's model after checking that clients get that very one."""
        if arrays is not self._arrays:
            current = self.arrays
            same = set(arrays) == set(current) and all(
                _same(arrays[name].numpy(), current[name].numpy()) for name in current
            )
            if not same:
                raise InvalidInputError(
                    "the arrays to be sent are not the ledger's model; pass on the "
                    "arrays of aggregate_train, or use start()"
                )
        return self.model

    def report(self, number: int, task: str, judged: JudgedReplies) -> None:
        """Note clients that are left out of a round, and capped weights.

        Args:
            number: Number of the round, from 1.
            task: `train` or `evaluate`.
            judged: The replies of the round.

        Raises:
            LedgerError: If the file of failures cannot be written.
        """
        notes: list[FailureEntry] = []
        time = now()
        for one in sorted(
            (*judged.absent, *judged.judgement.quarantined), key=lambda o: o.client
        ):
            log(WARNING, "round %s without %r: %s", number, one.client, one.reason)
            notes.append(
                FailureEntry(time, number, task, one.client, "left out", one.reason)
            )
        weights = {own.client: own.weight for own in judged.judgement.usable}
        for client, claimed in judged.judgement.capped.items():
            reason = f"its weight {claimed:g} counts as {weights[client]:g}"
            log(WARNING, "round %s caps %r: %s", number, client, reason)
            notes.append(FailureEntry(time, number, task, client, "capped", reason))
        note_failures(self.path, notes)

    def _check(self, initial: Model) -> None:
        """Raise unless the ledger belongs to this run's model and settings."""
        wanted, found = self._settings, self.ledger.settings
        if found.aggregation != wanted.aggregation:
            raise LedgerError(
                f"the ledger at {self.path} records a {found.aggregation}, the "
                f"strategy computes a {wanted.aggregation}; choose another folder"
            )
        if found.optimizer != wanted.optimizer:
            raise LedgerError(
                f"the server of the ledger at {self.path} "
                f"{_server(found.optimizer)}, and the strategy's server "
                f"{_server(wanted.optimizer)}; choose another folder"
            )
        if found.update_dtype != wanted.dtype:
            raise LedgerError(
                f"the ledger at {self.path} stores {found.update_dtype}; go on with "
                f'dtype="{found.update_dtype}" or choose another folder'
            )
        # The other way round is a ledger that was compacted: it goes on with sums.
        if wanted.keep.history == "sums" and found.history != "sums":
            raise LedgerError(
                f"the ledger at {self.path} keeps rounds, not sums; run `fastfedul "
                f"ledger compact {self.path}` first, or go on with another keep"
            )
        if wanted.keep.history == "sums" and wanted.keep.sums_from != found.sums_from:
            raise LedgerError(
                f"the ledger at {self.path} keeps sums:{found.sums_from}; go on with "
                f'keep="sums:{found.sums_from}" or choose another folder'
            )
        if wanted.keep.use == "aggregate" and found.history == "sums":
            raise LedgerError(
                f"the ledger at {self.path} keeps sums, which are over all updates; go "
                'on with keep_use="store" or choose another folder'
            )
        same = found.layout == initial.params.layout
        if not same or set(initial.buffers) != set(self.model.buffers):
            raise LedgerError(
                f"the ledger at {self.path} is of another model; choose another folder"
            )


def _server(optimizer: ServerOptimizer | None) -> str:
    """Return what a server does with the mean of a round, in words."""
    return "adds the mean" if optimizer is None else f"uses {optimizer}"


def _same(left: Array, right: Array) -> bool:
    return left.dtype == right.dtype and np.array_equal(left, right)
