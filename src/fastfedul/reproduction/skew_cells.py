"""The runs on which our dampings are judged, drawn before any was scored.

Attack, split, how many clients are drawn for a round and how many are forgotten make 64
combinations. A draw with a fixed seed takes some of them for each data set: for digits
one of every attack and split, for the others a few. What was looked at while the method
was made has other seeds, from 100 on (docs/results/skew-protocol.md). Skew per
direction was made when skew per coordinate had been scored, so on digits, where that
had been done, it has seeds of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastfedul.reproduction.cells import BEFORE, RETRAINED, Cell, Kind
from fastfedul.reproduction.settings import Scale, Setting, setting_of
from fastfedul.rng import stream
from fastfedul.run_config import RunConfig
from fastfedul.validating import TRIED_DAMPINGS, TRIED_SPREADS

ATTACKS = ("edge-case", "pixel", "label-flip", "none")
SPLITS = ("iid", "dirichlet:0.5", "dirichlet:0.1", "level:4")
CLIENTS = 20
SCALAR, COORDINATE, RECURSION = "scalar", "coordinate", "recursion"
DIRECTION = "direction"
AUTO, VALIDATED, DIRECTED = "auto", "validated", "direction, as it is"
CURVES = (SCALAR, COORDINATE, RECURSION, DIRECTION)
_DRAW = 20_261_116
_COUNTS = {"mnist": 5, "cifar10": 3, "oct": 3}
_SEEDS = {"digits": 5, "mnist": 3, "cifar10": 2, "oct": 2}
_FRESH_SEED = {"digits": 5}
_IMAGES = 10_000


@dataclass(frozen=True, slots=True)
class Combination:
    """A setting to be judged on.

    Attributes:
        data: Data set.
        attack: What the leavers did.
        split: How the data are split.
        half: Whether only half of the clients are drawn for a round.
        leavers: How many of the twenty are forgotten.
    """

    data: str
    attack: str
    split: str
    half: bool
    leavers: int

    @property
    def name(self) -> str:
        """What a table calls it."""
        drawn = "half a round" if self.half else "all"
        who = "an honest leaver" if self.attack == "none" else self.attack
        if self.attack == "none" and self.leavers > 1:
            who = "honest leavers"
        return f"{who}, {self.split}, {drawn}, {self.leavers} of {CLIENTS}"


def combinations(scale: Scale) -> tuple[Combination, ...]:
    """Return the settings of a scale, in the order of the draw."""
    rng = stream(_DRAW, "skew cells")
    digits = [
        Combination("digits", attack, split, bool(half), (1, 4)[many])
        for (attack, split), (half, many) in zip(
            [(attack, split) for attack in ATTACKS for split in SPLITS],
            rng.integers(2, size=(16, 2)),
            strict=True,
        )
    ]
    found = list(digits)
    for data, count in _COUNTS.items():
        # One attack after the other, so that few draws still have several.
        attacks = [*rng.permutation(ATTACKS), *rng.permutation(ATTACKS)][:count]
        for attack in attacks:
            split, half, many = rng.integers((4, 2, 2))
            found.append(
                Combination(data, str(attack), SPLITS[split], bool(half), (1, 4)[many])
            )
    if scale == "smoke":
        return tuple(c for c in digits if c.split == "iid" and c.attack != "label-flip")
    return tuple(found)


def config_of(scale: Scale, combination: Combination, seed: int) -> RunConfig:
    """Return the options of a run."""
    setting: Setting = setting_of(
        "smoke" if combination.data == "digits" else scale, combination.data
    )
    options: dict[str, Any] = {**setting.run, "clients": CLIENTS}
    if combination.data == "digits":
        options |= {"rounds": 8 if scale == "smoke" else 20, "epochs": 2}
        options["server_images"] = 100
    else:
        options |= {"train_size": _IMAGES, "server_images": 200}
    attack = combination.attack
    if attack != "none":
        options |= setting.attacks.get(attack, {"poison_ratio": 0.5})
        options["attackers"] = str(combination.leavers)
    if combination.half:
        options["per_round"] = CLIENTS // 2
    return RunConfig(
        data=setting.data,
        attack=attack,
        partition=combination.split,
        seed=seed,
        **options,
    )


def cells_of(
    scale: Scale, combination: Combination, num_seeds: int, *, directions: bool = False
) -> Iterator[tuple[str, tuple[Cell, ...]]]:
    """Return the cells of each line of a setting, by its label, a cell per seed.

    Args:
        scale: How large.
        combination: The setting.
        num_seeds: At most so many seeds.
        directions: Whether skew per direction is judged, too, on seeds of its own.
    """
    kinds: dict[str, tuple[str, dict[str, Any], Kind]] = {
        BEFORE: (BEFORE, {}, "model"),
        RETRAINED: (RETRAINED, {}, "model"),
        AUTO: ("fast-fedul-auto", {}, "model"),
        VALIDATED: ("fast-fedul-auto", {"tolerance": 0.02}, "validated"),
        SCALAR: (
            "fast-fedul",
            {"skew": "scalar", "values": list(TRIED_DAMPINGS)},
            "curve",
        ),
        COORDINATE: (
            "fast-fedul",
            {"skew": "coordinate", "values": list(TRIED_SPREADS)},
            "curve",
        ),
        RECURSION: (
            "fast-fedul",
            {"skew": "coordinate", "recursion": True, "values": list(TRIED_SPREADS)},
            "curve",
        ),
    }
    first = 0
    if directions:
        kinds[DIRECTED] = ("fast-fedul", {"skew": "direction"}, "model")
        kinds[DIRECTION] = (
            "fast-fedul",
            {"skew": "direction", "values": list(TRIED_SPREADS)},
            "curve",
        )
        first = _FRESH_SEED.get(combination.data, 0) if scale == "standard" else 0
    seeds = range(min(num_seeds, _SEEDS[combination.data]))
    runs = [config_of(scale, combination, first + seed) for seed in seeds]
    for label, (method, settings, kind) in kinds.items():
        yield (
            label,
            tuple(
                Cell(run, method, settings, kind, combination.leavers) for run in runs
            ),
        )
