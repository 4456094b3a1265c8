"""The worker process: waits for tasks and works on shared arrays."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle
from typing import Any

import numpy as np

from fastfedul.data.dataset import ClientData
from fastfedul.errors import FastFedULError, InvalidInputError
from fastfedul.federation.local import (
    USERS_OWN,
    one_line,
    predict_part,
    train_client,
)
from fastfedul.federation.trainer import LocalTraining, Trainer
from fastfedul.federation.workers.shared_arrays import ArrayShape, arrays_in
from fastfedul.params import Array, Layout, Params
from fastfedul.records import ClientId, Model


@dataclass(frozen=True, slots=True)
class Assignment:
    """The first message to a worker.

    Attributes:
        trainer: Trains and applies the model.
        seed: Seed of the run.
        names: Owners of the examples: clients first, then sets for `predict`.
        lengths: Number of examples of each owner.
        shapes: Shapes of the array of all images and of the array of all labels.
    """

    trainer: Trainer
    seed: int
    names: tuple[ClientId, ...]
    lengths: tuple[int, ...]
    shapes: tuple[ArrayShape, ArrayShape]


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """Places of models in shared memory: the global model, then a model per worker.

    Attributes:
        layout: Layout of the parameters.
        buffers: Names and shapes of the buffers.
        num_workers: Number of workers.
    """

    layout: Layout
    buffers: tuple[tuple[str, ArrayShape], ...]
    num_workers: int

    @property
    def shapes(self) -> list[ArrayShape]:
        """Shapes of all arrays, model after model."""
        flat = ArrayShape((self.layout.size,), np.dtype(np.float32).str)
        one = [flat, *(shape for _, shape in self.buffers)]
        return one * (1 + self.num_workers)


@dataclass(frozen=True, slots=True)
class TrainTask:
    """Train a client from the global model; the answer is in shared memory."""

    owner: int
    index: int
    local: LocalTraining | None = None


@dataclass(frozen=True, slots=True)
class PredictTask:
    """Apply the global model to some images; the answer is the logits."""

    owner: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class InitialTask:
    """Make the initial model."""

    seed: int


@dataclass(frozen=True, slots=True)
class Failure:
    """The answer to a task that failed.

    Attributes:
        reason: Why, in one line.
        of_input: Whether the user's input cannot be used, such as a model of his own.
    """

    reason: str
    of_input: bool = False


class ModelArrays:
    """The shared global model and the workers' answers, as arrays."""

    def __init__(self, descriptor: int, place: ModelPlace) -> None:
        self.place = place
        found = arrays_in(descriptor, place.shapes)
        width = 1 + len(place.buffers)
        self._rows = [found[i : i + width] for i in range(0, len(found), width)]

    def write(self, row: int, model: Model) -> None:
        """Write a model to a row; row 0 is the global model."""
        flat, *buffers = self._rows[row]
        flat[...] = model.params.flat
        for (name, _), buffer in zip(self.place.buffers, buffers, strict=True):
            buffer[...] = model.buffers[name]

    def read(self, row: int) -> Model:
        """Return the model of a row as a view, which changes with the row."""
        flat, *buffers = self._rows[row]
        names = (name for name, _ in self.place.buffers)
        return Model(
            Params(self.place.layout, flat), dict(zip(names, buffers, strict=True))
        )


def serve(connection: Connection, assignment: Assignment, number: int) -> None:
    """Work on tasks as the worker of a number, until the connection closes."""
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    keep_freed_memory()
    data = read_data(recv_handle(connection), assignment)
    with contextlib.suppress(*USERS_OWN):
        # All workers load the framework at the same time. The first task repeats a
        # failure and reports it.
        assignment.trainer.initial(assignment.seed)
    models: ModelArrays | None = None
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            task = connection.recv()
            if isinstance(task, ModelPlace):
                descriptor = recv_handle(connection)
                models = ModelArrays(descriptor, task)
                os.close(descriptor)
                continue
            answer: Model | Array | Failure | None
            try:
                answer = _work(task, assignment, data, models, number)
            except FastFedULError as error:
                answer = Failure(str(error), isinstance(error, InvalidInputError))
            except USERS_OWN as error:
                answer = Failure(one_line(error))
            connection.send(answer)
    # Nothing is left to save, and closing a framework would only take time.
    os._exit(0)


def read_data(descriptor: int, assignment: Assignment) -> Sequence[ClientData]:
    """Return the examples of all owners as views of shared memory."""
    images, labels = arrays_in(descriptor, assignment.shapes)
    os.close(descriptor)
    ends = np.cumsum(assignment.lengths).tolist()
    return [
        ClientData(name, images[end - length : end], labels[end - length : end])
        for name, length, end in zip(
            assignment.names, assignment.lengths, ends, strict=True
        )
    ]


def _work(
    task: Any,
    assignment: Assignment,
    data: Sequence[ClientData],
    models: ModelArrays | None,
    number: int,
) -> Model | Array | None:
    trainer = assignment.trainer
    if isinstance(task, InitialTask):
        return trainer.initial(task.seed)
    assert models is not None
    model = models.read(0)
    if isinstance(task, PredictTask):
        return predict_part(trainer, model, data[task.owner], task.begin, task.end)
    own = data[task.owner]
    result = train_client(trainer, model, own, task.index, assignment.seed, task.local)
    models.write(1 + number, Model(result.delta, result.buffers))
    return None


def _leave_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next batch.

    By default glibc returns large blocks to the system, which must clear them for the
    next use. This takes up to a seventh of a training step.
    """
    trim, mmap_threshold, top_pad = -1, -3, -2
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 1 << 25)
        libc.mallopt(trim, (1 << 31) - 1)
        libc.mallopt(top_pad, 1 << 24)
