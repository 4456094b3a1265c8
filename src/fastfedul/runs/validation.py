"""Judges a cleaned model by clean images that the server has of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from fastfedul.data import sources
from fastfedul.data.dataset import Dataset, Images, to_model_input
from fastfedul.data.npz import MOST_CLASSES, read_validation_images
from fastfedul.errors import FastFedULError, InvalidInputError
from fastfedul.evaluate.intervals import Proportion, paired_interval
from fastfedul.federation.local import USERS_OWN, one_line
from fastfedul.federation.trainer import AUTO, ImageTrainer, Inputs, Labels, Logits
from fastfedul.ledger.protocol import Ledger
from fastfedul.params import Layout
from fastfedul.records import Model
from fastfedul.runs.config import CONFIG
from fastfedul.runs.plugins import find_trainer
from fastfedul.runs.training import load_config

ImageShape = tuple[int, int, int]
_TORCH = "torch"
_OTHER_SCALE = 4
"""Factor between the brightest pixels of two files from which one is off the scale."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """How a cleaned model does on clean images, beside the model before.

    Attributes:
        total: Number of images.
        right_before: Right answers of the model before; None without labels.
        right_after: Right answers of the cleaned model; None without labels.
        changed: Images that the two models put into different classes.
        drop: Share of the images lost: right answers, or without labels images that
            change class.
        interval: 95 % interval of the drop.
    """

    total: int
    right_before: int | None
    right_after: int | None
    changed: int
    drop: float
    interval: tuple[float, float]


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

    def judge(self, before: Model, after: Model) -> Judgement:
        """Return how a cleaned model does beside the model before."""
        first, second = self.answers(before), self.answers(after)
        total, changed = len(first), int((first != second).sum())
        if self.labels is None:
            found = Proportion(changed, total)
            assert found.interval is not None
            return Judgement(
                total, None, None, changed, changed / total, found.interval
            )
        right_before, right_after = first == self.labels, second == self.labels
        lost = int((right_before & ~right_after).sum())
        gained = int((right_after & ~right_before).sum())
        return Judgement(
            total,
            int(right_before.sum()),
            int(right_after.sum()),
            changed,
            (lost - gained) / total,
            paired_interval(lost, gained, total),
        )


@dataclass(frozen=True, slots=True, eq=False)
class OwnImages:
    """Images of a file, and the network of a run that answers them.

    Attributes:
        images: The images, uint8 of (number, height, width, channels).
        labels: Labels of the file; None if it has none.
        trainer: Gives the logits of a model.
        num_classes: Number of classes that the model tells apart.
    """

    images: Images
    labels: Labels | None
    trainer: ImageTrainer
    num_classes: int


def open_validation(
    file: Path, ledger: Ledger, path: Path, model: str | None
) -> Validation:
    """Return the images of a file, and how to ask the network of a run about them.

    Args and errors are as of `open_images`.
    """
    found = open_images(file, ledger, path, model)
    inputs = to_model_input(found.images)
    return Validation(inputs, found.labels, found.trainer.predict)


def open_images(file: Path, ledger: Ledger, path: Path, model: str | None) -> OwnImages:
    """Return the images of a file, and the network of a run that answers them.

    Args:
        file: An `.npz` file with `images` and, if known, `labels`.
        ledger: The ledger whose model is asked.
        path: The run, or a ledger.
        model: The network, as `train --model` takes it; None for the run's network.

    Raises:
        InvalidInputError: If the images do not fit the network, have labels that it
            does not know, or have pixels on another scale.
    """
    if model is None and not (path / CONFIG).is_file():
        raise InvalidInputError(
            f"{path} is a ledger without a run, so its network is not known; add "
            "--model package.module:function"
        )
    network = _network_of(path) if model is None else model or AUTO
    images, labels = read_validation_images(file)
    height, width, channels = images.shape[1:]
    trainer = _trainer_for(file, (height, width, channels), network, ledger, path)
    first = to_model_input(images[:1])
    num_classes = _num_outputs(file, trainer, ledger.final, first, path)
    if labels is not None and labels.max() >= num_classes:
        raise InvalidInputError(
            f"{file} has labels {labels.min()} to {labels.max()}, but the model has "
            f"{num_classes} classes; number them as in training, from 0 to "
            f"{num_classes - 1}"
        )
    _check_scale(file, images, _data_of(path))
    return OwnImages(images, labels, trainer, num_classes)


def _check_scale(file: Path, images: Images, data: Dataset | None) -> None:
    """Raise if the pixels are on another scale than the images of the training.

    Where the data of the run are not on this machine, pixels are taken to reach 255.
    """
    top = 255 if data is None else int(data.train_images.max())
    own = int(images.max())
    if own * _OTHER_SCALE < top or own > top * _OTHER_SCALE:
        raise InvalidInputError(
            f"{file} has pixels up to {own}, and the images of the training have "
            f"pixels up to {top}; give both one scale"
        )


def _network_of(path: Path) -> str:
    """Return the network of a run.

    Raises:
        InvalidInputError: If the run has a trainer of its own, whose model only that
            trainer can build.
    """
    config = load_config(path)
    if config.trainer != _TORCH:
        raise InvalidInputError(
            f"{path} was trained by {config.trainer}, and images of a file need the "
            f"trainer {_TORCH}; leave the file out"
        )
    return config.model


def _trainer_for(
    file: Path, shape: ImageShape, network: str, ledger: Ledger, path: Path
) -> ImageTrainer:
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
        if data is not None and data.shape == shape:
            trainer, _ = _first_fitting([data.num_classes], shape, network, layout)
        elif data is not None or failure is None:
            raise _misfit(file, shape, data)
    if trainer is None:
        raise failure or InvalidInputError(
            f"{network} makes another network than the ledger's model has; give "
            "the one it was trained with as --model"
        )
    return trainer


def _first_fitting(
    counts: Iterable[int], shape: ImageShape, network: str, layout: Layout
) -> tuple[ImageTrainer | None, InvalidInputError | None]:
    """Return the network with the first number of classes that gives this layout.

    If there is none and nothing could be built at all, return why.
    """
    make = cast("Callable[..., ImageTrainer]", find_trainer(_TORCH))
    failures = []
    num_built = 0
    for count in counts:
        try:
            trainer = make(shape=shape, num_classes=count, model=network)
            found = trainer.layout
        except InvalidInputError as error:
            failures.append(error)
            continue
        if found == layout:
            return trainer, None
        num_built += 1
    return None, None if num_built else failures[0]


def _num_outputs(
    file: Path, trainer: ImageTrainer, model: Model, inputs: Inputs, path: Path
) -> int:
    """Return how many classes a model tells apart, from its answer to an image."""
    try:
        _, num_outputs = trainer.predict(model, inputs).shape
        return int(num_outputs)
    except FastFedULError:
        raise
    except USERS_OWN as error:
        misfit = _misfit(file, trainer.shape, _data_of(path), one_line(error))
        raise misfit from error


def _data_of(path: Path) -> Dataset | None:
    """Return the data of a run, if there is one and they are on this machine."""
    try:
        return sources.load(load_config(path).data.source)
    except FastFedULError:
        return None


def _misfit(
    file: Path, shape: tuple[int, ...], data: Dataset | None, reason: str = ""
) -> InvalidInputError:
    said = f"{file} has images of shape {shape}"
    if data is not None and data.shape != shape:
        return InvalidInputError(
            f"{said}, but the network was trained on images of shape "
            f"{data.shape}; make them that shape"
        )
    return InvalidInputError(
        f"{said}, which do not fit the network{': ' if reason else ''}{reason}; give "
        "images as in training, or the right network as --model"
    )
