"""The worker process: waits for tasks, works on shared arrays, answers briefly."""

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
from fastfedul.errors import FastFedULError
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
        trainer: Does the work.
        seed: Seed of the run.
        names: Owners of the examples: clients first, then sets to score on.
        lengths: How many examples each has.
        shapes: Of all images, and of all labels, one owner's after the other's.
    """

    trainer: Trainer
    seed: int
    names: tuple[ClientId, ...]
    lengths: tuple[int, ...]
    shapes: tuple[ArrayShape, ArrayShape]


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """Where models lie: the global one first, then one for each worker's answer.

    Attributes:
        layout: Layout of the parameters.
        buffers: Names and shapes of the buffers.
        num_workers: How many there are.
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
    """The answer to a task that failed: why, in one line."""

    reason: str


class ModelArrays:
    """The shared global model and the workers' answers, as arrays."""

    def __init__(self, descriptor: int, place: ModelPlace) -> None:
        self.place = place
        found = arrays_in(descriptor, place.shapes)
        width = 1 + len(place.buffers)
        self._rows = [found[i : i + width] for i in range(0, len(found), width)]

    def write(self, row: int, model: Model) -> None:
        """Put a model into a row; row 0 is the global model."""
        flat, *buffers = self._rows[row]
        flat[...] = model.params.flat
        for (name, _), buffer in zip(self.place.buffers, buffers, strict=True):
            buffer[...] = model.buffers[name]

    def read(self, row: int) -> Model:
        """Return the model of a row as it is now; it changes with the row."""
        flat, *buffers = self._rows[row]
        names = (name for name, _ in self.place.buffers)
        return Model(
            Params(self.place.layout, flat), dict(zip(names, buffers, strict=True))
        )


def serve(connection: Connection, assignment: Assignment, number: int) -> None:
    """Do tasks as the worker of a number, until the connection is closed."""
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    keep_freed_memory()
    data = read_data(recv_handle(connection), assignment)
    with contextlib.suppress(*USERS_OWN):
        # Loads the framework now, in all workers at once; a failure comes up again
        # with the first task.
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
                answer = Failure(str(error))
            except USERS_OWN as error:
                answer = Failure(one_line(error))
            connection.send(answer)
    # Nothing is left to save; tearing down a framework would only take time.
    os._exit(0)


def read_data(descriptor: int, assignment: Assignment) -> Sequence[ClientData]:
    """Return everybody's examples as views of shared memory."""
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

    By default glibc hands large blocks back to the system, which then has to clear
    them again: up to a seventh of the time of a training step.
    """
    trim, mmap_threshold, top_pad = -1, -3, -2
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 1 << 25)
        libc.mallopt(trim, (1 << 31) - 1)
        libc.mallopt(top_pad, 1 << 24)
