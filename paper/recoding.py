"""A recorded run as another ledger would have it: other dtypes, other keeping."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fastfedul.errors import InvalidInputError
from fastfedul.ledger.disk import DiskLedger
from fastfedul.ledger.keeping import Keep
from fastfedul.ledger.protocol import Ledger, read_round, require_rounds
from fastfedul.records import Round, StorageDtype


def recoded(
    ledger: Ledger,
    path: Path | str,
    update_dtype: StorageDtype = "float32",
    step_dtype: StorageDtype = "float32",
    keep: Keep | None = None,
) -> DiskLedger:
    """Return a new ledger of the same training, open for writing.

    Args:
        ledger: A ledger of rounds that kept every update in float32, from which nobody
            was forgotten.
        path: Where the new one goes.
        update_dtype: How it stores updates, or sums if it keeps those.
        step_dtype: How it stores steps.
        keep: Which updates it keeps; all by default. With `sums` it keeps sums.

    Raises:
        InvalidInputError: If the ledger does not have the training whole.
    """
    policy = keep or Keep()
    require_rounds(ledger, "the vectors of rounds")
    if policy.use != "store":
        raise InvalidInputError("a recorded run cannot aggregate less than it did")
    if any(entry.state != "active" for entry in ledger.clients().values()):
        raise InvalidInputError("clients were forgotten, so the training is not whole")
    if any(round_.privacy is not None for round_ in ledger.rounds()):
        raise InvalidInputError(
            "the server added noise to the model, which no update explains; keep the "
            "ledger as it is"
        )
    num_rounds = ledger.num_rounds
    new = DiskLedger.create(
        path,
        ledger.initial,
        aggregation=ledger.settings.aggregation,
        custom=ledger.settings.custom,
        update_dtype=update_dtype,
        step_dtype=step_dtype,
        history=policy.history,
        sums_from=policy.sums_from,
        optimizer=ledger.settings.optimizer,
    )
    try:
        for index in range(num_rounds):
            round_ = policy(_whole(ledger, index))
            if index == num_rounds - 1:
                # Of the buffers along the way nobody knows.
                round_ = replace(round_, buffers=ledger.final.buffers)
            new.append(round_)
    except BaseException:
        new.close()
        raise
    return new


def _whole(ledger: Ledger, index: int) -> Round:
    round_ = read_round(ledger, index)
    for update in round_.updates:
        if update.delta is None:
            raise InvalidInputError(
                f"the update of client {update.client!r:.80} in round {index} was not "
                "kept, so the training is not whole"
            )
    return round_
