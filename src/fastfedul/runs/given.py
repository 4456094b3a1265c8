"""Examples given to a ledger's model, and the trainer that answers them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastfedul.data import sources
from fastfedul.data.dataset import Dataset, Images, Labels, to_model_input
from fastfedul.data.npz import MOST_CLASSES, VALIDATION, read_own_images
from fastfedul.errors import FastFedULError, InvalidInputError
from fastfedul.federation.local import USERS_OWN, one_line
from fastfedul.federation.own_functions import import_function, is_own_function
from fastfedul.federation.trainer import LocalTraining, Trainer
from fastfedul.ledger.protocol import Ledger
from fastfedul.ledger.store.folder import find_ledger
from fastfedul.params import Array, Layout
from fastfedul.records import Model
from fastfedul.runs.evaluation_source import (
    EvaluationSource,
    federation_file,
    run_at,
    source_of,
)
from fastfedul.runs.plugins import find_trainer
from fastfedul.runs.preparation import Prepared, prepare
from fastfedul.runs.training import load_config

_TORCH = "torch"
_OTHER_SCALE = 4
"""Factor between the brightest pixels of two files from which one is off the scale."""


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """Examples as they were given, with the trainer that answers them.

    Attributes:
        examples: Images, uint8 of (number, height, width, channels); or rows; or
            inputs as the model takes them.
        labels: Their true classes, or the unwanted answers to inputs that somebody
            traces; None if nobody knows.
        trainer: Gives the logits of a model.
        source: Where they come from, in words.
        notes: Limits of these examples, in words.
    """

    examples: Images
    labels: Labels | None
    trainer: Trainer
    source: str
    notes: tuple[str, ...] = ()


def tested_by(prepared: Prepared) -> Given:
    """Return the run's own test examples."""
    data = prepared.dataset
    return Given(
        data.test_images, data.test_labels, prepared.trainer, "the run's test examples"
    )


def labelled_test(ledger: Ledger, path: Path) -> Given:
    """Return the labelled test examples of a run or of a ledger.

    Args:
        ledger: The ledger whose model is asked.
        path: The run, or a ledger.

    Raises:
        InvalidInputError: If nobody said what they are, or they do not fit the model.
    """
    run = run_at(path)
    if run is not None:
        return tested_by(prepare(load_config(run)))
    source = source_of(path)
    examples, labels = _test_examples(source)
    shape = _shape_of(examples)
    least = int(labels.max()) + 1
    trainer, failure = _first_fitting(
        _likely_classes(ledger.settings.layout, least),
        shape,
        source,
        ledger.settings.layout,
    )
    if trainer is None:
        raise failure or InvalidInputError(
            f"{source.model} makes another network than the ledger's model has, for "
            f"examples of shape {shape}; name the right one in "
            f"{_named_in(path)}"
        )
    first = to_model_input(examples[:1])
    classes = _num_outputs(source.test, trainer, ledger.final, first, shape, path)
    if classes < least:
        raise InvalidInputError(
            f"{source.test} has labels up to {least - 1}, but the model has {classes} "
            "classes; number them as in training, from 0"
        )
    return Given(examples, labels, trainer, "the federation's test examples")


def known_test(ledger: Ledger, path: Path) -> Given | None:
    """Return the test examples of a run or a ledger; None if they are not here."""
    if run_at(path) is None:
        return labelled_test(ledger, path) if has_source(path) else None
    try:
        return labelled_test(ledger, path)
    except FastFedULError:
        return None


def has_source(path: Path) -> bool:
    """Return whether a ledger outside a run has a file that says how to evaluate it."""
    return federation_file(find_ledger(path).absolute()).is_file()


def given_in_file(
    file: Path,
    ledger: Ledger,
    path: Path,
    layouts: tuple[tuple[str, str], ...] = VALIDATION,
) -> Given:
    """Return the images of a file, and the network of a ledger's model.

    Args:
        file: An `.npz` file with images and, if known, their labels.
        ledger: The ledger whose model is asked.
        path: The run, or a ledger.
        layouts: Keys of images and labels: `VALIDATION` or `UNWANTED`.

    Raises:
        InvalidInputError: If the images do not fit the network, have labels that it
            does not know, or have pixels on another scale.
    """
    source = _network_of(path)
    images, labels = read_own_images(file, layouts)
    shape = images.shape[1:]
    trainer = _trainer_for(file, shape, source, ledger, path)
    first = to_model_input(images[:1])
    num_classes = _num_outputs(str(file), trainer, ledger.final, first, shape, path)
    if labels is not None and labels.max() >= num_classes:
        raise InvalidInputError(
            f"{file} has labels {labels.min()} to {labels.max()}, but the model has "
            f"{num_classes} classes; number them as in training, from 0 to "
            f"{num_classes - 1}"
        )
    _check_scale(file, images, _data_of(path))
    return Given(images, labels, trainer, file.name)


def _test_examples(source: EvaluationSource) -> tuple[Array, Labels]:
    """Return the examples and labels that a source names.

    Raises:
        InvalidInputError: If they cannot be had.
    """
    if not is_own_function(source.test):
        images, labels = read_own_images(Path(source.test))
        if labels is None:
            raise InvalidInputError(
                f"{source.test} has no labels; test examples need the true classes"
            )
        return images, labels
    function = import_function(source.test, "test data")
    try:
        found, told = function()
        examples, labels = np.asarray(found), np.asarray(told)
    except USERS_OWN as error:
        raise InvalidInputError(
            f"{source.test} failed: {one_line(error)}; it is called without arguments "
            "and returns examples and labels"
        ) from error
    if examples.dtype.kind == "f":
        examples = examples.astype(np.float32)
    fits = labels.ndim == 1 and labels.dtype.kind in "iu" and len(labels) > 0
    if not fits or len(examples) != len(labels) or labels.min() < 0:
        raise InvalidInputError(
            f"{source.test} returned examples of shape {examples.shape} and labels "
            f"{labels.dtype} of shape {labels.shape}; each example needs one whole "
            "number from 0"
        )
    return examples, labels.astype(np.int64)


def _shape_of(examples: Array) -> tuple[int, ...]:
    """Return the shape of one example, as trainers take it: channels last."""
    shape = examples.shape[1:]
    if len(shape) == 3 and examples.dtype == np.float32:
        channels, height, width = shape
        return height, width, channels
    return shape


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


def _network_of(path: Path) -> EvaluationSource:
    """Return the network of a run or a ledger, without test examples for a run.

    Raises:
        InvalidInputError: If its model has a trainer of its own, and only that trainer
            can build it.
    """
    run = run_at(path)
    if run is None:
        source = source_of(path)
    else:
        config = load_config(run)
        source = EvaluationSource(model=config.model, trainer=config.trainer, test="")
    if source.trainer != _TORCH:
        raise InvalidInputError(
            f"{path} was trained by {source.trainer}, and images of a file need the "
            f"trainer {_TORCH}; leave the file out"
        )
    return source


def _trainer_for(
    file: Path,
    shape: tuple[int, ...],
    source: EvaluationSource,
    ledger: Ledger,
    path: Path,
) -> Trainer:
    """Return the network of the ledger's model, for images of this shape."""
    layout = ledger.settings.layout
    trainer, failure = _first_fitting(_likely_classes(layout), shape, source, layout)
    if trainer is None:
        data = _data_of(path)
        if data is not None and data.shape == shape:
            trainer, _ = _first_fitting([data.num_classes], shape, source, layout)
        elif data is not None or failure is None:
            raise _misfit(str(file), shape, data, path)
    if trainer is None:
        raise failure or InvalidInputError(
            f"{source.model} makes another network than the ledger's model has; name "
            f"the one it was trained with in {_named_in(path)}"
        )
    return trainer


def _likely_classes(layout: Layout, least: int = 1) -> dict[int, None]:
    """Return the numbers of classes that a model may have, the likeliest first.

    The ledger does not say how many classes there are, and the run's data may be on
    another machine. But the number is nearly always a side of some array, and with a
    wrong one the arrays come out with other shapes than the ledger's.
    """
    sides = [side for slot in reversed(layout.slots) for side in slot.shape]
    return dict.fromkeys(s for s in (*sides, least) if least <= s <= MOST_CLASSES)


def _first_fitting(
    counts: Iterable[int],
    shape: tuple[int, ...],
    source: EvaluationSource,
    layout: Layout,
) -> tuple[Trainer | None, InvalidInputError | None]:
    """Return the network with the first number of classes that gives this layout.

    If there is none and nothing could be built at all, return why.
    """
    make: Callable[..., Trainer] = find_trainer(source.trainer)
    failures = []
    num_built = 0
    for count in counts:
        try:
            trainer = make(
                shape=shape,
                num_classes=count,
                model=source.model,
                local=LocalTraining(),
            )
            found = _layout_of(trainer)
        except InvalidInputError as error:
            failures.append(error)
            continue
        if found == layout:
            return trainer, None
        num_built += 1
    return None, None if num_built else failures[0]


def _layout_of(trainer: Trainer) -> Layout:
    """Return names and shapes of a trainer's parameters.

    Raises:
        InvalidInputError: If a user's own trainer fails.
    """
    known = getattr(trainer, "layout", None)
    if isinstance(known, Layout):
        return known
    try:
        return trainer.initial(0).params.layout
    except FastFedULError:
        raise
    except USERS_OWN as error:
        raise InvalidInputError(f"the trainer failed: {one_line(error)}") from error


def _num_outputs(
    name: str,
    trainer: Trainer,
    model: Model,
    inputs: Array,
    shape: tuple[int, ...],
    path: Path,
) -> int:
    """Return how many classes a model tells apart, from its answer to an example."""
    try:
        _, num_outputs = trainer.predict(model, inputs).shape
        return int(num_outputs)
    except FastFedULError:
        raise
    except USERS_OWN as error:
        data = _data_of(path)
        raise _misfit(name, shape, data, path, one_line(error)) from error


def _data_of(path: Path) -> Dataset | None:
    """Return the data of a run, if there is one and they are on this machine."""
    run = run_at(path)
    if run is None:
        return None
    try:
        return sources.load(load_config(run).data.source)
    except FastFedULError:
        return None


def _misfit(
    name: str,
    shape: tuple[int, ...],
    data: Dataset | None,
    path: Path,
    reason: str = "",
) -> InvalidInputError:
    said = f"{name} has images of shape {shape}"
    if data is not None and data.shape != shape:
        return InvalidInputError(
            f"{said}, but the network was trained on images of shape "
            f"{data.shape}; make them that shape"
        )
    return InvalidInputError(
        f"{said}, which do not fit the network{': ' if reason else ''}{reason}; give "
        f"images as in training, or name the right network in {_named_in(path)}"
    )


def _named_in(path: Path) -> str:
    """Return the name of the file that names the network."""
    run = run_at(path)
    return "config.toml" if run else federation_file(find_ledger(path).absolute()).name
