"""Who may change something: the token of the printed link, and sessions made from it.

Browsers send cookies with requests that other pages cause. So a change needs three
things more: the session's own secret in the form, an `Origin` that is this console, and
a `Host` that names this machine, which a rebound name of another site does not.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from urllib.parse import urlsplit

LOCAL_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
MOST_SESSIONS = 100


@dataclass(frozen=True, slots=True)
class Session:
    """A browser that came with the token.

    Attributes:
        cookie: Secret of the cookie.
        form_secret: Secret that each form of the session's pages carries.
    """

    cookie: str
    form_secret: str


@dataclass(slots=True)
class Sessions:
    """The sessions of a console.

    Attributes:
        token: The token of the printed link.
    """

    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    _known: dict[str, Session] = field(default_factory=dict)

    def begin(self, token: str) -> Session | None:
        """Return a new session for the right token; None for a wrong one."""
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            return None
        session = Session(secrets.token_urlsafe(32), secrets.token_urlsafe(32))
        while len(self._known) >= MOST_SESSIONS:
            self._known.pop(next(iter(self._known)))
        self._known[session.cookie] = session
        return session

    def find(self, cookie: str | None) -> Session | None:
        """Return the session of a cookie; None for a stranger."""
        return None if cookie is None else self._known.get(cookie)


def is_local(host: str | None) -> bool:
    """Return whether the `Host` of a request names this machine.

    >>> is_local("127.0.0.1:8765"), is_local("[::1]:80"), is_local("evil.example")
    (True, True, False)
    """
    if host is None:
        return False
    try:
        return urlsplit(f"//{host}").hostname in LOCAL_HOSTS
    except ValueError:
        return False


def is_own_origin(origin: str | None, host: str | None) -> bool:
    """Return whether a request comes from a page of this console."""
    return origin is not None and host is not None and origin == f"http://{host}"


def has_secret(session: Session, given: str) -> bool:
    """Return whether a form carries the secret of its session."""
    return hmac.compare_digest(session.form_secret.encode(), given.encode())
