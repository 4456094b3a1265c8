"""The errors a caller may want to tell apart; each message is one line."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice


class FastFedULError(Exception):
    """Something was wrong and the message says what to do; nothing was changed."""

    def __init__(self, message: str = "") -> None:
        # A message may quote a damaged file or another program's error: what would
        # break the line, or steer a terminal, is shown escaped.
        super().__init__(
            "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)
        )


class InvalidInputError(FastFedULError):
    """What the caller handed in cannot be used as it is."""


class UnknownClientError(InvalidInputError):
    """A client was named that the ledger has never seen."""


class AlreadyForgottenError(InvalidInputError):
    """A client was forgotten before, so there is nothing left to do."""


class NothingToPoisonError(InvalidInputError):
    """The split leaves an attacker no image that its attack could poison."""


class RequestClosedError(InvalidInputError):
    """A request is not waiting any more."""


class LedgerError(FastFedULError):
    """The ledger could not be opened, read or written."""


class LedgerDamagedError(LedgerError):
    """A stored byte is not what was written; the message names the place."""


class LedgerLockedError(LedgerError):
    """Another process is writing to this ledger."""


class UnlearnRefusedError(FastFedULError):
    """The history cannot support the request, so no answer is given."""


class NotAcceptedError(UnlearnRefusedError):
    """The caller's own check of the cleaned model failed, so nothing was written."""


@contextmanager
def require_extra(extra: str, what: str) -> Iterator[None]:
    """Turn a failed import into one line that says which extra to install.

    Args:
        extra: The extra of `fastfedul` that has the package.
        what: Who needs which package, such as `pages need Jinja2`.

    Raises:
        InvalidInputError: If an import in the block fails.
    """
    try:
        yield
    except ImportError:
        raise InvalidInputError(
            f"{what}; install it with pip install 'fastfedul[{extra}]'"
        ) from None


def name_some(names: Iterable[str], most: int = 3) -> str:
    """Return the first of some names, for a message.

    >>> name_some(["a", "b", "c", "d"])
    'a, b, c …'
    """
    first = list(islice(names, most + 1))
    more = " …" if len(first) > most else ""
    return ", ".join(f"{name:.80}" for name in first[:most]) + more
