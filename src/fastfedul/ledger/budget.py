"""How much disk a ledger needs, before there is one."""

from __future__ import annotations

from dataclasses import dataclass

from fastfedul.errors import InvalidInputError
from fastfedul.ledger.store.codec import STORAGE_DTYPES, VALUE_BYTES, num_scales
from fastfedul.records import StorageDtype

_FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FederationSize:
    """What the disk budget depends on.

    Attributes:
        parameters: Values of the model.
        clients: Everybody who ever takes part.
        rounds: Rounds to record.
        per_round: Participants of a round; None for all clients.
        kept: Updates kept of a round; None for all of them.
    """

    parameters: int
    clients: int
    rounds: int
    per_round: int | None = None
    kept: int | None = None

    def __post_init__(self) -> None:
        drawn = self.clients if self.per_round is None else self.per_round
        kept = drawn if self.kept is None else self.kept
        for name, value in (
            ("parameters", self.parameters),
            ("clients", self.clients),
            ("rounds", self.rounds),
            ("per round", drawn),
        ):
            if value < 1:
                raise InvalidInputError(f"{name} is {value}; choose 1 or more")
        if drawn > self.clients:
            raise InvalidInputError(
                f"{drawn} of {self.clients} clients cannot take part; choose fewer"
            )
        if not 0 <= kept <= drawn:
            raise InvalidInputError(f"kept is {kept}; choose 0 to {drawn}")


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of array files; the index beside them is small.

    Attributes:
        update: One stored update.
        per_round: What every round adds for good: updates kept, and the step.
        constant: The first and the current model.
        total: After the last round.
        headroom: What is needed beyond that at the worst moment: the new steps
            beside the old ones while a client is erased.
    """

    update: int
    per_round: int
    constant: int
    total: int
    headroom: int


def budget(federation: FederationSize, store: StorageDtype) -> Budget:
    """Return what a ledger of such a federation takes on disk.

    Args:
        federation: Its sizes.
        store: How updates are stored; steps are float32.
    """
    if store not in STORAGE_DTYPES:
        raise InvalidInputError(
            f"unknown storage dtype {store!r}; choose {', '.join(STORAGE_DTYPES)}"
        )
    size, rounds, clients = federation.parameters, federation.rounds, federation.clients
    drawn = clients if federation.per_round is None else federation.per_round
    kept = drawn if federation.kept is None else federation.kept
    exact = size * _FLOAT32
    update = size * VALUE_BYTES[store] + num_scales(store, size) * _FLOAT32
    per_round = kept * update + exact
    constant = 2 * exact
    headroom = (rounds + 1) * exact
    return Budget(update, per_round, constant, rounds * per_round + constant, headroom)
