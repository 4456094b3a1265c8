"""The errors a caller may want to tell apart; each message is one line."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice


class FastFedULError(Exception):
    """The base of all errors: the message says what to do, and nothing has changed."""

    def __init__(self, message: str = "") -> None:
        # A message may quote a damaged file or another program's error. Characters
        # that would break the line, or steer a terminal, are shown escaped.
        super().__init__(
            "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)
        )


class InvalidInputError(FastFedULError):
    """The caller's input cannot be used as it is; a command ends with exit code 2."""


class MissingPackageError(FastFedULError, ImportError):
    """A package is not installed; the message names the extra that installs it."""

    def __init__(self, extra: str, what: str) -> None:
        super().__init__(f"{what}; run pip install 'fastfedul[{extra}]'")


class UnknownClientError(InvalidInputError):
    """The ledger has never seen a client of this name."""


class NothingToPoisonError(InvalidInputError):
    """An attacker has no example that its attack could poison."""


class LedgerError(FastFedULError):
    """The ledger cannot be opened, read or written."""


class NoLedgerError(LedgerError, InvalidInputError):
    """The path has no ledger, or no ledger can be made there."""


class LedgerDamagedError(LedgerError):
    """A stored byte differs from the byte written; the message names the place."""


class LedgerLockedError(LedgerError):
    """Another process is writing to this ledger."""


class UnlearnRefusedError(FastFedULError):
    """The method cannot answer this request from this ledger."""


class AlreadyForgottenError(UnlearnRefusedError):
    """The client was forgotten before, so nothing is left to do."""


class RequestWaitingError(UnlearnRefusedError):
    """A request for this client waits, and a second one would ask nothing more."""


class RequestClosedError(UnlearnRefusedError):
    """The request does not wait any more."""


class NotAcceptedError(UnlearnRefusedError):
    """The caller's own check refused the cleaned model, so nothing was written."""


@contextmanager
def require_extra(extra: str, what: str) -> Iterator[None]:
    """Return a block in which a failed import names the extra to install.

    Args:
        extra: The extra of `fastfedul` that installs the package.
        what: The reason to need the package, such as `pages need Jinja2`.

    Raises:
        MissingPackageError: If an import in the block fails.
    """
    try:
        yield
    except ImportError:
        raise MissingPackageError(extra, what) from None


def name_some(names: Iterable[str], most: int = 3) -> str:
    """Return the first few names, for a message.

    >>> name_some(["a", "b", "c", "d"])
    'a, b, c …'
    """
    first = list(islice(names, most + 1))
    more = " …" if len(first) > most else ""
    return ", ".join(f"{name:.80}" for name in first[:most]) + more
