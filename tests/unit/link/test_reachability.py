"""A listener that answers those who hold its secret, and tells nothing to anybody else."""

from __future__ import annotations

import socket

import pytest

from guava_nb.link.reachability import ReachListener, dial_all
from guava_nb.protocol.messages import ProbeTarget

pytestmark = pytest.mark.timeout(30)


def test_only_who_holds_the_secret_is_answered() -> None:
    listener = ReachListener(b"s" * 16, loopback=True)
    try:
        here = tuple(where for where in listener.addresses if where.address == "127.0.0.1")
        right, wrong = dial_all([ProbeTarget(0, b"s" * 16, here), ProbeTarget(1, b"x" * 16, here)], 3.0)
        assert (right.problem, wrong.problem) == ("", "another program answers there")
        with socket.create_connection(("127.0.0.1", here[0].port), 5) as stranger:
            stranger.settimeout(5)
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert stranger.recv(100) == b""
    finally:
        listener.close()
    assert dial_all([ProbeTarget(0, b"s" * 16, here)], 3.0)[0].problem == "connection refused"
