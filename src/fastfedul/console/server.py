"""Serves the console on this machine until somebody stops it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from fastfedul.errors import InvalidInputError, require_extra

HOST = "127.0.0.1"


def serve(path: Path, port: int, ready: Callable[[str, str], None]) -> None:
    """Serve the console of a run or ledger until Ctrl-C.

    Args:
        path: A run, or a ledger.
        port: Port on the loopback address; 0 for any that is free.
        ready: Called with the address with its token, and the address to look only.

    Raises:
        InvalidInputError: If the port is taken, or a package is missing.
    """
    with require_extra("console", "the console needs FastAPI, Jinja2 and uvicorn"):
        import uvicorn

        from fastfedul.console.app import Console, make_app
    with _listening(port) as listener:
        console = Console(path)
        try:
            config = uvicorn.Config(
                make_app(console),
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_graceful_shutdown=2,
            )
            place = f"http://{HOST}:{listener.getsockname()[1]}/"
            ready(f"{place}?token={console.sessions.token}", place)
            uvicorn.Server(config).run([listener])
        finally:
            console.close()


def _listening(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen()
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise InvalidInputError(
            f"cannot listen on port {port}: {reason}; choose another --port"
        ) from None
    return listener
