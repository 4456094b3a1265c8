"""Forgets with an old skew; run by `retired.py` with the old software on its path."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import numpy as np


def main(rounds: str, answer: str, skew: str, *forget: str) -> None:
    """Write the difference that an old skew adds to a run's model.

    Args:
        rounds: File of the run's rounds.
        answer: File to write.
        skew: `auto` or `direction`.
        forget: Clients that leave.
    """
    # The old software has other names than the one that a type checker sees.
    old: Any = importlib.import_module("fastfedul")

    with np.load(rounds) as stored:
        about = json.loads(stored["about"].tobytes())
        shapes = about["shapes"]

        def named(flat: np.ndarray) -> Any:
            ends = np.cumsum([int(np.prod(shape)) for shape in shapes.values()])
            parts = np.split(flat, ends[:-1])
            pairs = zip(shapes.items(), parts, strict=True)
            return old.Params.of({n: part.reshape(s) for (n, s), part in pairs})

        ledger = old.MemoryLedger.create(old.Model(named(stored["initial"]), {}))
        for index, shares in enumerate(about["shares"]):
            updates = tuple(
                old.ClientUpdate(client, share, named(flat))
                for (client, share), flat in zip(
                    shares.items(), stored[f"round-{index}"], strict=True
                )
            )
            ledger.append(old.Round(index, updates))
    method = old.FastFedUL() if skew == "auto" else old.FastFedUL(skew=skew)
    done = method(old.UnlearnRequest(ledger, frozenset(forget)))
    np.savez(
        answer,
        vector=done.delta.flat,
        seconds=done.seconds,
        bytes_read=done.bytes_read,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
