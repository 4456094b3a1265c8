"""Options of the method that forgets, the same for every command that has them."""

from __future__ import annotations

from typing import Annotated

import typer

from fastfedul.errors import InvalidInputError
from fastfedul.methods.fast_fedul.skews import PAPERS_DAMPING, Scalar, Skew, skew_of

SkewName = Annotated[
    str | None,
    typer.Option(
        help="How much the others' training is taken to have pulled back by itself. "
        "kronecker: most where their updates differ most. scalar: the same part of "
        "everything in every round, as in the paper. none: nothing. "
        "[default: kronecker; scalar with --damping or --alternate]",
        metavar="SKEW",
        show_default=False,
    ),
]
DampingNumber = Annotated[
    float | None,
    typer.Option(
        help="With scalar: the part that a round pulls back, 0 to 1; the paper's alpha "
        "with a minus. More keeps accuracy, less removes more. "
        f"[default: {PAPERS_DAMPING}]",
        show_default=False,
    ),
]
AlternateFlag = Annotated[
    bool,
    typer.Option(
        "--alternate", help="With scalar: damp every other round only (Fast-FedUL-3)."
    ),
]


def chosen_skew(
    name: str | None, damping: float | None, *, alternate: bool = False
) -> Skew | None:
    """Return the skew that the options name; None if they name none.

    Raises:
        InvalidInputError: If there is no such skew, or an option belongs to another.
    """
    of_scalar = damping is not None or alternate
    if name is None and not of_scalar:
        return None
    if of_scalar and name not in (None, Scalar.name):
        option = "--alternate" if damping is None else "--damping"
        raise InvalidInputError(
            f"{option} belongs to --skew scalar, not to {name!r:.40}; leave one away"
        )
    return skew_of(
        {
            "skew": name or Scalar.name,
            "damping": PAPERS_DAMPING if damping is None else damping,
            "damped": "alternate" if alternate else "all",
        }
    )
