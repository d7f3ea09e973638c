"""Checks of the loopback: a free port, and the session's own secured connection from here to here."""

from __future__ import annotations

import socket
import time

from guava_nb.doctor.check import Check
from guava_nb.errors import GuavaError

__all__ = ["check_connection", "check_port", "connect_to_itself"]

LOOPBACK = "127.0.0.1"


def check_port() -> Check:
    """Whether a program may listen on the loopback at all; sandboxes may forbid it."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            return Check("port", "ok", f"{LOOPBACK}:{server.getsockname()[1]} could be opened")
    except OSError as error:
        return Check(
            "port", "fail", f"cannot listen on {LOOPBACK}: {error}", "allow local connections (sandbox, firewall)"
        )


def check_connection() -> Check:
    """Whether listener and dialler agree over TLS on this machine."""
    started = time.monotonic()
    try:
        connect_to_itself()
    except (GuavaError, OSError) as error:
        fix = "check local firewall or antivirus rules, and that cryptography is installed whole"
        return Check("connection", "fail", f"no secured connection to itself: {error}", fix)
    return Check("connection", "ok", f"TLS and proof of the secret in {(time.monotonic() - started) * 1e3:.0f} ms")


def connect_to_itself() -> None:
    """Listen, dial with the join code, and close: all that a worker's join needs, without a worker.

    Raises:
        GuavaError: what a worker would have been told.
    """
    from guava_nb.link.dialler import dial
    from guava_nb.link.listener import Listener
    from guava_nb.link.options import LinkOptions

    options = LinkOptions()
    listener = Listener(options, _ignore, host=LOOPBACK)
    listener.start()
    try:
        dial(listener.join_code(), _ignore, options).close("doctor is done")
    finally:
        listener.close()


def _ignore(event: object) -> None:
    """Nothing is said on this session; its opening and closing need no answer."""
