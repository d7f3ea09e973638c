"""Sockets that others opened: found by their addresses, and ended so that their owners lose nothing that they have read."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from guava_nb.transport import foreign


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
        with ours, theirs:
            ours.settimeout(20)
            theirs.settimeout(20)
            yield ours, theirs


def found(sock: socket.socket) -> foreign.Stream:
    return next(one for one in foreign.connections({"127.0.0.1"}) if one[0] == sock.fileno())


@pytest.mark.skipif(not any(folder.exists() for folder in foreign._LISTS), reason="descriptors cannot be listed here")
def test_a_connection_that_is_ended_still_takes_the_answer_to_what_had_come(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """gloo waits for ever for an answer that it could not send."""
    ours, theirs = pair
    theirs.sendall(b"ready")
    assert foreign.shut_down([found(ours)]) == 1
    assert ours.recv(100) == b"ready"
    ours.sendall(b"the answer")
    assert ours.recv(100) == b""  # now its owner knows, and closes it
    ours.close()
    assert (theirs.recv(100), theirs.recv(100)) == (b"the answer", b"")


@pytest.mark.skipif(not any(folder.exists() for folder in foreign._LISTS), reason="descriptors cannot be listed here")
def test_a_number_that_is_another_connection_by_now_is_left_alone(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    number, here, there = found(ours)
    assert foreign.shut_down([(number, there, here)]) == 0
    theirs.sendall(b"more")
    assert ours.recv(100) == b"more"
