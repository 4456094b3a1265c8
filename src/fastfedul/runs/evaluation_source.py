"""`LEDGER.federation.toml`: how the model of a ledger outside a run is evaluated."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import tomli_w

from fastfedul.errors import InvalidInputError
from fastfedul.files import make_folder, read_regular_text, write_whole
from fastfedul.ledger.store.folder import find_ledger
from fastfedul.limits import require_type
from fastfedul.runs.config import CONFIG

_LEDGER = "ledger"
TWO_LINES = (
    'write two lines into {file}: model = "package.module:function" for the network '
    'and test = "test.npz" for test examples, with arrays images and labels'
)
"""How a user says it; documents are not installed with the package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSource:
    """Network and test examples of a federation; every process can find them again.

    Attributes:
        model: The network, as `train --model` takes it: a network that comes with the
            package, or `package.module:function`. It is called with the shape of an
            example and the number of classes.
        test: Labelled examples on which nobody trained: an `.npz` file with `images`
            and `labels`, or `package.module:function`, which returns both.
        trainer: Applies the network, as `train --trainer` takes it.
    """

    model: str
    test: str
    trainer: str = "torch"

    def __post_init__(self) -> None:
        for field in fields(self):
            require_type(field.name, getattr(self, field.name), str, "text")


def run_at(path: Path) -> Path | None:
    """Return the run that a path names, itself or by its ledger; None if there is none.

    Args:
        path: A run, or a ledger.
    """
    own = path.absolute()
    for place in (path, own.parent) if own.name == _LEDGER else (path,):
        if (place / CONFIG).is_file():
            return place
    return None


def federation_file(ledger: Path) -> Path:
    """Return the file beside a ledger that names network and test examples."""
    return ledger.with_name(f"{ledger.name}.federation.toml")


def source_of(path: Path) -> EvaluationSource:
    """Return how the model of a ledger outside a run is evaluated.

    Raises:
        InvalidInputError: If nobody said, or the file cannot be read.
    """
    ledger = find_ledger(path).absolute()
    file = federation_file(ledger)
    try:
        found = tomllib.loads(read_regular_text(file))
    except FileNotFoundError:
        raise InvalidInputError(
            f"{path} is a ledger without a run, so its network and test examples are "
            f"not known; {TWO_LINES.format(file=file)}"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInputError(f"cannot read {file}: {reason}") from None
    known = {field.name for field in fields(EvaluationSource)}
    missing = {"model", "test"} - set(found)
    if missing or set(found) - known:
        wrong = sorted(missing) or sorted(set(found) - known)
        what = "lacks" if missing else "has the unknown key"
        raise InvalidInputError(
            f"{file} {what} {wrong[0]!r:.40}; it has model and "
            "test, and perhaps trainer"
        )
    source = EvaluationSource(**found)
    if ":" in source.test:
        return source
    # The file names another one beside it; a caller may be in any folder.
    return EvaluationSource(
        **{**asdict(source), "test": str(file.parent / source.test)}
    )


def write_source(ledger: Path, source: EvaluationSource) -> None:
    """Write how the model of a ledger is evaluated beside the ledger.

    Raises:
        InvalidInputError: If the file cannot be written.
    """
    file = federation_file(ledger)
    try:
        make_folder(file.parent)
        write_whole(file, tomli_w.dumps(asdict(source)))
    except OSError as error:
        raise InvalidInputError(
            f"cannot write {file}: {error.strerror or error}"
        ) from None
