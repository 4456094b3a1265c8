"""`fastfedul forget --then-check`: does what was forgotten come back?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastfedul.cli.evaluate import show_proportion
from fastfedul.cli.output import print_table, task_progress
from fastfedul.errors import InvalidInputError
from fastfedul.evaluate.intervals import Proportion
from fastfedul.ledger.protocol import Ledger
from fastfedul.limits import require_number
from fastfedul.records import ClientId, Model


class ThenCheck:
    """Rounds of the clients that stay, on a copy, after a forgetting.

    Args:
        path: The run.
        count: Number of rounds; None for no check.

    Raises:
        InvalidInputError: If the clients are not at hand. Nothing has changed then.
    """

    def __init__(self, path: Path, count: int | None) -> None:
        self._count = count
        self._run: Path | None = None
        if count is None:
            return
        # Needs the extra `torch`, which forgetting otherwise does not.
        from fastfedul.runs.evaluation_source import run_at

        require_number("--then-check", count, least=1, whole=True)
        self._run = run_at(path)
        if self._run is None:
            raise InvalidInputError(
                f"--then-check trains the clients of a run, and {path} is no run; "
                "leave it out"
            )

    def open(self, ledger: Ledger, names: Sequence[ClientId]) -> None:
        """Remember who is gone then, and load the data before anything changes."""
        if self._run is None:
            return
        from fastfedul.runs.preparation import prepare
        from fastfedul.runs.training import load_config

        known = ledger.clients()
        gone = {name for name, own in known.items() if own.state != "active"}
        self._names, self._gone = tuple(names), frozenset(gone | {*names})
        self._start = ledger.num_rounds
        self._prepared = prepare(load_config(self._run))
        if not set(self._prepared.names) - self._gone:
            raise InvalidInputError(
                "--then-check needs clients that stay, and nobody stays; leave it out"
            )

    def __call__(self, model: Model) -> list[dict[str, Any]] | None:
        """Return how the model does now and after each further round."""
        if self._run is None or self._count is None:
            return None
        from fastfedul.runs.afterwards import course
        from fastfedul.runs.exam import questions_of
        from fastfedul.runs.preparation import start_workers

        prepared, found = self._prepared, []
        with (
            task_progress("rounds after forgetting") as say,
            start_workers(prepared) as workers,
        ):
            for point in course(
                prepared,
                workers,
                model,
                self._count,
                start=self._start,
                absent=self._gone,
                questions=questions_of(prepared, self._names),
            ):
                backdoor = point.backdoor
                found.append(
                    {
                        "rounds": point.rounds,
                        "main": point.main.value,
                        "main_count": _count(point.main),
                        "backdoor": None if backdoor is None else backdoor.value,
                        "backdoor_count": _count(backdoor),
                        "loss": point.loss,
                    }
                )
                say("rounds after forgetting", point.rounds, self._count)
        return found


def show_then_check(found: Sequence[dict[str, Any]]) -> None:
    """Print the course as a table."""
    attacked = found[0]["backdoor"] is not None
    columns = ["further rounds", "accuracy", *(["attack success"] if attacked else [])]
    rows = []
    for point in found:
        cells = [
            str(point["rounds"]),
            show_proportion(Proportion(*point["main_count"])),
        ]
        if attacked:
            cells.append(show_proportion(Proportion(*point["backdoor_count"])))
        rows.append([*cells, f"{point['loss']:.3f}"])
    print_table(
        "Does it come back? Rounds of the clients that stay, on a copy",
        [*columns, "loss on the forgotten"],
        rows,
    )


def _count(found: Proportion | None) -> list[int] | None:
    return None if found is None else [found.successes, found.total]
