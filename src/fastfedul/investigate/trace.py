"""Traces unwanted answers of a model to the clients that taught them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastfedul.data.dataset import Images
from fastfedul.data.npz import UNWANTED
from fastfedul.errors import InvalidInputError
from fastfedul.federation.trainer import GradientTrainer, Labels
from fastfedul.investigate.culprits import (
    SIGNIFICANT,
    Search,
    Tell,
    look,
    ranked,
    search,
    wanted_scores,
)
from fastfedul.investigate.held_ledger import HeldLedger
from fastfedul.investigate.inputs import backdoor_of, evidence_of
from fastfedul.investigate.leave_one_out import LITTLE_KEPT, LeaveOut
from fastfedul.investigate.odds import Evidence, p_values
from fastfedul.investigate.trajectory import trajectory_scores
from fastfedul.ledger.protocol import Ledger
from fastfedul.ledger.reader import LedgerReader
from fastfedul.limits import Place, path_of
from fastfedul.notebook import rows_to_html
from fastfedul.records import ClientId
from fastfedul.rng import stream
from fastfedul.runs.given import Given, given_in_file, known_test

NOBODY = "nobody stands out"


def verdict_on(names: Sequence[str]) -> str:
    """Return the verdict on culprits in words.

    >>> verdict_on(["a"]), verdict_on(["a", "b"]), verdict_on([])
    ('a stands out', 'a, b stand out together', 'nobody stands out')
    """
    if not names:
        return NOBODY
    verb = "stands out" if len(names) == 1 else "stand out together"
    return f"{', '.join(names)} {verb}"


@dataclass(frozen=True, slots=True)
class Suspect:
    """A client and the blame for the unwanted answers.

    Attributes:
        client: Name of the client.
        score: How far the log odds of the unwanted answers fall without half of what
            the client added, in nats, mean over the inputs, beyond the fall of clean
            answers of the same class.
        p_value: Chance that clean inputs would accuse some client as much; None
            without clean inputs.
        gap: Score minus the score of the next client.
        trajectory: Trajectory score; None if it cannot be had.
        coverage: Kept part of the client's share in the model.
    """

    client: ClientId
    score: float
    p_value: float | None
    gap: float
    trajectory: float | None
    coverage: float


@dataclass(frozen=True, slots=True, eq=False)
class Answered:
    """The answers of one model to the bad inputs.

    Attributes:
        without: Clients that the model lacks.
        classes: Its answer to each input.
        unwanted: Its probability of the unwanted answer to each input.
    """

    without: tuple[ClientId, ...]
    classes: Labels
    unwanted: np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Trace:
    """Whom the unwanted answers come from.

    Attributes:
        clients: All clients, from the most to the least suspected.
        search: Suspects of the search, accused or not.
        examples: The bad inputs.
        answers: The unwanted answer of each.
        answered: Answers of the current model, then of models without the first
            suspects.
        num_clean: Clean inputs that the bad ones were compared with.
        notes: Limits of the answer, in words.
    """

    clients: tuple[Suspect, ...]
    search: Search
    examples: Images
    answers: Labels
    answered: tuple[Answered, ...]
    num_clean: int
    notes: tuple[str, ...]

    @property
    def culprits(self) -> tuple[ClientId, ...]:
        """Clients that stand out, in the order of the search; often nobody."""
        return self.search.culprits

    @property
    def verdict(self) -> str:
        """The answer in words: who stands out, or that nobody does."""
        return verdict_on(self.culprits)

    def _repr_html_(self) -> str:
        rows = [
            [
                one.client,
                f"{one.score:.2f}",
                f"{one.gap:.2f}",
                "-" if one.p_value is None else f"{one.p_value:.3f}",
                "-" if one.trajectory is None else f"{one.trajectory:.2f}",
            ]
            for one in self.clients
        ]
        title = f"Blame for {len(self.answers)} unwanted answers: {self.verdict}"
        columns = ("client", "score", "gap", "p-value", "trajectory")
        return rows_to_html(title, columns, rows, self.notes)

    def __repr__(self) -> str:
        lines = [f"Trace of {len(self.answers)} answers: {self.verdict}"]
        for one in self.clients:
            chance = "" if one.p_value is None else f", p {one.p_value:.3f}"
            lines.append(f"  {one.client!r:.80}: score {one.score:.2f}{chance}")
        return "\n".join([*lines, *self.notes])


def trace(
    path: Place,
    inputs: Place | None = None,
    *,
    reference: Place | None = None,
    backdoor: int | None = None,
    say: Tell = lambda what, done, total: None,
) -> Trace:
    """Return whom the unwanted answers of a model come from; nothing changes.

    Args:
        path: A run, also as `train` returned it, or a ledger.
        inputs: An `.npz` file with `images` that the model answers wrongly. An array
            `unwanted` may name the unwanted answer to each.
        reference: An `.npz` file with clean `images` and their true `labels`; None for
            the test examples of the run or ledger, if they are on this machine.
        backdoor: Number of the run's own backdoor images to trace instead of `inputs`.
        say: Told how far it is.

    Raises:
        InvalidInputError: If the inputs do not fit the model, or there is nobody to
            compare.
        UnlearnRefusedError: If the ledger does not hold enough to leave a client out.
    """
    if inputs is not None and backdoor is not None:
        raise InvalidInputError(
            "both --inputs and --backdoor are given; leave out one of them"
        )
    if inputs is None and backdoor is None:
        raise InvalidInputError(
            "give the bad inputs as --inputs FILE.npz, or --backdoor N to try it with "
            "the run's own backdoor images"
        )
    place = path_of(path)
    with LedgerReader(place) as ledger:
        if backdoor is not None:
            bad = backdoor_of(place, ledger, backdoor)
        else:
            assert inputs is not None
            bad = given_in_file(path_of(inputs), ledger, place, UNWANTED)
        clean = None
        if reference is not None:
            clean = given_in_file(path_of(reference), ledger, place)
        else:
            clean = known_test(ledger, place)
        return trace_answers(ledger, bad, clean, say=say)


def trace_answers(
    ledger: Ledger,
    bad: Given,
    clean: Given | None,
    *,
    say: Tell = lambda what, done, total: None,
) -> Trace:
    """Return whom the answers to given inputs come from.

    Args:
        ledger: The ledger.
        bad: Inputs with unwanted answers.
        clean: Clean inputs to compare with; None if there are none.
        say: Told how far it is.
    """
    leave = LeaveOut.of(HeldLedger(ledger))
    with leave.calmly():
        return trace_with(leave, bad, clean, say)


def trace_with(
    leave: LeaveOut,
    bad: Given,
    clean: Given | None,
    say: Tell = lambda what, done, total: None,
) -> Trace:
    """Return whom answers come from, given the models without clients."""
    held, num_given, notes = leave.ledger, len(bad.examples), bad.notes
    evidence, bad = evidence_of(held, bad, clean)
    drops = look(leave, evidence, (), say)
    rng = stream(int.from_bytes(held.chain), "permutations")
    chances = p_values(evidence, drops, rng)
    found = search(leave, evidence, drops, chances, rng, say)
    paths = _trajectories(held, bad, evidence)
    kept = leave.coverages()
    order = ranked(evidence, drops)
    gaps = [*(-np.diff([score for _, score in order])).tolist(), 0.0]
    suspects = tuple(
        Suspect(name, score, chances[name], gap, paths.get(name), kept[name])
        for (name, score), gap in zip(order, gaps, strict=True)
    )
    groups = [(), *((name,) for name, _ in order[:2])]
    group = found.culprits or tuple(step.client for step in found.steps)
    if group not in groups:
        groups.append(group)
    answered = tuple(_answered(leave, evidence, group) for group in groups)
    leave.require_unchanged()
    return Trace(
        suspects,
        found,
        bad.examples,
        evidence.answers,
        answered,
        len(evidence.clean_answers),
        (
            *notes,
            *_used(len(bad.examples), num_given),
            *_notes(evidence, suspects, held, found),
            *_without_paths(held, bad),
        ),
    )


def _trajectories(
    ledger: Ledger, bad: Given, evidence: Evidence
) -> dict[ClientId, float]:
    """Return the trajectory scores; none where rounds or gradients are missing."""
    if _without_paths(ledger, bad):
        return {}
    assert isinstance(bad.trainer, GradientTrainer)
    return trajectory_scores(ledger, bad.trainer, evidence.bad, evidence.answers)


def _answered(
    leave: LeaveOut, evidence: Evidence, without: Sequence[ClientId]
) -> Answered:
    model = leave.exact(without)
    logits = evidence.predict(model, evidence.bad)
    odds = evidence.odds(model).bad
    chance = 1 / (1 + np.exp(-odds))
    return Answered(tuple(without), logits.argmax(axis=1).astype(np.int64), chance)


def _used(num_used: int, num_given: int) -> tuple[str, ...]:
    if num_used == num_given:
        return ()
    return (f"{num_used:,} of the {num_given:,} inputs were drawn and used",)


def _notes(
    evidence: Evidence,
    suspects: Sequence[Suspect],
    ledger: Ledger,
    found: Search,
) -> tuple[str, ...]:
    notes = []
    if not evidence.compares:
        notes.append(
            "there is no clean input for every unwanted answer, so there is no p-value "
            "and no search for groups; give some as --reference FILE.npz"
        )
    if not found.culprits:
        notes.append(_why_nobody(evidence, suspects, found))
    unsure = [own.client for own in suspects if own.coverage < LITTLE_KEPT]
    if unsure:
        notes.append(
            f"the ledger kept less than {LITTLE_KEPT:.0%} of what {len(unsure)} of "
            f"{len(suspects)} clients put into the model; their scores are unsure"
        )
    return tuple(notes)


def _without_paths(ledger: Ledger, bad: Given) -> tuple[str, ...]:
    """Return why there is no trajectory score, if there is none."""
    if ledger.settings.history == "sums":
        return ("a ledger of sums has no rounds, so there is no trajectory score",)
    if not isinstance(bad.trainer, GradientTrainer):
        return ("the trainer gives no gradients, so there is no trajectory score",)
    return ()


def _why_nobody(evidence: Evidence, suspects: Sequence[Suspect], found: Search) -> str:
    if not found.steps:
        wanted, _ = wanted_scores(len(evidence.answers), len(suspects))
        return (
            f"a client stands out from a score of {wanted:.2f} nats on, with a p-value "
            f"of at most {SIGNIFICANT}, or if forgetting it alone takes "
            f"{found.wanted:.2f}; the first client has a score of "
            f"{suspects[0].score:.2f}"
        )
    if found.fall is None:
        return (
            f"{len(found.steps)} of {len(suspects)} clients are suspects; they are too "
            "many to tell culprits from others"
        )
    return (
        f"without the {len(found.steps)} suspects the odds of the unwanted answers "
        f"fall by {found.fall:.2f} nats more than right answers, and by less than "
        f"the {found.wanted:.2f} that accuse them"
    )
