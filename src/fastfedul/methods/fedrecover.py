"""FedRecover: train again, with the server estimating most of the updates.

Xiaoyu Cao, Jinyuan Jia, Zaixi Zhang, Neil Zhenqiang Gong: "FedRecover: Recovering from
Poisoning Attacks in Federated Learning using Historical Information", IEEE Symposium
on Security and Privacy 2023.

A client's update at the recovered model is the stored update plus the curvature of its
loss times the way between the two models: g^ = g- + H~ (w^ - w-). L-BFGS gives the
product with H~ from the clients' answers in the few rounds in which the server asks.

An update here is local minus global parameters. So it is minus the paper's g, and the
curvature has a minus.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from fastfedul.errors import UnlearnRefusedError
from fastfedul.federation.clients import Federation
from fastfedul.federation.rounds import average_buffers, require_usable
from fastfedul.ledger.protocol import Ledger, models, vector
from fastfedul.limits import require_number
from fastfedul.methods.curvature import SecantPair, curvature_times, secant_pair
from fastfedul.methods.protocol import (
    Needs,
    UnlearnRequest,
    UnlearnResult,
    federation_of,
    first_model,
    require_mean,
    vector_bytes,
)
from fastfedul.params import Array, Flat, Params, scale, weighted_sum
from fastfedul.records import ClientId, Model, UpdateEntry, VectorRef


@dataclass(frozen=True, slots=True, kw_only=True)
class FedRecover:
    """Estimates the others' updates from stored ones, and asks them now and then.

    The server asks clients in some rounds only. Up to the first round of a client to
    forget the stored updates are exact, so it asks nobody. The counts below begin after
    this round, and `max_exact_share` limits them.

    Attributes:
        warmup: Rounds at the start in which the server asks, the paper's T_w; None for
            a tenth of all rounds and at least 2.
        correction: Number of rounds after which the server asks again, T_c; None for
            never.
        final: Rounds at the end in which the server asks, T_f; None for a twentieth of
            all rounds and at least 1.
        memory: Number of a client's answers that give its curvature, s.
        max_curvature: Largest curvature that an answer may stand for, in updates per
            way. Beyond 2, rounds of training would swing ever further out. None for
            no limit, as in the paper: the values then run away if clients train with a
            large learning rate or momentum.
        tolerance_rate: Part of the stored values that may be above the threshold tau.
            The server asks a client whose estimate is above tau, as long as a round is
            left to ask in; after that it cuts the estimate to plus or minus tau.
        max_exact_share: Part of all rounds in which the server may ask, 0 to 1.
    """

    warmup: int | None = None
    correction: int | None = 10
    final: int | None = None
    memory: int = 2
    max_curvature: float | None = 2.0
    tolerance_rate: float = 1e-6
    max_exact_share: float = 0.3
    name: ClassVar[str] = "fedrecover"
    needs: ClassVar[Needs] = Needs(history=True, others=True)

    def __post_init__(self) -> None:
        require_number("warmup", self.warmup, least=1, whole=True, unset=True)
        require_number("correction", self.correction, least=1, whole=True, unset=True)
        require_number("final", self.final, least=0, whole=True, unset=True)
        require_number("memory", self.memory, least=1, whole=True)
        require_number("max_curvature", self.max_curvature, above=0, unset=True)
        require_number("tolerance_rate", self.tolerance_rate, least=0, below=1)
        require_number("max_exact_share", self.max_exact_share, least=0, most=1)

    def kept_bytes(self, ledger: Ledger) -> int:
        """Return the bytes of every update and of every step."""
        rounds = ledger.rounds()
        vectors = sum(round_.num_updates for round_ in rounds) + len(rounds)
        return vector_bytes(ledger, vectors)

    def __call__(self, request: UnlearnRequest) -> UnlearnResult:
        """Return the model that the rounds would have given without the clients."""
        federation = federation_of(request, self)
        ledger = request.ledger
        clients = tuple(sorted(request.forget))
        with ledger.snapshot():
            first = _first_round_with(ledger, request.gone)
            if first == ledger.num_rounds:
                return UnlearnResult(params=ledger.final.params, clients=clients)
            staying = _staying_updates(request, federation, first)
            wanted = self.exact_rounds(first, ledger.num_rounds)
            allowed = self._allowed_rounds(first, ledger.num_rounds)
            recovery = _Recovery(
                ledger=ledger,
                federation=federation,
                method=self,
                threshold=_threshold(ledger, staying, self.tolerance_rate),
                asked=frozenset(wanted[:allowed]),
                spare=max(0, allowed - len(wanted)),
            )
            start = first_model(request, self.name) if first == 0 else None
            model = recovery.replay(first, staying, start)
        return UnlearnResult(
            params=model.params,
            clients=clients,
            buffers=None if recovery.has_old_buffers else model.buffers,
            warnings=_warnings(recovery, len(wanted)),
        )

    def exact_rounds(self, first: int, num_rounds: int) -> tuple[int, ...]:
        """Return the rounds in which the server asks everybody, most important first.

        The first round after the models part gives the curvature, and the last round
        removes the errors so far. So these two come before the others.

        Args:
            first: The first round in which a client to forget took part.
            num_rounds: Number of all rounds.

        >>> FedRecover().exact_rounds(0, 20)
        (1, 19, 2, 12)
        """
        warmup = max(2, round(0.1 * num_rounds)) if self.warmup is None else self.warmup
        final = max(1, round(0.05 * num_rounds)) if self.final is None else self.final
        left = range(first + 1, num_rounds)
        start, end = left[:warmup], left[max(0, len(left) - final) :][::-1]
        every = self.correction or num_rounds
        between = left[warmup + every - 1 :: every]
        order = [*start[:1], *end[:1], *start[1:], *end[1:], *between]
        return tuple(dict.fromkeys(order))

    def _allowed_rounds(self, first: int, num_rounds: int) -> int:
        """Return the number of rounds in which the server may ask.

        Raises:
            UnlearnRefusedError: If it is 0, and the method needs one.
        """
        allowed = math.floor(self.max_exact_share * num_rounds + 1e-9)
        if allowed == 0 and first + 1 < num_rounds:
            raise UnlearnRefusedError(
                f"fedrecover may ask in {self.max_exact_share:g} of {num_rounds} "
                "rounds, which is none, and then knows no curvature; raise "
                "max_exact_share, or retrain"
            )
        return allowed


@dataclass(slots=True, kw_only=True)
class _Recovery:
    """One pass over the rounds.

    Attributes:
        ledger: The ledger.
        federation: The clients to ask.
        method: The method with its settings.
        threshold: Largest value of an estimate that the server trusts.
        asked: Rounds in which the server asks everybody.
        spare: Further rounds in which it can ask clients with odd estimates.
        num_cut: Number of estimates that the server cut to the threshold.
        pairs: Answers about each client's curvature, the latest last.
        averaged: Whether the buffers come from clients that the server asked.
    """

    ledger: Ledger
    federation: Federation
    method: FedRecover
    threshold: float
    asked: frozenset[int]
    spare: int
    num_cut: int = 0
    pairs: dict[ClientId, list[SecantPair]] = field(default_factory=dict)
    averaged: bool = False

    @property
    def has_old_buffers(self) -> bool:
        """Whether the model has buffers and no client gave new ones.

        A ledger has no buffers of earlier rounds to start from.
        """
        return bool(self.ledger.initial.buffers) and not self.averaged

    def replay(
        self,
        first: int,
        staying: Mapping[int, Sequence[UpdateEntry]],
        model: Model | None,
    ) -> Model:
        """Return the model after all rounds, from the first round that differs.

        Args:
            first: Number of that round.
            staying: By round, the entries of the clients that stay.
            model: Model before that round; None for the ledger's.
        """
        for index, stored in enumerate(models(self.ledger)):
            if index < first:
                continue
            if model is None:
                model = Model(stored, self.ledger.initial.buffers)
            # A round with nobody left would not have happened.
            if staying.get(index):
                model = self._after(model, stored, staying[index])
        assert model is not None
        return model

    def _after(
        self, model: Model, stored: Params, entries: Sequence[UpdateEntry]
    ) -> Model:
        index = entries[0].round
        shares = np.array([entry.share for entry in entries])
        shares /= shares.sum()
        way = model.params.flat - stored.flat
        names = [entry.client for entry in entries]
        buffers = model.buffers
        deltas = {n: vector(self.ledger, VectorRef(index, n)) for n in names}
        if index in self.asked:
            local = self._ask(model, way, index, deltas, names)
            if buffers:
                buffers = average_buffers(local, shares.tolist(), buffers)
                self.averaged = True
        elif way.any():
            self._estimate(model, way, index, deltas)
        step = weighted_sum([deltas[name] for name in names], shares.tolist())
        return Model(Params(stored.layout, model.params.flat + step), buffers)

    def _estimate(
        self, model: Model, way: Flat, index: int, deltas: dict[ClientId, Flat]
    ) -> None:
        """Replace stored updates by estimates, and odd estimates by answers."""
        stored = dict(deltas)
        for name, delta in stored.items():
            deltas[name] = delta - curvature_times(self.pairs.get(name, ()), way)
        odd = [n for n, d in deltas.items() if np.abs(d).max() > self.threshold]
        if odd and self.spare:
            self.spare -= 1
            deltas.update({name: stored[name] for name in odd})
            self._ask(model, way, index, deltas, odd)
            return
        self.num_cut += len(odd)
        for name in odd:
            deltas[name] = np.clip(deltas[name], -self.threshold, self.threshold)

    def _ask(
        self,
        model: Model,
        way: Flat,
        index: int,
        deltas: dict[ClientId, Flat],
        names: Sequence[ClientId],
    ) -> list[Mapping[str, Array]]:
        """Replace stored updates by answers; return the clients' buffers."""
        results = self.federation.clients.train(model, index, names)
        require_usable(names, results, model, index)
        for name, result in zip(names, results, strict=True):
            exact = scale(result.delta, self.federation.scales.get(name, 1.0)).flat
            turned = deltas[name] - exact
            pair = secant_pair(way, turned, self.method.max_curvature)
            if pair is not None:
                known = [*self.pairs.get(name, ()), pair]
                self.pairs[name] = known[-self.method.memory :]
            deltas[name] = exact
        return [result.buffers for result in results]


def _first_round_with(ledger: Ledger, gone: frozenset[ClientId]) -> int:
    """Return the first round of these clients; without one, the number of rounds."""
    rounds = [u.round for name in gone for u in ledger.updates_of(name)[:1]]
    if any(entry.state == "erased" for entry in ledger.clients().values()):
        # Only the first model is known to be free of an erased client.
        return 0
    return min(rounds, default=ledger.num_rounds)


def _staying_updates(
    request: UnlearnRequest, federation: Federation, first: int
) -> dict[int, list[UpdateEntry]]:
    """Return, by round, the entries of the clients that stay.

    Raises:
        UnlearnRefusedError: If the server cannot replay the rounds.
    """
    ledger = request.ledger
    require_mean(FedRecover.name, ledger)
    found: dict[int, list[UpdateEntry]] = {}
    for index in range(first, ledger.num_rounds):
        entries = [u for u in ledger.updates_in(index) if u.client not in request.gone]
        for entry in entries:
            name = f"{entry.client!r:.80}"
            if entry.client not in federation.clients.data:
                raise UnlearnRefusedError(
                    f"fedrecover must ask {name}, who is not in this federation"
                )
            if not entry.kept:
                raise UnlearnRefusedError(
                    f"fedrecover needs every update, and the update of {name} in round "
                    f"{index} was not kept; train with --keep all"
                )
        found[index] = entries
    return found


def _threshold(
    ledger: Ledger, staying: Mapping[int, Sequence[UpdateEntry]], rate: float
) -> float:
    """Return the size that this part of the stored values exceeds."""
    entries = [entry for part in staying.values() for entry in part]
    count = 1 + int(rate * len(entries) * ledger.settings.layout.size)
    largest = np.zeros(0, np.float32)
    for entry in entries:
        sizes = np.abs(vector(ledger, VectorRef(entry.round, entry.client)))
        largest = np.concatenate([largest, sizes])
        if len(largest) > count:
            largest = np.partition(largest, -count)[-count:]
    return float(largest.min()) if len(largest) else 0.0


def _warnings(recovery: _Recovery, num_wanted: int) -> tuple[str, ...]:
    """Return sentences that a reader of the result should know."""
    found: list[str] = []
    if recovery.num_cut:
        found.append(
            f"{recovery.num_cut} estimated updates were odd when no round to ask in "
            f"was left; the server cut them to at most {recovery.threshold:.3g}"
        )
    if num_wanted > len(recovery.asked):
        found.append(
            f"the server asked in {len(recovery.asked)} rounds instead of "
            f"{num_wanted}, to stay within {recovery.method.max_exact_share:g} of all"
        )
    if any(entry.state == "erased" for entry in recovery.ledger.clients().values()):
        found.append(
            "clients were erased before: the stored models differ from the models at "
            "which the other clients computed their updates"
        )
    return tuple(found)
