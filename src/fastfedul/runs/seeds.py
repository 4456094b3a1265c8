"""The runs of other seeds beside a run: the same configuration, trained when missing.

The run of seed 3 beside `RUN` is `RUN-seed-3`. It is a run like any other. One that was
stopped goes on where it ended, and one that is finished is used as it is.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fastfedul.errors import FastFedULError, InvalidInputError
from fastfedul.ledger.reader import LedgerReader
from fastfedul.ledger.store.folder import INDEX
from fastfedul.records import ClientId
from fastfedul.runs.config import CONFIG, RunConfig
from fastfedul.runs.options import flag_of
from fastfedul.runs.training import LEDGER, RoundMetrics, load_config, resume, train

if TYPE_CHECKING:
    from fastfedul.runs.comparison import Say

_FOLLOWS = ("rounds", "workers")
"""Options in which the run of another seed follows the run that it stands beside."""


def find_runs(folder: Path, seeds: Sequence[int]) -> dict[int, Path]:
    """Return the folder of each seed's run, also of runs that are still missing.

    Args:
        folder: The run; its own seed must be among the seeds.
        seeds: The seeds, in the order wanted.

    Raises:
        InvalidInputError: If the run's own seed is missing, a seed is named twice, or
            the place of a run is taken by something else.
    """
    config = load_config(folder)
    if isinstance(seeds, str) or not isinstance(seeds, Sequence):
        raise InvalidInputError(f"seeds are a list of numbers, not {seeds!r:.60}")
    wrong = [s for s in seeds if type(s) is not int or s < 0]
    if wrong:
        raise InvalidInputError(
            f"a seed is a whole number, 0 or more, not {wrong[0]!r:.40}"
        )
    if twice := [seed for seed in seeds if seeds.count(seed) > 1]:
        raise InvalidInputError(f"seed {twice[0]} is named twice; name each seed once")
    if config.seed not in seeds:
        wanted = ",".join(map(str, (config.seed, *seeds)))
        raise InvalidInputError(
            f"{folder} has seed {config.seed}, which must be among the seeds; choose "
            f"{wanted}"
        )
    found = {
        seed: folder if seed == config.seed else _place(folder, config.seed, seed)
        for seed in seeds
    }
    for seed, place in found.items():
        _check(folder, place, config.with_options(seed=seed))
    if len(found) > 1:
        _check_forgotten(found.values(), config)
    return found


def finish_run(folder: Path, place: Path, seed: int, say: Say) -> None:
    """Train the run of another seed to its end; a finished one stays as it is.

    Args:
        folder: The run whose configuration it has.
        place: Its folder, of `find_runs`.
        seed: Its seed.
        say: Told how many rounds are trained.
    """
    config = load_config(folder)
    if place == folder or _num_rounds(place) >= config.rounds:
        return

    def progress(metrics: RoundMetrics) -> None:
        say("training", metrics.round + 1, config.rounds)

    say("training", _num_rounds(place), config.rounds)
    if (place / CONFIG).is_file():
        options = config.to_options()
        resume(place, {name: options[name] for name in _FOLLOWS}, progress)
    else:
        train(config.with_options(seed=seed), place, progress)


def seed_runs_with(folder: Path, clients: Iterable[ClientId]) -> dict[Path, list[str]]:
    """Return the runs of other seeds beside a run that still hold some clients.

    Args:
        folder: The run.
        clients: Clients that the run has forgotten.

    Returns:
        The names of the clients that are not erased there, by folder.
    """
    # By names alone: the client is gone already, so no wrong file may stop this.
    folder = folder.absolute()
    first = folder.with_name(re.sub(r"(?<=.)-seed-[0-9]+$", "", folder.name))
    beside = [
        place
        for name in sorted({folder.name, first.name})
        for place in sorted(folder.parent.glob(f"{glob.escape(name)}-seed-*"))
    ]
    found = {}
    for place in (first, *beside):
        if place == folder or not (place / LEDGER / INDEX).is_file():
            continue
        held = list(clients)
        # A ledger that cannot be read counts as one that holds them.
        with suppress(FastFedULError), LedgerReader(place) as ledger:
            known = ledger.clients()
            held = [c for c in held if c in known and known[c].state != "erased"]
        if held:
            found[place] = held
    return found


def _place(folder: Path, own: int, seed: int) -> Path:
    folder = folder if folder.name not in ("", "..") else folder.resolve()
    # Beside `run-seed-1` as beside `run`, the run of seed 2 is `run-seed-2`.
    name = folder.name.removesuffix(f"-seed-{own}") or folder.name
    return folder.with_name(f"{name}-seed-{seed}")


def _check(folder: Path, place: Path, wanted: RunConfig) -> None:
    """Raise if a folder is there that is not the run of this configuration."""
    if not (place / CONFIG).is_file():
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise InvalidInputError(
                f"{place} is no run, and the run of seed {wanted.seed} would be there; "
                "move it away"
            )
        return
    has, wants = load_config(place).to_options(), wanted.to_options()
    for name, value in wants.items():
        shorter = name == "rounds" and has[name] <= value
        if has[name] != value and not shorter and name != "workers":
            raise InvalidInputError(
                f"{place} is a run with {flag_of(name)} {has[name]!r:.40}, and "
                f"{folder} has {value!r:.40}; move one of them away"
            )


def _check_forgotten(places: Iterable[Path], config: RunConfig) -> None:
    """Raise if the runs of other seeds still know a client that was forgotten."""
    for place in places:
        if not _num_rounds(place):
            continue
        with LedgerReader(place) as ledger:
            known = ledger.clients().items()
        gone = {name for name, entry in known if entry.state != "active"}
        if unplanned := sorted(gone - set(config.forget_plan)):
            raise InvalidInputError(
                f"client {unplanned[0]!r:.80} was forgotten in {place}, and the runs "
                "of other seeds still know it; compare without other seeds"
            )


def _num_rounds(place: Path) -> int:
    if not (place / LEDGER / INDEX).is_file():
        return 0
    with LedgerReader(place) as ledger:
        return ledger.num_rounds
