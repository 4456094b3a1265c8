"""Content of a report: frozen records that know nothing of their origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fastfedul.errors import InvalidInputError

Count = tuple[int, int]
Interval = tuple[float, float]
Floats = npt.NDArray[np.floating]
Images = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Row:
    """One model of a comparison. Shares run from 0 to 1; NaN means out of nothing.

    Attributes:
        method: `before`, `retrained`, `now` for a model as it is, or the name of the
            method that forgot.
        main: Accuracy: the share of right answers on clean test images.
        main_count: Right answers, and out of how many.
        main_interval: 95 % interval of `main`.
        backdoor: Attack success: the share of attacked images that the model takes
            for the attackers' class; None without an attack.
        backdoor_count: Successes of the attack, and out of how many.
        backdoor_interval: 95 % interval of `backdoor`.
        mia_auc: Area under the curve of membership inference; 0.5 is guessing.
        distance: Euclidean distance of the parameters to the retrained model.
        angle_degrees: Angle between all its parameters and the retrained model's.
        seconds: Time taken to get this model from the trained one.
        client_calls: How often a client had to compute something for it.
        history_bytes: Bytes of the ledger that were read for it.
    """

    method: str
    main: float
    main_count: Count
    main_interval: Interval
    backdoor: float | None = None
    backdoor_count: Count | None = None
    backdoor_interval: Interval | None = None
    mia_auc: float | None = None
    distance: float | None = None
    angle_degrees: float | None = None
    seconds: float | None = None
    client_calls: int = 0
    history_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RoundPoint:
    """How the model did at one moment of training.

    Attributes:
        round: Rounds trained so far; 0 is the untrained model. Two points of one
            round are before and after a client was forgotten.
        main: Accuracy.
        backdoor: Attack success; None without an attack.
    """

    round: int
    main: float
    backdoor: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Contributions:
    """Contributions of clients by round.

    Attributes:
        clients: Their names.
        values: Size of each contribution, clients by rounds in the order of training;
            NaN where a client took no part.
    """

    clients: tuple[str, ...]
    values: Floats

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or len(self.values) != len(self.clients):
            raise InvalidInputError(
                f"contributions of {len(self.clients)} clients need one row each, not "
                f"an array of shape {self.values.shape}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class ExampleImages:
    """Pictures to look at, with a caption each.

    Attributes:
        images: uint8 of shape (number, height, width, channels); one channel is grey,
            three are red, green and blue.
        captions: Caption of each picture.
    """

    images: Images
    captions: tuple[str, ...]

    def __post_init__(self) -> None:
        shape = self.images.shape
        if self.images.dtype != np.uint8 or len(shape) != 4 or shape[3] not in (1, 3):
            raise InvalidInputError(
                "example images must be uint8 of shape (number, height, width, 1 or 3),"
                f" not {self.images.dtype} of shape {shape}"
            )
        if shape[0] and not self.images.size:
            raise InvalidInputError(f"example images of shape {shape} show nothing")
        if shape[0] != len(self.captions):
            raise InvalidInputError(
                f"{shape[0]} example images need as many captions, "
                f"not {len(self.captions)}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """One page about one run; the page leaves out each part that is empty or None.

    Attributes:
        title: Heading of the page.
        summary: Plain sentences that come first.
        rows: The compared models.
        rounds: How training went, in the order of measuring.
        forgotten: Forgotten clients, and after how many rounds.
        unit_angles: Per method, the angle in degrees of every output unit's weights to
            the retrained model's.
        removed_by_layer: Per array of the model, the part of the difference that was
            removed; None where there was nothing to remove.
        contributions: Contributions of clients by round.
        examples: Poisoned images.
        settings: Names and values of the settings of the run.
        commands: Commands that make the same page again.
        notes: Further sentences on the limits of the page.
    """

    title: str
    summary: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    rounds: tuple[RoundPoint, ...] = ()
    forgotten: tuple[tuple[int, str], ...] = ()
    unit_angles: Mapping[str, Floats] = field(default_factory=dict)
    removed_by_layer: tuple[tuple[str, float | None], ...] = ()
    contributions: Contributions | None = None
    examples: ExampleImages | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    commands: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def find_row(rows: tuple[Row, ...], method: str) -> Row | None:
    """Return the first row of a method, None if there is none."""
    return next((row for row in rows if row.method == method), None)
