"""Workers that train clients, in this process or in others, with the same results."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Protocol, Self

import numpy as np

from fastfedul.data.dataset import ClientData, Images
from fastfedul.errors import InvalidInputError
from fastfedul.federation.local import LocalResult, predict_part, train_client
from fastfedul.federation.trainer import LocalTraining, Logits, Trainer
from fastfedul.federation.workers import shared_arrays
from fastfedul.federation.workers.processes import Processes
from fastfedul.federation.workers.shared_arrays import ArrayShape
from fastfedul.federation.workers.worker_process import (
    Assignment,
    InitialTask,
    ModelArrays,
    ModelPlace,
    PredictTask,
    TrainTask,
)
from fastfedul.params import Params
from fastfedul.records import ClientId, Model

_PART = 500
"""Number of examples of one prediction, for any number of workers."""


class Workers(Protocol):
    """The processes in which clients train."""

    def __enter__(self) -> Self:
        """Return itself."""

    def __exit__(self, *exception: object) -> None:
        """Stop all workers."""

    def initial(self, seed: int) -> Model:
        """Return the model to start from."""

    def train(
        self,
        model: Model,
        index: int,
        clients: Sequence[ClientId],
        local: LocalTraining | None = None,
    ) -> Sequence[LocalResult]:
        """Return the results of these clients in a round, in their order."""

    def predict(self, model: Model, name: str) -> Logits:
        """Return a model's logits for a set of images that was given at the start."""


def open_workers(
    trainer: Trainer,
    clients: Sequence[ClientData],
    *,
    seed: int,
    num_workers: int | None = None,
    images: Mapping[str, Images] | None = None,
) -> Workers:
    """Return workers for these clients; close them with a `with` block.

    Every worker process imports the calling script, so a script needs the usual
    `if __name__ == "__main__":` around its own work.

    Args:
        trainer: Trains and applies the model; picklable.
        clients: Examples of every client.
        seed: Seed of the run.
        num_workers: Number of processes; 1 for this process, None for one per core.
        images: Named sets of images for `predict`.
    """
    names = [data.client for data in clients]
    if not names or len(set(names)) < len(names):
        raise InvalidInputError("name at least one client, and each only once")
    if num_workers is None:
        num_workers = count_cores()
    if num_workers < 1:
        raise InvalidInputError(f"{num_workers} workers; choose 1 or more")
    if num_workers == 1:
        return InProcess(trainer, clients, seed=seed, images=images)
    return WorkerProcesses(
        trainer, clients, seed=seed, num_workers=num_workers, images=images
    )


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class InProcess:
    """Trains one client after the other in this process."""

    def __init__(
        self,
        trainer: Trainer,
        clients: Sequence[ClientData],
        *,
        seed: int,
        images: Mapping[str, Images] | None = None,
    ) -> None:
        self._trainer = trainer
        self._seed = seed
        self._clients = {data.client: data for data in clients}
        self._images = {n: _unlabelled(n, own) for n, own in (images or {}).items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    @property
    def names(self) -> tuple[ClientId, ...]:
        """Names of all clients, in their order."""
        return tuple(self._clients)

    def initial(self, seed: int) -> Model:
        """Return the model to start from."""
        return self._trainer.initial(seed)

    def train(
        self,
        model: Model,
        index: int,
        clients: Sequence[ClientId],
        local: LocalTraining | None = None,
    ) -> Sequence[LocalResult]:
        """Return the results of these clients in a round, in their order."""
        return [
            train_client(
                self._trainer, model, self._clients[name], index, self._seed, local
            )
            for name in clients
        ]

    def predict(self, model: Model, name: str) -> Logits:
        """Return a model's logits for a set of images that was given at the start."""
        data = self._images[name]
        return np.concatenate(
            [
                predict_part(self._trainer, model, data, begin, end)
                for begin, end in _parts(data.num_examples)
            ]
        )


class WorkerProcesses:
    """Trains clients in parallel; examples and models are in shared memory."""

    def __init__(
        self,
        trainer: Trainer,
        clients: Sequence[ClientData],
        *,
        seed: int,
        num_workers: int,
        images: Mapping[str, Images] | None = None,
    ) -> None:
        sets = [_unlabelled(name, own) for name, own in (images or {}).items()]
        owners = [*clients, *sets]
        self._clients = {data.client: i for i, data in enumerate(clients)}
        self._sets = {s.client: len(clients) + i for i, s in enumerate(sets)}
        self._lengths = tuple(data.num_examples for data in owners)
        self._models: ModelArrays | None = None
        first = owners[0].images
        shapes = (
            ArrayShape((sum(self._lengths), *first.shape[1:]), first.dtype.str),
            ArrayShape((sum(self._lengths),), np.dtype(np.int64).str),
        )
        names = tuple(data.client for data in owners)
        assignment = Assignment(trainer, seed, names, self._lengths, shapes)
        descriptor = shared_arrays.create(shapes)
        try:
            # The workers load the framework while this process copies the examples.
            self._processes = Processes(assignment, num_workers)
            try:
                _fill(descriptor, shapes, owners)
                self._processes.hand_over(descriptor)
            except BaseException:
                self._processes.close()
                raise
        finally:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._processes.close()
        self._models = None

    @property
    def pids(self) -> tuple[int, ...]:
        """Process numbers of the workers."""
        return self._processes.pids

    def initial(self, seed: int) -> Model:
        """Return the model to start from."""
        [(_, _, model)] = self._processes.run([InitialTask(seed)])
        assert isinstance(model, Model)
        return model

    def train(
        self,
        model: Model,
        index: int,
        clients: Sequence[ClientId],
        local: LocalTraining | None = None,
    ) -> Sequence[LocalResult]:
        """Return the results of these clients in a round, in their order."""
        models = self._put(model)
        # The largest clients go first, so the last worker ends soon after the others.
        owners = [self._clients[name] for name in clients]
        order = sorted(range(len(owners)), key=lambda i: -self._lengths[owners[i]])
        tasks = [TrainTask(owners[i], index, local) for i in order]
        results: dict[int, LocalResult] = {}
        for place, worker, _ in self._processes.run(tasks):
            answer = models.read(1 + worker)
            results[order[place]] = LocalResult(
                Params(answer.params.layout, answer.params.flat.copy()),
                {name: buffer.copy() for name, buffer in answer.buffers.items()},
            )
        return [results[i] for i in range(len(owners))]

    def predict(self, model: Model, name: str) -> Logits:
        """Return a model's logits for a set of images that was given at the start."""
        self._put(model)
        owner = self._sets[name]
        parts = _parts(self._lengths[owner])
        tasks = [PredictTask(owner, begin, end) for begin, end in parts]
        found = {place: logits for place, _, logits in self._processes.run(tasks)}
        return np.concatenate([found[i] for i in range(len(tasks))])

    def _put(self, model: Model) -> ModelArrays:
        """Write the global model to the shared memory of the workers."""
        buffers = tuple((name, ArrayShape.of(b)) for name, b in model.buffers.items())
        place = ModelPlace(model.params.layout, buffers, len(self._processes))
        if self._models is None or self._models.place != place:
            descriptor = shared_arrays.create(place.shapes)
            try:
                self._models = ModelArrays(descriptor, place)
                self._processes.hand_over(descriptor, place)
            finally:
                os.close(descriptor)
        self._models.write(0, model)
        return self._models


def _fill(
    descriptor: int, shapes: Sequence[ArrayShape], owners: Sequence[ClientData]
) -> None:
    images, labels = shared_arrays.arrays_in(descriptor, shapes)
    start = 0
    for data in owners:
        end = start + data.num_examples
        images[start:end] = data.images
        labels[start:end] = data.labels
        start = end


def _parts(length: int) -> list[tuple[int, int]]:
    """Return begin and end of each part; an empty set has one empty part."""
    starts = range(0, max(1, length), _PART)
    return [(start, min(start + _PART, length)) for start in starts]


def _unlabelled(name: str, images: Images) -> ClientData:
    return ClientData(name, images, np.zeros(len(images), np.int64))
