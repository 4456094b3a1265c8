"""Options of the method that forgets, the same for every command that has them."""

from __future__ import annotations

from typing import Annotated

import typer

from fastfedul.errors import InvalidInputError

AUTO = "auto"

DampingText = Annotated[
    str,
    typer.Option(
        help="auto: each value of the model is damped by what the history says "
        "about it, as strongly as it takes. A number from 0 to 1, as in the paper "
        "(there minus alpha): how much of the clients' influence a round of the "
        "others' training is taken to undo by itself; more keeps accuracy, less "
        "removes more.",
        metavar="auto|NUMBER",
    ),
]
SkewName = Annotated[
    str | None,
    typer.Option(
        help="How the others' training is thought to have reacted. scalar: by the "
        "damping in every round, as in the paper. coordinate: each value of the "
        "model by what the history says about it. direction: mostly along the "
        "directions in which the others' updates differ, which reads all updates and "
        "takes longer. none: not at all. By default coordinate, and scalar with a "
        "number for the damping.",
        metavar="KIND",
        show_default=False,
    ),
]


def to_damping(text: str) -> float | None:
    """Return the number given for a damping; None for `auto`.

    Raises:
        InvalidInputError: If it is neither.
    """
    if text == AUTO:
        return None
    try:
        return float(text)
    except ValueError:
        raise InvalidInputError(
            f"--damping is {text!r:.40}; choose auto, or a number from 0 to 1"
        ) from None
