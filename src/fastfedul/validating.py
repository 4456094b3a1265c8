"""Chooses how strongly to damp by clean images that the server has of its own.

The images are neither the leaver's nor the attack's nor those a result is scored on:
whoever calls this sees to that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fastfedul.data import sources
from fastfedul.data.dataset import Dataset, to_model_input
from fastfedul.data.npz import MOST_CLASSES, read_validation_images
from fastfedul.errors import FastFedULError, InvalidInputError, UnlearnRefusedError
from fastfedul.experiment import load_config
from fastfedul.federation.local import USERS_OWN, one_line
from fastfedul.federation.trainer import Inputs, Labels, Logits
from fastfedul.history.ledger import Ledger
from fastfedul.integrations.torch import AUTO, TorchTrainer
from fastfedul.params import Layout
from fastfedul.records import Model
from fastfedul.run_config import CONFIG
from fastfedul.unlearn.choosing import SPREADS
from fastfedul.unlearn.fast_fedul import FastFedUL
from fastfedul.unlearn.protocol import Needs, UnlearnRequest
from fastfedul.unlearn.removal import Choice, Removal

TRIED_SPREADS = (0.0, 0.05, 0.1, 0.2, *SPREADS)
TRIED_DAMPINGS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7)
TOLERANCE = 0.02
_LOST = "accuracy lost on the validation images, less a standard error"
_CHANGED = "validation images that changed class, less a standard error"
ImageShape = tuple[int, int, int]
_Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Validation:
    """Clean images of the server's own, and how to ask a model about them.

    Attributes:
        inputs: The images, as a model sees them.
        labels: Their classes; None if nobody knows.
        predict: Gives the logits of a model.
    """

    inputs: Inputs
    labels: Labels | None
    predict: Callable[[Model, Inputs], Logits]

    def answers(self, model: Model) -> Labels:
        """Return the class a model gives each image."""
        found: Labels = self.predict(model, self.inputs).argmax(axis=1)
        return found


def open_validation(
    file: Path, ledger: Ledger, path: Path, model: str | None
) -> Validation:
    """Return the images of a file, and the network of a run to ask about them.

    Args:
        file: An `.npz` file with `images` and, if known, `labels`.
        ledger: The ledger whose model is asked.
        path: The run, or a ledger.
        model: The network, as `train --model` takes it; None for that of the run.

    Raises:
        InvalidInputError: If the images do not fit the network, or have labels that it
            does not know.
    """
    if model is None and not (path / CONFIG).is_file():
        raise InvalidInputError(
            f"{path} is a ledger without a run, so its network is not known; add "
            "--model package.module:function"
        )
    network = load_config(path).model if model is None else model or AUTO
    images, labels = read_validation_images(file)
    height, width, channels = images.shape[1:]
    trainer = _trainer_for(file, (height, width, channels), network, ledger, path)
    inputs = to_model_input(images)
    num_classes = _num_outputs(file, trainer, ledger.final, inputs[:1], path)
    if labels is not None and labels.max() >= num_classes:
        raise InvalidInputError(
            f"{file} has labels {labels.min()} to {labels.max()}, but the model has "
            f"{num_classes} classes; number them as in training, from 0 to "
            f"{num_classes - 1}"
        )
    return Validation(inputs, labels, trainer.predict)


def _trainer_for(
    file: Path, shape: ImageShape, network: str, ledger: Ledger, path: Path
) -> TorchTrainer:
    """Return the network of the ledger's model, for images of this shape.

    The ledger does not say how many classes there are, and the run's data may be on
    another machine. But the number is nearly always a side of some array, and with a
    wrong one the arrays come out with other shapes than the ledger's.
    """
    layout = ledger.settings.layout
    sides = [side for slot in reversed(layout.slots) for side in slot.shape]
    likely = dict.fromkeys(side for side in (*sides, 1) if 1 <= side <= MOST_CLASSES)
    trainer, failure = _first_fitting(likely, shape, network, layout)
    if trainer is None:
        data = _data_of(path)
        if data is not None and data.image_shape == shape:
            trainer, _ = _first_fitting([data.num_classes], shape, network, layout)
        elif data is not None or failure is None:
            raise _misfit(file, shape, data)
    if trainer is None:
        raise failure or InvalidInputError(
            f"{network} makes another network than that of the ledger's model; give "
            "the one it was trained with as --model"
        )
    return trainer


def _first_fitting(
    counts: Iterable[int], shape: ImageShape, network: str, layout: Layout
) -> tuple[TorchTrainer | None, InvalidInputError | None]:
    """Return the network with the first number of classes that gives this layout.

    If there is none and nothing could be built at all, return why.
    """
    failures = []
    num_built = 0
    for count in counts:
        try:
            trainer = TorchTrainer(image_shape=shape, num_classes=count, model=network)
            found = trainer.network.layout
        except InvalidInputError as error:
            failures.append(error)
            continue
        if found == layout:
            return trainer, None
        num_built += 1
    return None, None if num_built else failures[0]


def _num_outputs(
    file: Path, trainer: TorchTrainer, model: Model, inputs: Inputs, path: Path
) -> int:
    """Return how many classes a model tells apart, from what it says of an image."""
    try:
        _, num_outputs = trainer.predict(model, inputs).shape
        return int(num_outputs)
    except FastFedULError:
        raise
    except USERS_OWN as error:
        misfit = _misfit(file, trainer.image_shape, _data_of(path), one_line(error))
        raise misfit from error


def _data_of(path: Path) -> Dataset | None:
    """Return the data of a run, if there is one and they are on this machine."""
    try:
        return sources.load(load_config(path).data)
    except FastFedULError:
        return None


def _misfit(
    file: Path, shape: ImageShape, data: Dataset | None, reason: str = ""
) -> InvalidInputError:
    said = f"{file} has images of shape {shape}"
    if data is not None and data.image_shape != shape:
        return InvalidInputError(
            f"{said}, but the network was trained on images of shape "
            f"{data.image_shape}; make them that shape"
        )
    return InvalidInputError(
        f"{said}, which do not fit the network{': ' if reason else ''}{reason}; give "
        "images as in training, or the right network as --model"
    )


@dataclass(frozen=True, slots=True)
class ByValidation:
    """Fast-FedUL with the least damping that keeps the accuracy of clean images.

    The history is read once for all that is tried. Without labels it is the share of
    images that are classified as before that must be kept.

    Attributes:
        method: What it leaves open is chosen.
        validation: The images.
        tolerance: Share of the images that may be lost beyond a standard error, 0 to 1.
        max_drop: Refuse a result that loses a larger share than this, chance or not.
    """

    method: FastFedUL
    validation: Validation
    tolerance: float = TOLERANCE
    max_drop: float | None = None

    def __post_init__(self) -> None:
        shares = (("tolerance", self.tolerance), ("max-drop", self.max_drop or 0.0))
        for name, share in shares:
            if not 0 <= share <= 1:
                raise InvalidInputError(f"--{name} is a share from 0 to 1, not {share}")

    @property
    def needs(self) -> Needs:
        """The history, and images at the server."""
        return Needs(history=True, server_data=True)

    def __call__(self, request: UnlearnRequest) -> Removal:
        """Return the result that was chosen.

        Raises:
            UnlearnRefusedError: If it loses more than `max_drop`.
        """
        started = time.perf_counter()
        final = request.ledger.final
        before = self.validation.answers(final)
        curve: list[tuple[float, float]] = []
        chosen: Removal | None = None
        lost, all_lost, within = 0.0, 0.0, True
        # From the strongest on: a weaker damping that keeps the accuracy by accident,
        # beyond one that does not, is not chosen.
        for value, result in _tried(self.method, request):
            after = self.validation.answers(result.model(final))
            changes = _changes(self.validation, before, after)
            drop = _surely(changes)
            curve.append((value, drop))
            within = within and drop <= self.tolerance
            if chosen is None or within:
                chosen, lost, all_lost = result, drop, float(changes.mean())
        assert chosen is not None
        if self.max_drop is not None and all_lost > self.max_drop:
            raise UnlearnRefusedError(
                f"the result loses {all_lost:.1%} on the validation images, more than "
                f"the {self.max_drop:.1%} of --max-drop; nothing was written"
            )
        scalar = max(chosen.damping, default=0.0)
        choice = Choice(
            setting="damping" if chosen.spread is None else "spread",
            value=scalar if chosen.spread is None else chosen.spread,
            source="validation",
            measure=_CHANGED if self.validation.labels is None else _LOST,
            limit=self.tolerance,
            curve=tuple(reversed(curve)),
            kept=lost <= self.tolerance,
        )
        seconds = time.perf_counter() - started
        return replace(chosen, choice=choice, seconds=seconds)


def _tried(
    method: FastFedUL, request: UnlearnRequest
) -> Iterator[tuple[float, Removal]]:
    """Return results by the setting that is tried, the strongest first."""
    skew = method.skew_on(request.ledger.settings.aggregation)
    if skew == "none" or method.damping is not None or method.spread is not None:
        raise InvalidInputError(
            "there is nothing to choose by the validation images; leave --damping at "
            "auto and --spread away"
        )
    if skew == "scalar":
        dampings = TRIED_DAMPINGS[::-1]
        return zip(dampings, method.sweep(request, dampings), strict=True)
    spreads = TRIED_SPREADS[::-1]
    return zip(spreads, method.sweep_spreads(request, spreads), strict=True)


def _changes(
    validation: Validation, before: Labels, after: Labels
) -> npt.NDArray[np.float64]:
    """Return 1 for each image that is lost, -1 for each that is gained, 0 for others.

    Without labels an image is lost that is classified differently.
    """
    if validation.labels is None:
        lost: _Flags = before != after
        return lost.astype(np.float64)
    right_before: _Flags = before == validation.labels
    right_after: _Flags = after == validation.labels
    return right_before.astype(np.float64) - right_after


def _surely(changes: npt.NDArray[np.float64]) -> float:
    """Return what is surely lost: the share of the images, less a standard error.

    A few images more or less right are chance, the more so the fewer there are; what
    counts is by how much the two models differ on the same images.
    """
    error = changes.std() / math.sqrt(len(changes))
    return float(changes.mean() - error)
