"""What each client is worth: the model's quality without it, and Shapley values.

A. Ghorbani and J. Zou, "Data Shapley: equitable valuation of data for machine
learning", ICML 2019, for Monte-Carlo permutations that are cut off where nothing is
left to gain. Here nobody retrains: the server forgets the clients outside a coalition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastfedul.data.dataset import to_model_input
from fastfedul.errors import InvalidInputError
from fastfedul.evaluate.intervals import (
    NORMAL_QUANTILE,
    Interval,
    Proportion,
    mean_interval,
    paired_interval,
)
from fastfedul.evaluate.membership import per_example_loss
from fastfedul.evaluate.metrics import Floats, checked_logits, predicted_classes
from fastfedul.federation.trainer import Inputs, Labels
from fastfedul.investigate.culprits import Tell
from fastfedul.investigate.held_ledger import HeldLedger
from fastfedul.investigate.leave_one_out import LITTLE_KEPT, LeaveOut
from fastfedul.investigate.odds import Predict
from fastfedul.ledger.protocol import Ledger
from fastfedul.ledger.reader import LedgerReader
from fastfedul.limits import Place, path_of, require_number
from fastfedul.notebook import rows_to_html
from fastfedul.records import ClientId, Model
from fastfedul.rng import stream
from fastfedul.runs.given import Given, given_in_file, known_test

CUT_OFF = 0.01
"""Accuracy left to gain below which the rest of a permutation adds nothing."""

_WORST_LOSS = 50.0
"""Loss of one example beyond which a model is simply wrong."""


@dataclass(frozen=True, slots=True)
class Worth:
    """What one client is worth to the model.

    Attributes:
        client: Name of the client.
        accuracy: Accuracy of the model minus accuracy without the client.
        accuracy_interval: 95 % interval of it, over the examples.
        loss: Mean loss without the client minus mean loss of the model, in nats.
        loss_interval: 95 % interval of it, over the examples.
        shapley: Shapley value in accuracy; None if it was not asked for.
        shapley_interval: 95 % interval of it, over the permutations.
        coverage: Kept part of the client's share in the model.
    """

    client: ClientId
    accuracy: float
    accuracy_interval: Interval
    loss: float
    loss_interval: Interval
    shapley: float | None
    shapley_interval: Interval | None
    coverage: float


@dataclass(frozen=True, slots=True, repr=False)
class Contribution:
    """What every client is worth.

    Attributes:
        clients: From the most to the least worth, by loss.
        accuracy: Accuracy of the model.
        loss: Mean loss of the model, in nats.
        num_examples: Examples on which models were measured.
        num_permutations: Permutations of the Shapley values.
        num_coalitions: Coalitions that were measured for them.
        source: Where the examples come from.
        notes: Limits of the answer, in words.
    """

    clients: tuple[Worth, ...]
    accuracy: Proportion
    loss: float
    num_examples: int
    num_permutations: int
    num_coalitions: int
    source: str
    notes: tuple[str, ...]

    def _repr_html_(self) -> str:
        rows = [
            [
                one.client,
                f"{one.loss:+.4f}",
                f"{one.accuracy:+.4f}",
                "-" if one.shapley is None else f"{one.shapley:+.4f}",
            ]
            for one in self.clients
        ]
        title = f"Worth of {len(self.clients)} clients, {self.num_examples} examples"
        columns = ("client", "loss without it", "accuracy", "Shapley value")
        return rows_to_html(title, columns, rows, self.notes)

    def __repr__(self) -> str:
        lines = [f"Worth of {len(self.clients)} clients, {self.num_examples} examples"]
        for one in self.clients:
            own = f"  {one.client!r:.80}: loss {one.loss:+.4f}"
            lines.append(f"{own}, accuracy {one.accuracy:+.4f}")
        return "\n".join([*lines, *self.notes])


def contributions(
    path: Place,
    data: Place | None = None,
    *,
    shapley: int = 0,
    say: Tell = lambda what, done, total: None,
) -> Contribution:
    """Return what every client of a run is worth to its model; nothing changes.

    Args:
        path: A run, also as `train` returned it, or a ledger.
        data: An `.npz` file with clean `images` and `labels`; None for the test
            examples of the run or ledger.
        shapley: Number of permutations of the Shapley values; 0 for none.
        say: Told how far it is.

    Raises:
        InvalidInputError: If there are no labelled examples, or nobody to compare.
        UnlearnRefusedError: If the ledger does not hold enough to leave a client out.
    """
    require_number("--shapley", shapley, least=0, whole=True)
    place = path_of(path)
    with LedgerReader(place) as ledger:
        if data is not None:
            given = given_in_file(path_of(data), ledger, place)
        else:
            known = known_test(ledger, place)
            if known is None:
                raise InvalidInputError(
                    f"the data of {place} are not here; give clean images with labels "
                    "as --data FILE.npz"
                )
            given = known
        return contributions_to(ledger, given, shapley=shapley, say=say)


def contributions_to(
    ledger: Ledger,
    given: Given,
    *,
    shapley: int = 0,
    say: Tell = lambda what, done, total: None,
) -> Contribution:
    """Return what every client is worth to the answers to given examples.

    Args:
        ledger: The ledger.
        given: Clean examples with labels.
        shapley: Number of permutations of the Shapley values; 0 for none.
        say: Told how far it is.
    """
    if given.labels is None:
        raise InvalidInputError(
            f"{given.source} has no labels; a contribution needs the true classes"
        )
    leave = LeaveOut.of(HeldLedger(ledger))
    test = _Test(
        to_model_input(given.examples), given.labels, given.trainer.predict, {}
    )
    with leave.calmly():
        found = _contributions(leave, test, given.source, shapley, say)
    leave.require_unchanged()
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Test:
    """Clean examples, and the accuracy of coalitions that were measured."""

    inputs: Inputs
    labels: Labels
    predict: Predict
    measured: dict[frozenset[ClientId], float]

    def answers(self, model: Model) -> tuple[Floats, Floats]:
        """Return for each example whether a model is right, and its loss."""
        logits = self.predict(model, self.inputs)
        right = predicted_classes(checked_logits(logits)) == self.labels
        loss = per_example_loss(logits, self.labels)
        return right.astype(np.float64), np.minimum(loss, _WORST_LOSS)


def _contributions(
    leave: LeaveOut, test: _Test, source: str, permutations: int, say: Tell
) -> Contribution:
    right, loss = test.answers(leave.ledger.final)
    kept = leave.coverages()
    notes = _notes(leave, kept)
    values: dict[ClientId, float] = {}
    intervals: dict[ClientId, Interval | None] = {}
    if permutations:
        values, intervals = _shapley(leave, test, permutations, say)
    found = []
    for name in leave.clients:
        own_right, own_loss = test.answers(leave.exact([name]))
        lost = int((right > own_right).sum())
        gained = int((own_right > right).sum())
        more = own_loss - loss
        mean = float(more.mean())
        reach = NORMAL_QUANTILE * float(more.std()) / np.sqrt(len(more))
        found.append(
            Worth(
                name,
                (lost - gained) / len(right),
                paired_interval(lost, gained, len(right)),
                mean,
                (mean - reach, mean + reach),
                values.get(name),
                intervals.get(name),
                kept[name],
            )
        )
        say("leaving clients out", len(found), len(leave.clients))
    return Contribution(
        tuple(sorted(found, key=lambda own: (-own.loss, own.client))),
        Proportion(int(right.sum()), len(right)),
        float(loss.mean()),
        len(right),
        permutations,
        len(test.measured),
        source,
        notes,
    )


def _shapley(
    leave: LeaveOut, test: _Test, permutations: int, say: Tell
) -> tuple[dict[ClientId, float], dict[ClientId, Interval | None]]:
    """Return the Shapley values in accuracy, and their intervals.

    A permutation lets clients join one after the other. A client's value is the mean
    accuracy that it adds. Beyond a coalition nearly as good as everybody, clients add
    nothing.
    """
    everybody = _accuracy(leave, test, leave.clients)
    nobody = _accuracy(leave, test, ())
    rng = stream(int.from_bytes(leave.ledger.chain), "shapley values")
    gains: dict[ClientId, list[float]] = {name: [] for name in leave.clients}
    for turn in range(permutations):
        order = rng.permutation(len(leave.clients)).tolist()
        before, coalition = nobody, []
        for number in order:
            name = leave.clients[number]
            coalition.append(name)
            now = before
            if abs(everybody - before) > CUT_OFF:
                now = _accuracy(leave, test, coalition)
            gains[name].append(now - before)
            before = now
        say("Shapley values", turn + 1, permutations)
    means = {name: mean_interval(own) for name, own in gains.items()}
    return (
        {name: mean.value for name, mean in means.items()},
        {name: mean.interval for name, mean in means.items()},
    )


def _accuracy(leave: LeaveOut, test: _Test, coalition: Sequence[ClientId]) -> float:
    """Return the accuracy of the model of a coalition: everybody else is forgotten."""
    members = frozenset(coalition)
    if members not in test.measured:
        others = [name for name in leave.clients if name not in members]
        right, _ = test.answers(leave.exact(others))
        test.measured[members] = float(right.mean())
    return test.measured[members]


def _notes(leave: LeaveOut, kept: dict[ClientId, float]) -> tuple[str, ...]:
    unsure = sum(part < LITTLE_KEPT for part in kept.values())
    if not unsure:
        return ()
    return (
        f"the ledger kept less than {LITTLE_KEPT:.0%} of what {unsure} of "
        f"{len(leave.clients)} clients put into the model; their worth is unsure",
    )
