"""Shadow federations: the run trained again with half of the client's examples.

A shadow has the run's split, attack and settings. Its chance is its own: the first
model, the draw of participants and the order of batches. Shadows 0 and 1, 2 and 3, and
so on are pairs: an example of the client is in one of the two and out of the other.
One shadow serves every example and every method.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from fastfedul.data.dataset import ClientData, Examples, to_model_input
from fastfedul.errors import UnlearnRefusedError
from fastfedul.evaluate.comparison import BEFORE, RETRAINED
from fastfedul.evaluate.lira import Mask
from fastfedul.evaluate.metrics import margins
from fastfedul.federation.workers.pool import Workers
from fastfedul.investigate.audit.kept import LEAVER, OTHERS, TEST, Margins
from fastfedul.ledger.memory import MemoryLedger
from fastfedul.ledger.protocol import Ledger, WritableLedger
from fastfedul.methods.protocol import Method, UnlearnRequest
from fastfedul.records import ClientId, Model
from fastfedul.rng import stream
from fastfedul.runs.comparison import result_of
from fastfedul.runs.preparation import (
    Prepared,
    federation_for,
    retrain,
    rounds_of,
    start_workers,
)
from fastfedul.runs.training import new_ledger

MOST_EXAMPLES = 500
"""Examples of the clients that stay, and of the test, of which margins are kept."""


@dataclass(frozen=True)
class Shadows:
    """The shadow federations of a run and a client.

    Attributes:
        prepared: Data and trainer of the run.
        client: The client whose examples are attacked.
        absent: Clients that were forgotten before; no shadow has them.
    """

    prepared: Prepared
    client: ClientId
    absent: frozenset[ClientId] = frozenset()

    @cached_property
    def leaver(self) -> ClientData:
        """The client's examples, poison included."""
        return next(d for d in self.prepared.clients if d.client == self.client)

    @cached_property
    def examples(self) -> Mapping[str, Examples]:
        """The examples of which margins are kept, by group."""
        staying = [
            data
            for data in self.prepared.clients
            if data.client != self.client and data.client not in self.absent
        ]
        test = self.prepared.dataset.test
        none = test.images[:0], test.labels[:0]
        others = Examples(
            np.concatenate([none[0], *(data.images for data in staying)]),
            np.concatenate([none[1], *(data.labels for data in staying)]),
        )
        return {
            LEAVER: Examples(self.leaver.images, self.leaver.labels),
            OTHERS: self._some(others, OTHERS),
            TEST: self._some(test, TEST),
        }

    def members(self, number: int) -> Mask:
        """Return which of the client's examples a shadow has: half of them."""
        count = self.leaver.num_examples
        rng = stream(self.prepared.config.seed, "members of shadows", number // 2)
        chosen = rng.permutation(count) < count // 2
        return chosen if number % 2 == 0 else ~chosen

    def measured(
        self,
        number: int,
        methods: Mapping[str, Method],
        wanted: Collection[str],
        refused: dict[str, str],
    ) -> Iterator[tuple[str, Margins]]:
        """Yield the wanted models of a shadow by name, with their margins.

        Args:
            number: Number of the shadow.
            methods: Methods that forget the client, by name.
            wanted: Names of methods, `retrained` or `before`.
            refused: Gets the reason of a method that refuses.
        """
        shadow = self._prepared(number)
        gone = self.absent | {self.client}
        with start_workers(shadow) as workers:
            if RETRAINED in wanted:
                yield RETRAINED, self.margins(retrain(shadow, workers, gone))
            if not {*wanted} - {RETRAINED}:
                return
            with recorded(shadow, workers, self.absent) as ledger:
                if BEFORE in wanted:
                    yield BEFORE, self.margins(ledger.final)
                for name, method in methods.items():
                    if name not in wanted:
                        continue
                    federation = federation_for(shadow, workers)
                    request = UnlearnRequest(
                        ledger, frozenset([self.client]), federation
                    )
                    try:
                        found = result_of(method, request)
                    except UnlearnRefusedError as error:
                        refused[name] = str(error)
                        continue
                    yield name, self.margins(found.model(ledger.final))

    def margins(self, model: Model) -> Margins:
        """Return the margins of a model by group of examples."""
        predict = self.prepared.trainer.predict
        return {
            name: margins(predict(model, to_model_input(own.images)), own.labels)
            # Files keep them, and no attack turns on the digits beyond.
            .astype(np.float32)
            for name, own in self.examples.items()
        }

    def _prepared(self, number: int) -> Prepared:
        """Return the data of a shadow, with a seed of its own for all but the data."""
        prepared, mask = self.prepared, self.members(number)
        rng = stream(prepared.config.seed, "seeds of shadows", number)
        config = prepared.config.with_options(seed=int(rng.integers(2**31)))
        clients = tuple(
            replace(data, images=data.images[mask], labels=data.labels[mask])
            if data.client == self.client
            else data
            for data in prepared.clients
        )
        return replace(prepared, config=config, clients=clients)

    def _some(self, examples: Examples, group: str) -> Examples:
        rng = stream(self.prepared.config.seed, f"{group} examples of an audit")
        chosen = np.sort(rng.permutation(len(examples.labels))[:MOST_EXAMPLES])
        return Examples(examples.images[chosen], examples.labels[chosen])


@contextmanager
def recorded(
    prepared: Prepared, workers: Workers, absent: frozenset[ClientId]
) -> Iterator[Ledger]:
    """Yield the ledger of a whole training that keeps what the run's ledger keeps.

    It is in memory if the run keeps rounds as they are, else in a temporary folder.
    """
    config, initial = prepared.config, workers.initial(prepared.config.seed)
    recording = config.recording
    plain = recording.dtype == "float32" and recording.budget is None
    if plain and config.keep_policy.history == "rounds":
        memory = MemoryLedger.create(
            initial,
            aggregation=config.aggregation,
            optimizer=config.server.make_optimizer(),
        )
        _train(prepared, workers, absent, initial, memory)
        yield memory
        return
    with (
        TemporaryDirectory(prefix="fastfedul-audit-") as folder,
        new_ledger(Path(folder) / "ledger", config, initial) as ledger,
    ):
        _train(prepared, workers, absent, initial, ledger)
        yield ledger


def _train(
    prepared: Prepared,
    workers: Workers,
    absent: frozenset[ClientId],
    initial: Model,
    ledger: WritableLedger,
) -> None:
    rounds = rounds_of(
        prepared,
        workers,
        initial,
        0,
        prepared.config.rounds,
        absent,
        record=lambda _, round_: ledger.append(round_),
    )
    for _ in rounds:
        pass
