"""FedEraser: rebuild the model from stored lengths and new directions of updates.

Gaoyang Liu, Xiaoqiang Ma, Yang Yang, Chen Wang, Jiangchuan Liu: "FedEraser: Enabling
Efficient Client-Level Data Removal from Federated Learning Models", IWQoS 2021.

Every `interval`-th round counts (the paper's Delta t). The method aggregates the first
of them as stored, without the forgotten clients, because they had no part in the model
before it. In each later round that counts, the clients that stay train briefly from the
rebuilt model. Their stored and fresh updates, the paper's U and U-hat, become

    U-tilde = |U| U-hat / |U-hat|,    M <- M + sum of w U-tilde,

with shares w that sum to 1 over the clients that stay. The paper divides by their
number once more, which would shrink every step; here the step is the weighted mean.
FedAccum, the paper's comparison, adds up the stored updates without any help.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from fastfedul.errors import UnlearnRefusedError
from fastfedul.federation.clients import Federation
from fastfedul.federation.rounds import (
    TrainedRound,
    advance,
    average_buffers,
    require_usable,
)
from fastfedul.ledger.protocol import Ledger, vector
from fastfedul.limits import require_choice, require_number
from fastfedul.methods.protocol import (
    Needs,
    UnlearnRequest,
    UnlearnResult,
    federation_of,
    first_model,
    require_mean,
    require_rounds_for,
    vector_bytes,
)
from fastfedul.params import Flat, Params, norm, scale
from fastfedul.records import ClientUpdate, Model, Round, UpdateEntry, VectorRef

Calibration = Literal["client", "layer"]
CALIBRATIONS: tuple[Calibration, ...] = ("client", "layer")


@dataclass(frozen=True, slots=True, kw_only=True)
class FedEraser:
    """Lets the others train some rounds again, with updates of the stored lengths.

    Attributes:
        interval: Number of rounds of which one counts, Delta t in the paper.
        ratio: Part of the usual local epochs that clients train for, r in the paper,
            above 0 and up to 1.
        calibration: `client`: a whole update gets the stored length, as in the paper.
            `layer`: each parameter array gets its stored length.
    """

    interval: int = 2
    ratio: float = 0.5
    calibration: Calibration = "client"
    name: ClassVar[str] = "federaser"
    needs: ClassVar[Needs] = Needs(history=True, others=True)

    def __post_init__(self) -> None:
        require_number("interval", self.interval, least=1, whole=True)
        require_number("ratio", self.ratio, above=0, most=1)
        require_choice("calibration", self.calibration, CALIBRATIONS)

    def kept_bytes(self, ledger: Ledger) -> int:
        """Return the bytes of the updates of the rounds that count."""
        return _kept_bytes(ledger, self.interval)

    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        """Return the model at the end of the rebuilt rounds."""
        with request.ledger.snapshot():
            model = first_model(request, self.name)
            trained = False
            for rebuilt in self.rounds(request):
                model = rebuilt.model
                trained = trained or rebuilt.round.index > 0
        return _result(request, model, trained=trained)

    def rounds(self, request: UnlearnRequest) -> Iterator[TrainedRound]:
        """Yield the rebuilt rounds with the models after them, one at a time."""
        name = self.name
        federation = federation_of(request, self)
        ledger = request.ledger
        retained = _retained(request, self.interval, name)
        # Every refusal comes before a client trains.
        for entries in retained:
            first = entries[0].round == 0
            if not first:
                _check_present(entries, federation)
            if first or self.calibration == "layer":
                _check_kept(entries, name)
            else:
                _check_norms(entries)
        model = first_model(request, name)
        for entries in retained:
            if entries[0].round == 0:
                round_ = _stored(ledger, entries)
            else:
                round_ = self._calibrated(ledger, federation, model, entries)
            model = advance(model, round_)
            yield TrainedRound(round_, model)

    def _calibrated(
        self,
        ledger: Ledger,
        federation: Federation,
        model: Model,
        entries: Sequence[UpdateEntry],
    ) -> Round:
        """Return a round trained from the rebuilt model, with the stored lengths."""
        index = entries[0].round
        names = [entry.client for entry in entries]
        local = replace(federation.local, epochs=self.ratio * federation.local.epochs)
        results = federation.clients.train(model, index, names, local)
        require_usable(names, results, model, index)
        shares = _shares(entries)
        updates = []
        for entry, share, result in zip(entries, shares, results, strict=True):
            sent = scale(result.delta, federation.scales.get(entry.client, 1.0))
            if self.calibration == "client":
                flat = calibrated(sent.flat, entry.norm)
            else:
                flat = calibrated_by_layer(sent, _vector(ledger, entry)).flat
            delta = Params(sent.layout, flat)
            updates.append(ClientUpdate(entry.client, share, delta))
        buffers = average_buffers(
            [result.buffers for result in results], shares, model.buffers
        )
        return Round(index, tuple(updates), buffers=buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAccum:
    """FedEraser without calibration: stored updates added up, and no help at all.

    Attributes:
        interval: Number of rounds of which one counts, Delta t in the paper.
    """

    interval: int = 2
    name: ClassVar[str] = "fedaccum"
    needs: ClassVar[Needs] = Needs(history=True)

    def __post_init__(self) -> None:
        require_number("interval", self.interval, least=1, whole=True)

    def kept_bytes(self, ledger: Ledger) -> int:
        """Return the bytes of the updates of the rounds that count."""
        return _kept_bytes(ledger, self.interval)

    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        """Return the first model plus the weighted means of the rounds that count."""
        name = self.name
        ledger = request.ledger
        require_rounds_for(name, ledger)
        refs: list[VectorRef] = []
        weights: list[float] = []
        with ledger.snapshot():
            for entries in _retained(request, self.interval, name):
                _check_kept(entries, name)
                refs += [VectorRef(entry.round, entry.client) for entry in entries]
                weights += _shares(entries)
            start = first_model(request, name)
            total: Flat = ledger.combine(refs, [weights]).sums[0]
        params = Params(start.params.layout, start.params.flat + total)
        return _result(request, Model(params, start.buffers), trained=False)


def _kept_bytes(ledger: Ledger, interval: int) -> int:
    counted = [round_.num_updates for round_ in ledger.rounds()][::interval]
    return vector_bytes(ledger, sum(counted))


def calibrated(fresh: Flat, length: float) -> Flat:
    """Return a vector of the fresh direction and the stored length.

    A fresh vector of zeros has no direction, so it stays zero.

    >>> calibrated(np.float32([3, 4]), 10.0)
    array([6., 8.], dtype=float32)
    """
    size = norm(fresh)
    if size == 0:
        return np.zeros_like(fresh)
    # First to length 1: the quotient of the two lengths may be too large for float32.
    direction: Flat = fresh / np.float32(size)
    return direction * np.float32(length)


def calibrated_by_layer(fresh: Params, stored: Params) -> Params:
    """Return the fresh directions with the stored length of each parameter array."""
    parts = [
        calibrated(fresh[name].reshape(-1), norm(stored[name].reshape(-1)))
        for name in fresh
    ]
    return Params(fresh.layout, np.concatenate(parts))


def _retained(
    request: UnlearnRequest, interval: int, name: str
) -> list[tuple[UpdateEntry, ...]]:
    """Return the staying clients' entries of each round that counts and has some."""
    ledger = request.ledger
    require_mean(name, ledger)
    gone = request.gone
    retained = []
    for index in range(0, ledger.num_rounds, interval):
        entries = [e for e in ledger.updates_in(index) if e.client not in gone]
        if entries:
            retained.append(tuple(entries))
    if not retained:
        raise UnlearnRefusedError(
            f"{name} finds nobody who stays in any of the rounds that count; choose an "
            "interval of 1, or retrain"
        )
    return retained


def _stored(ledger: Ledger, entries: Sequence[UpdateEntry]) -> Round:
    """Return a round of stored updates."""
    pairs = zip(entries, _shares(entries), strict=True)
    updates = [ClientUpdate(e.client, share, _vector(ledger, e)) for e, share in pairs]
    return Round(entries[0].round, tuple(updates))


def _vector(ledger: Ledger, entry: UpdateEntry) -> Params:
    flat = vector(ledger, VectorRef(entry.round, entry.client))
    return Params(ledger.settings.layout, flat)


def _shares(entries: Sequence[UpdateEntry]) -> list[float]:
    total = math.fsum(entry.share for entry in entries)
    return [entry.share / total for entry in entries]


def _result(request: UnlearnRequest, model: Model, *, trained: bool) -> UnlearnResult:
    """Return the result; a ledger has no buffers of earlier rounds to start from."""
    old = bool(model.buffers) and not trained
    return UnlearnResult(
        params=model.params,
        clients=tuple(sorted(request.forget)),
        buffers=None if old else model.buffers,
    )


def _check_present(entries: Sequence[UpdateEntry], federation: Federation) -> None:
    for entry in entries:
        if entry.client not in federation.clients.data:
            raise UnlearnRefusedError(
                f"{FedEraser.name} needs {entry.client!r:.80}, who took part in round "
                f"{entry.round} and is not in this federation; forget it too, or "
                "bring it back"
            )


def _check_kept(entries: Sequence[UpdateEntry], name: str) -> None:
    for entry in entries:
        if not entry.kept:
            raise UnlearnRefusedError(
                f"{name} needs the update of client {entry.client!r:.80} in round "
                f"{entry.round}, which was not kept; record with --keep all, or retrain"
            )


def _check_norms(entries: Sequence[UpdateEntry]) -> None:
    for entry in entries:
        if math.isnan(entry.norm):
            raise UnlearnRefusedError(
                f"{FedEraser.name} needs the length of the update of "
                f"{entry.client!r:.80} in round {entry.round}, which the server never "
                "had; retrain"
            )
