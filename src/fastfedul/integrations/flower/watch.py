"""Watches whether the mark of a client comes back after the client was forgotten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from logging import ERROR, INFO, WARNING

from flwr.supercore.logger import log

from fastfedul.errors import InvalidInputError
from fastfedul.federation.local import USERS_OWN, one_line
from fastfedul.limits import require_number, show
from fastfedul.records import Model


@dataclass(slots=True, kw_only=True)
class Watch:
    """A mark to watch, and when to warn.

    The log gets a warning when the score of a model reaches `alarm` after a client was
    forgotten, and again each time that it does so anew.

    Attributes:
        score: Returns how much of the mark a model has, more for a clearer mark; such
            as the share of bad inputs that get the unwanted answer.
        alarm: Score from which on the mark counts as back.
    """

    score: Callable[[Model], float]
    alarm: float
    _quiet: bool = field(default=True, init=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.score):
            raise InvalidInputError(
                f"the score of a watch is a function of a model, not {show(self.score)}"
            )
        require_number("alarm of a watch", self.alarm)

    def look(self, model: Model, when: str, *, always: bool = False) -> None:
        """Score a model, and warn if the mark is back; a failure ends no training.

        Args:
            model: The model, from which a client was forgotten.
            when: Words for the log, such as `after round 3`.
            always: Whether the log gets the score even if there is nothing to warn of.
        """
        try:
            score = float(self.score(model))
        except USERS_OWN as error:
            log(ERROR, "the watched mark has no score %s: %s", when, one_line(error))
            return
        # A score that is no number is no reason to be quiet either.
        back = not score < self.alarm
        if back and (self._quiet or always):
            log(
                WARNING,
                "the watched mark of a forgotten client is there %s: score %.4g, and "
                "the alarm is %.4g; trace the clients with `fastfedul trace`",
                when,
                score,
                self.alarm,
            )
        elif always:
            log(INFO, "score of the watched mark %s: %.4g", when, score)
        self._quiet = not back
