"""How long the stages of a training took, for whoever watches it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar, get_args

Stage = Literal["train", "record", "evaluate", "forget"]

STAGES: tuple[Stage, ...] = get_args(Stage)
"""Clients train; the ledger takes a round; a model is measured; clients are forgotten.
"""

P = ParamSpec("P")
R = TypeVar("R")


class StageTimes:
    """Seconds that each stage took in this process, and how often it came.

    One thread trains and adds; any other thread may read.
    """

    def __init__(self) -> None:
        self._taken: dict[Stage, tuple[int, float]] = dict.fromkeys(STAGES, (0, 0.0))

    def timed(self, stage: Stage, work: Callable[P, R]) -> Callable[P, R]:
        """Return a function that does the same work and adds its time to a stage.

        >>> times = StageTimes()
        >>> times.timed("record", len)([7]), times.taken()["record"][0]
        (1, 1)
        """

        def do(*args: P.args, **kwargs: P.kwargs) -> R:
            began = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                count, seconds = self._taken[stage]
                spent = time.perf_counter() - began
                self._taken[stage] = (count + 1, seconds + spent)

        return do

    def taken(self) -> dict[Stage, tuple[int, float]]:
        """Return how often each stage came, and its seconds in all."""
        return dict(self._taken)
