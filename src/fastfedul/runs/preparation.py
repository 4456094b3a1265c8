"""Prepares a run: its data, its attack, its trainer, and workers for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

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
from fastfedul.data.npz import order_owners, read_owners
from fastfedul.data.partition import split, split_by_owner
from fastfedul.errors import FastFedULError, InvalidInputError
from fastfedul.federation.aggregation import named_rule
from fastfedul.federation.clients import Clients, Federation
from fastfedul.federation.local import USERS_OWN, one_line
from fastfedul.federation.rounds import TrainedRound, model_after, run_rounds
from fastfedul.federation.trainer import Labels, Logits, Trainer
from fastfedul.federation.workers.pool import (
    InProcess,
    Workers,
    count_cores,
    open_workers,
)
from fastfedul.ledger.checks import check_name
from fastfedul.records import ClientId, Model, Round
from fastfedul.runs.config import RunConfig, name_clients
from fastfedul.runs.plugins import (
    IN_PROCESS,
    check_engine,
    engine_maker,
    find_trainer,
)
from fastfedul.runs.stages import StageTimes

_TEST = "test examples"
_BACKDOOR = "backdoor examples"
_SMALL_RUN = 2e7
"""Values trained on in a whole run below which starting processes does not pay."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Data, attack and trainer of a run, a function of its configuration.

    Attributes:
        config: The configuration.
        dataset: Test examples, and the training examples the clients share.
        clients: Everybody's examples, the attackers' examples poisoned.
        server: The server's own clean examples.
        attack: The attack, labels filled in.
        backdoor: Examples that measure the attack; empty without an attack.
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
    def names(self) -> tuple[ClientId, ...]:
        """Names of all clients."""
        return tuple(data.client for data in self.clients)

    @property
    def sizes(self) -> dict[ClientId, int]:
        """Number of examples of every client."""
        return {data.client: data.num_examples for data in self.clients}

    @property
    def scales(self) -> dict[ClientId, float]:
        """Factors by which attackers multiply their updates."""
        return dict.fromkeys(self.attack.attackers, self.attack.scale)


def prepare(config: RunConfig) -> Prepared:
    """Load, split and poison the data, and describe the model."""
    wanted, seed = config.data, config.seed
    dataset = sources.load(wanted.source)
    owners = None if dataset.owners is None else order_owners(dataset.owners)
    names = _names(config, owners)
    config.check_clients(names)
    if wanted.train_size is not None:
        dataset = subset(dataset, wanted.train_size, seed)
    server, dataset = set_aside(dataset, wanted.server_images, seed)
    if owners is None:
        clean = split(dataset, len(names), wanted.split, seed)
    else:
        clean = split_by_owner(dataset)
        _check_all_there(names, clean)
    attack = backdoor.with_labels(config.attack.of_clients(names), dataset)
    trainer = _make_trainer(config, dataset)
    return Prepared(
        config=config,
        dataset=dataset,
        clients=backdoor.poison(clean, attack, dataset, seed=seed),
        server=server,
        attack=attack,
        backdoor=backdoor.backdoor_test(attack, dataset),
        trainer=trainer,
    )


def client_names(config: RunConfig) -> tuple[ClientId, ...]:
    """Return the names of a run's clients, also of clients that never took part.

    Raises:
        InvalidInputError: If only the data file knows them and it cannot be read.
    """
    if config.data.names is not None:
        return config.data.names
    return _names(config, read_owners(Path(config.data.source)))


def _names(
    config: RunConfig, owners: tuple[ClientId, ...] | None
) -> tuple[ClientId, ...]:
    """Return the names of all clients; the file's own names if it has some."""
    if owners is None:
        return name_clients(config.data.clients)
    for option in ("clients", "partition"):
        if getattr(config.data, option) is not None:
            raise InvalidInputError(
                f"{Path(config.data.source).name} says which client has which example, "
                f"so leave out --{option}"
            )
    for name in owners:
        check_name(name)
    return owners


def _check_all_there(names: Sequence[ClientId], clients: Sequence[ClientData]) -> None:
    """Raise if a client has lost all its examples to other options."""
    lost = [name for name in names if name not in {data.client for data in clients}]
    if lost:
        raise InvalidInputError(
            f"client {lost[0]!r:.80} has no example left to train on; choose a larger "
            "--train-size or fewer --server-images"
        )


def _make_trainer(config: RunConfig, dataset: Dataset) -> Trainer:
    make = find_trainer(config.trainer)
    try:
        return make(
            shape=dataset.shape,
            num_classes=dataset.num_classes,
            model=config.model,
            local=config.local.training,
        )
    except FastFedULError:
        raise
    except USERS_OWN as error:
        raise InvalidInputError(
            f"the trainer {config.trainer} failed: {one_line(error)}; it is called "
            "with the keywords shape, num_classes, model and local"
        ) from error


def start_workers(prepared: Prepared, engine: str = IN_PROCESS) -> Workers:
    """Return workers that train a run's clients and score its models.

    Args:
        prepared: Data and trainer of the run.
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
    record: Callable[[Model, Round], Model] | None = None,
    stages: StageTimes | None = None,
) -> Iterator[TrainedRound]:
    """Return some rounds of a run, each trained when it is asked for.

    Args:
        prepared: Data and trainer of the run.
        workers: From `start_workers`.
        model: The model before the first of these rounds.
        start: Number of the first round.
        stop: Number of the round to stop before.
        absent: Clients to leave out.
        record: Records a round and returns the model after it; None to record nothing.
        stages: Gets the time that clients take to train.
    """
    config = prepared.config
    return run_rounds(
        (stages or StageTimes()).timed("train", workers.train),
        prepared.sizes,
        config.round_schedule,
        model=model,
        start=start,
        stop=stop,
        absent=absent,
        scales=prepared.scales,
        select=config.keep_policy,
        local=config.local.training.sgd,
        rule=named_rule(config.aggregation, {}),
        record=record,
        optimizer=config.server.make_optimizer(),
    )


def federation_for(prepared: Prepared, workers: Workers) -> Federation:
    """Return the living federation of a run, for methods that need its help."""
    config = prepared.config
    data = {data.client: data for data in prepared.clients}
    return Federation(
        clients=Clients(workers, data),
        trainer=prepared.trainer,
        schedule=config.round_schedule,
        local=config.local.training,
        scales=prepared.scales,
        select=config.keep_policy,
        server=to_model_input(prepared.server.images),
        seed=config.seed,
    )


def retrain(
    prepared: Prepared,
    workers: Workers,
    without: Set[ClientId],
) -> Model:
    """Return the model of the same run with some clients' slots left empty.

    Seed, split, draws and initial model stay the same; nothing is recorded.

    Args:
        prepared: Data and trainer of the run.
        workers: From `start_workers`.
        without: Clients to leave out.
    """
    model = workers.initial(prepared.config.seed)
    last = prepared.config.rounds
    rounds = rounds_of(prepared, workers, model, 0, last, without)
    return model_after(rounds, model)


def score(
    prepared: Prepared, workers: Workers, model: Model
) -> tuple[float, float | None]:
    """Return the accuracy on the test examples, and the attack success."""
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
    count = len(prepared.clients)
    num_drawn = config.schedule.per_round or count
    values = sum(data.images.size for data in prepared.clients) / count
    if values * num_drawn * config.local.epochs * config.rounds < _SMALL_RUN:
        return 1
    return min(count_cores(), num_drawn)
