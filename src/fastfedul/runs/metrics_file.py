"""How good the model was after each round, a line of JSON each.

The file is `RUN/metrics.jsonl`; beside a ledger outside a run, `LEDGER.metrics.jsonl`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fastfedul.errors import InvalidInputError
from fastfedul.files import read_regular_text, write_whole
from fastfedul.ledger.store.folder import find_ledger
from fastfedul.runs.evaluation_source import run_at

METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class RoundMetrics:
    """How good the model was after a round.

    Attributes:
        round: Number of the round.
        main: Accuracy on the test examples; None if it was lost.
        backdoor: Attack success; None without an attack, or if it was lost.
        seconds: Time of the round, with recording and scoring; None if it was lost.
    """

    round: int
    main: float | None
    backdoor: float | None
    seconds: float | None


def metrics_of(path: Path) -> Path:
    """Return the file of metrics of a run, or of a ledger outside a run."""
    run = run_at(path)
    if run is not None:
        return run / METRICS
    return metrics_beside(find_ledger(path))


def metrics_beside(ledger: Path) -> Path:
    """Return the file of metrics beside a ledger outside a run."""
    own = ledger.absolute()
    return own.with_name(f"{own.name}.{METRICS}")


def append(path: Path, metrics: RoundMetrics) -> None:
    """Add a line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(metrics)) + "\n")


def read(path: Path) -> dict[int, RoundMetrics]:
    """Return the metrics of each round; a line that was cut off is passed over."""
    found: dict[int, RoundMetrics] = {}
    if not path.exists():
        return found
    try:
        text = read_regular_text(path, errors="replace")
    except OSError as error:
        raise InvalidInputError(
            f"cannot read {path}: {error.strerror}; it has one line for each round"
        ) from None
    for line in text.splitlines():
        try:
            metrics = RoundMetrics(**json.loads(line))
        except (ValueError, TypeError):
            continue
        found[metrics.round] = metrics
    return found


def write(path: Path, lines: Sequence[RoundMetrics]) -> None:
    """Replace the file, whole or not at all."""
    text = "".join(json.dumps(asdict(metrics)) + "\n" for metrics in lines)
    write_whole(path, text)
