"""The judge of a cleaned model: images of the server's own, and its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fastfedul.errors import InvalidInputError, NotAcceptedError
from fastfedul.ledger.protocol import Ledger
from fastfedul.records import Model

_PANEL = "Checking the result"

JUDGING_OPTIONS: dict[str, Any] = {
    "validation": Annotated[
        Path | None,
        typer.Option(
            help="Clean images of your own, an .npz file with images and, if known, "
            "labels. The command says how the cleaned model does on them. Never use "
            "the leaver's images.",
            metavar="FILE.npz",
            rich_help_panel=_PANEL,
        ),
    ],
    "max_drop": Annotated[
        float | None,
        typer.Option(
            help="With --validation: write nothing if more than this share is lost.",
            rich_help_panel=_PANEL,
        ),
    ],
}
"""Options of a `Judge`, for `with_options`."""


class Judge:
    """Judges cleaned models by images, and refuses one that loses too many.

    Args:
        options: Values of `JUDGING_OPTIONS`. Without images, every model is accepted.

    Attributes:
        found: The last judgement, as JSON values; None before the first.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        file, max_drop = options["validation"], options["max_drop"]
        if max_drop is not None and file is None:
            raise InvalidInputError("--max-drop needs --validation FILE.npz")
        if not 0 <= (max_drop or 0.0) <= 1:
            raise InvalidInputError(
                f"--max-drop is a share from 0 to 1, not {max_drop}"
            )
        self._file, self._max_drop = file, max_drop
        self._images: Any = None
        self.found: dict[str, Any] | None = None

    def open(self, ledger: Ledger, path: Path) -> None:
        """Read the images, for a ledger at a path."""
        if self._file is not None:
            # Needs the extra `torch`, which forgetting otherwise does not.
            from fastfedul.runs.validation import open_validation

            self._images = open_validation(self._file, ledger, path)

    def __call__(self, before: Model, after: Model) -> None:
        """Judge a cleaned model.

        Raises:
            NotAcceptedError: If it loses too many images.
        """
        if self._images is None:
            return
        found = self._images.judge(before, after)
        self.found = asdict(found)
        if self._max_drop is not None and found.drop > self._max_drop:
            raise NotAcceptedError(
                f"the cleaned model loses {found.drop:.1%} of the validation images, "
                f"more than the {self._max_drop:.1%} of --max-drop; nothing was written"
            )


def judgement_text(found: dict[str, Any]) -> str:
    """Return a judgement in words, on one line."""
    low, high = (f"{100 * end:.1f}" for end in found["interval"])
    if found["right_before"] is None:
        return (
            f"{found['changed']} of {found['total']} images change class, "
            f"{found['drop']:.1%} [{low} to {high}]"
        )
    return (
        f"{found['right_before']} of {found['total']} images right before, "
        f"{found['right_after']} after: {100 * found['drop']:.1f} points lost "
        f"[{low} to {high}]"
    )
