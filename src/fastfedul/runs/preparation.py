"""What a run works with: its data, its attack, its model, and workers for them."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

import numpy as np

from fastfedul.data import sources
from fastfedul.data.attacks import backdoor
from fastfedul.data.attacks.backdoor import Attack
from fastfedul.data.dataset import (
    ClientData,
    Dataset,
    Examples,
    set_aside,
    subset,
    to_model_input,
)
from fastfedul.data.partition import split
from fastfedul.federation.clients import Clients, Federation
from fastfedul.federation.rounds import advance, run_rounds
from fastfedul.federation.trainer import Labels, Logits, Trainer
from fastfedul.federation.workers.pool import (
    InProcess,
    Workers,
    count_cores,
    open_workers,
)
from fastfedul.records import ClientId, Model, Round
from fastfedul.runs.config import RunConfig
from fastfedul.runs.plugins import (
    IN_PROCESS,
    check_engine,
    engine_maker,
    trainer_maker,
)

_TEST = "test images"
_BACKDOOR = "backdoor images"
_SMALL_RUN = 2e7
"""Pixels trained on in a whole run below which starting processes does not pay."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a run works with, a function of its options.

    Attributes:
        config: The options.
        dataset: Test images, and the training images the clients share.
        clients: Everybody's examples, those of attackers poisoned.
        server: The server's own clean images.
        attack: What the attackers do, labels filled in.
        backdoor: Images on which the attack is measured; empty without an attack.
        trainer: Trains and applies the model.
    """

    config: RunConfig
    dataset: Dataset
    clients: tuple[ClientData, ...]
    server: Examples
    attack: Attack
    backdoor: Examples
    trainer: Trainer

    @property
    def sizes(self) -> dict[ClientId, int]:
        """Number of examples of every client."""
        return {data.client: data.num_examples for data in self.clients}

    @property
    def scales(self) -> dict[ClientId, float]:
        """What attackers multiply their updates by."""
        return dict.fromkeys(self.attack.attackers, self.attack.scale)


def prepare(config: RunConfig) -> Prepared:
    """Load, split and poison the data, and describe the model."""
    dataset = sources.load(config.data)
    if config.train_size is not None:
        dataset = subset(dataset, config.train_size, config.seed)
    server, dataset = set_aside(dataset, config.server_images, config.seed)
    clean = split(dataset, config.clients, config.split, config.seed)
    attack = backdoor.with_labels(config.poisoning, dataset)
    trainer = trainer_maker()(
        image_shape=dataset.image_shape,
        num_classes=dataset.num_classes,
        model=config.model,
        local=config.local,
    )
    return Prepared(
        config=config,
        dataset=dataset,
        clients=backdoor.poison(clean, attack, dataset, seed=config.seed),
        server=server,
        attack=attack,
        backdoor=backdoor.backdoor_test(attack, dataset),
        trainer=trainer,
    )


def start_workers(prepared: Prepared, engine: str = IN_PROCESS) -> Workers:
    """Return workers that train a run's clients and score its models.

    Args:
        prepared: What the run works with.
        engine: Where clients are trained; the results are the same bits.
    """
    config = prepared.config
    check_engine(engine)
    images = {_TEST: prepared.dataset.test_images}
    if len(prepared.backdoor.labels):
        images[_BACKDOOR] = prepared.backdoor.images
    if engine != IN_PROCESS:
        make = engine_maker(engine)
        here = InProcess(
            prepared.trainer, prepared.clients, seed=config.seed, images=images
        )
        return make(config, here)
    return open_workers(
        prepared.trainer,
        prepared.clients,
        seed=config.seed,
        num_workers=config.workers or _useful_workers(prepared),
        images=images,
    )


def rounds_of(
    prepared: Prepared,
    workers: Workers,
    model: Model,
    start: int,
    stop: int,
    absent: Set[ClientId],
) -> Iterator[Round]:
    """Return some rounds of a run, each trained when it is asked for."""
    config = prepared.config
    return run_rounds(
        workers.train,
        prepared.sizes,
        config.schedule,
        model=model,
        start=start,
        stop=stop,
        absent=absent,
        scales=prepared.scales,
        select=config.policy,
        local=config.local.sgd,
    )


def federation_for(prepared: Prepared, workers: Workers) -> Federation:
    """Return the living federation of a run, for methods that need its help."""
    config = prepared.config
    data = {data.client: data for data in prepared.clients}
    return Federation(
        clients=Clients(workers, data),
        trainer=prepared.trainer,
        schedule=config.schedule,
        local=config.local,
        scales=prepared.scales,
        select=config.policy,
        server=to_model_input(prepared.server.images),
        seed=config.seed,
    )


def retrain(
    prepared: Prepared,
    workers: Workers,
    without: Set[ClientId],
) -> Model:
    """Return the model of the same run with some clients' slots left empty.

    Seed, split, draws and initial model are those of the run; nothing is recorded.

    Args:
        prepared: What the run works with.
        workers: Those of `start_workers`.
        without: Whom to leave out.
    """
    model = workers.initial(prepared.config.seed)
    last = prepared.config.rounds
    for round_ in rounds_of(prepared, workers, model, 0, last, without):
        model = advance(model, round_)
    return model


def score(
    prepared: Prepared, workers: Workers, model: Model
) -> tuple[float, float | None]:
    """Return accuracy on the test images and on the backdoor images, if there are."""
    test = prepared.dataset.test_labels
    main = _accuracy(workers.predict(model, _TEST), test)
    if not len(prepared.backdoor.labels):
        return main, None
    logits = workers.predict(model, _BACKDOOR)
    return main, _accuracy(logits, prepared.backdoor.labels)


def _accuracy(logits: Logits, labels: Labels) -> float:
    return float(np.mean(logits.argmax(axis=1) == labels))


def _useful_workers(prepared: Prepared) -> int:
    """Return how many processes pay: one per core, but one for a small run."""
    config = prepared.config
    num_drawn = config.per_round or config.clients
    pixels = sum(data.images.size for data in prepared.clients) / config.clients
    if pixels * num_drawn * config.epochs * config.rounds < _SMALL_RUN:
        return 1
    return min(count_cores(), num_drawn)
