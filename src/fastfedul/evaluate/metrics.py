"""Answers of models: accuracy, and how far predictions moved.

Logits have one row per image and one column per class. A row predicts a class only if
its largest value is finite. A diverged model predicts no class and is never right.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fastfedul.errors import InvalidInputError
from fastfedul.evaluate.intervals import Proportion
from fastfedul.params import Array

Floats = npt.NDArray[np.float64]

NO_CLASS = -1

MOST_MARGIN = 50.0
"""Log odds beyond which a model is simply certain; they are cut off there."""


def accuracy(logits: Array, labels: Array) -> Proportion:
    """Return the share of images that get their label; the first equal logit wins.

    >>> accuracy(np.array([[2.0, 1.0], [0.0, 3.0]]), np.array([0, 0]))
    Proportion(successes=1, total=2)
    """
    scores = checked_logits(logits)
    right = predicted_classes(scores) == checked_labels(labels, scores)
    return Proportion(int(right.sum()), len(right))


def prediction_kl(reference_logits: Array, logits: Array) -> float | None:
    """Return the mean KL divergence, in nats, from the reference's predictions.

    This is the mean over images of sum p log(p / q), where p is the reference's softmax
    and q the other's. It is infinite if q rules out a class that p allows, and None
    without images or if a row predicts no class.
    """
    reference, other = _checked_pair(reference_logits, logits)
    if not _all_predict(reference, other):
        return None
    reference_log, other_log = log_softmax(reference), log_softmax(other)
    weight = np.exp(reference_log)
    terms = np.zeros_like(weight)
    used = weight > 0
    terms[used] = weight[used] * (reference_log[used] - other_log[used])
    # Rounding can bring the divergence of almost equal rows just below 0.
    return float(np.maximum(terms.sum(axis=1), 0.0).mean())


def prediction_change(before_logits: Array, after_logits: Array) -> float | None:
    """Return the mean Euclidean distance of the predictions for the same images.

    The distance of two probability vectors is 0 to the square root of 2. It is None
    without images or if a row predicts no class.
    """
    before, after = _checked_pair(before_logits, after_logits)
    if not _all_predict(before, after):
        return None
    moved = np.exp(log_softmax(after)) - np.exp(log_softmax(before))
    return float(np.sqrt(np.square(moved).sum(axis=1)).mean())


def margins(logits: Array, labels: Array) -> Floats:
    """Return the log odds of each image's label, log p / (1 - p), within +-50.

    A row that predicts no class is as far from its label as can be.

    >>> margins(np.array([[0.0, 0.0], [9.0, 2.0]]), np.array([0, 0]))
    array([0., 7.])
    """
    scores = checked_logits(logits)
    column = checked_labels(labels, scores)[:, None]
    known = predicts(scores)
    if scores.shape[1] < 2:
        return np.where(known, MOST_MARGIN, -MOST_MARGIN)
    others = scores.copy()
    np.put_along_axis(others, column, -np.inf, axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        top = others.max(axis=1, keepdims=True)
        rest = top + np.log(np.exp(others - top).sum(axis=1, keepdims=True))
        found: Floats = (np.take_along_axis(scores, column, axis=1) - rest)[:, 0]
    # Others that are all ruled out leave the label certain.
    found[np.isnan(found)] = MOST_MARGIN
    found[~known] = -MOST_MARGIN
    np.clip(found, -MOST_MARGIN, MOST_MARGIN, out=found)
    return found


def log_softmax(scores: Floats) -> Floats:
    """Return the logarithms of each row's softmax; NaN for a row without a prediction.

    The sum leaves the largest logit out, so a certain prediction keeps its tiny loss
    instead of a rounded 0.

    >>> bool(log_softmax(np.array([[100.0, 0.0]]))[0, 0] < 0)
    True
    """
    best = scores.argmax(axis=1)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        shifted = scores - np.take_along_axis(scores, best, axis=1)
        others = np.exp(shifted)
        np.put_along_axis(others, best, 0.0, axis=1)
        logs: Floats = shifted - np.log1p(others.sum(axis=1, keepdims=True))
    logs[~predicts(scores)] = np.nan
    return logs


def predicts(scores: Floats) -> npt.NDArray[np.bool_]:
    """Return for each row whether it predicts a class at all."""
    largest: Floats = scores.max(axis=1)
    return np.isfinite(largest)


def predicted_classes(scores: Floats) -> npt.NDArray[np.int64]:
    """Return the most likely class of each row, or `NO_CLASS`."""
    return np.where(predicts(scores), scores.argmax(axis=1), NO_CLASS)


def checked_logits(logits: Array) -> Floats:
    """Return the logits in float64; raise unless they are images by classes."""
    array = np.asarray(logits)
    if array.ndim != 2 or array.shape[1] == 0 or array.dtype.kind not in "fiu":
        raise InvalidInputError(
            "logits must be numbers, one row per image and one column per class, "
            f"not {array.dtype} of shape {array.shape}"
        )
    return array.astype(np.float64)


def checked_labels(labels: Array, scores: Floats) -> npt.NDArray[np.int64]:
    """Return the labels; raise unless there is one class number per row."""
    array = np.asarray(labels)
    rows, classes = scores.shape
    if array.shape != (rows,) or (rows and array.dtype.kind not in "iu"):
        raise InvalidInputError(
            f"labels must be {rows} whole numbers, not {array.dtype} of shape "
            f"{array.shape}"
        )
    if rows and not (array.min() >= 0 and array.max() < classes):
        raise InvalidInputError(
            f"labels run from {array.min()} to {array.max()}, but there are only the "
            f"classes 0 to {classes - 1}"
        )
    return array.astype(np.int64)


def _checked_pair(left: Array, right: Array) -> tuple[Floats, Floats]:
    one, other = checked_logits(left), checked_logits(right)
    if one.shape != other.shape:
        raise InvalidInputError(
            f"logits of the same images have shapes {one.shape} and {other.shape}"
        )
    return one, other


def _all_predict(one: Floats, other: Floats) -> bool:
    return len(one) > 0 and bool(predicts(one).all() and predicts(other).all())
