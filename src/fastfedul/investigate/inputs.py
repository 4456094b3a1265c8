"""Inputs of an investigation: from a file, or from the run's own data."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fastfedul.data.dataset import to_model_input
from fastfedul.errors import InvalidInputError
from fastfedul.investigate.odds import Evidence
from fastfedul.ledger.protocol import Ledger
from fastfedul.limits import require_number
from fastfedul.rng import stream
from fastfedul.runs.evaluation_source import run_at
from fastfedul.runs.given import Given
from fastfedul.runs.preparation import prepare
from fastfedul.runs.training import load_config

MOST_CLEAN = 100
"""Clean inputs of one answer that the unwanted answers are compared with."""

MOST_BAD = 1_000
"""Unwanted answers that are looked at; of more, a random choice."""


def backdoor_of(path: Path, ledger: Ledger, count: int) -> Given:
    """Return some of the run's own backdoor images, of those that still work.

    Raises:
        InvalidInputError: If the run has no attack, or the attack works on none.
    """
    require_number("--backdoor", count, least=1, whole=True)
    prepared = prepare(load_config(run_at(path) or path))
    images, labels = prepared.backdoor.images, prepared.backdoor.labels
    if not len(labels):
        raise InvalidInputError(
            "nobody attacks in this run, so it has no backdoor images; give the bad "
            "inputs as --inputs FILE.npz"
        )
    answers = prepared.trainer.predict(ledger.final, to_model_input(images))
    works = np.flatnonzero(answers.argmax(axis=1) == labels)
    if not len(works):
        raise InvalidInputError(
            f"the attack works on none of the run's {len(labels)} backdoor images, so "
            "there is nothing to trace"
        )
    rng = stream(prepared.config.seed, "backdoor inputs to trace")
    chosen = np.sort(rng.permutation(works)[:count])
    few = (
        f"the attack works on {len(works):,} of the run's {len(labels):,} backdoor "
        f"images, so the command traces {len(chosen):,} and not {count:,}",
    )
    return Given(
        images[chosen],
        labels[chosen],
        prepared.trainer,
        "the run's backdoor images",
        few if len(chosen) < count else (),
    )


def evidence_of(
    ledger: Ledger, bad: Given, clean: Given | None
) -> tuple[Evidence, Given]:
    """Return the evidence, and the bad examples that it uses.

    The unwanted answer of an input is its label; without labels, the answer that the
    model gives now. Clean inputs count if the model gives them their label, and the
    label is one of the unwanted answers.

    Args:
        ledger: The ledger whose model answers.
        bad: Inputs with unwanted answers.
        clean: Clean inputs; None if there are none.

    Raises:
        InvalidInputError: If the model gives none of the inputs its label.
    """
    rng = stream(0, "inputs to trace")
    if len(bad.examples) > MOST_BAD:
        some = np.sort(rng.permutation(len(bad.examples))[:MOST_BAD])
        labels = None if bad.labels is None else bad.labels[some]
        bad = Given(bad.examples[some], labels, bad.trainer, bad.source)
    predict = bad.trainer.predict
    inputs = to_model_input(bad.examples)
    says = predict(ledger.final, inputs).argmax(axis=1)
    answers = says if bad.labels is None else bad.labels
    if not (says == answers).any():
        raise InvalidInputError(
            f"the model gives none of the {len(answers)} inputs of {bad.source} its "
            "unwanted answer; leave the array `unwanted` out to trace the answers that "
            "the model gives"
        )
    chosen = np.zeros(0, np.int64)
    clean_inputs, clean_labels = inputs[:0], answers[:0]
    if clean is not None:
        every = to_model_input(clean.examples)
        found = predict(ledger.final, every).argmax(axis=1)
        right = np.ones(len(found), bool)
        if clean.labels is not None:
            right = found == clean.labels
        parts = [
            rng.permutation(np.flatnonzero(right & (found == answer)))[:MOST_CLEAN]
            for answer in np.unique(answers)
        ]
        chosen = np.sort(np.concatenate(parts))
        clean_inputs, clean_labels = every[chosen], found[chosen]
    evidence = Evidence(
        inputs,
        answers.astype(np.int64),
        clean_inputs,
        clean_labels.astype(np.int64),
        predict,
    )
    return evidence, bad
