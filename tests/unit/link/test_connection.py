"""A connection's last words reach the session without what a terminal obeys."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from guava_nb.link.connection import Connection
from guava_nb.link.handshake import send_record
from guava_nb.link.options import LinkOptions
from guava_nb.link.session import Session, _cause_of
from guava_nb.protocol.framing import Decoder
from guava_nb.protocol.messages import Goodbye, Refused
from guava_nb.protocol.state import Role
from guava_nb.transport.memory import memory_pair
from tests.support.hostile_text import hostile, obeyed

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("record", [Goodbye, Refused])
def test_the_last_words_of_a_peer_are_clean(record: Any) -> None:
    ours, theirs = memory_pair()
    over = threading.Event()
    lane = Session(b"s" * 16, b"i" * 32, "somewhere", LinkOptions(), lambda event: None)._lanes["control"]
    connection = Connection(
        ours, Decoder(), Role.LISTENER, lane, LinkOptions(), lambda *_: None, lambda connection: over.set()
    )
    with lane.lock:
        lane.connection = connection
    connection.start()
    send_record(theirs, hostile(record))
    assert over.wait(20.0)
    said = connection.cause if connection.goodbye is None else _cause_of(connection.goodbye, "worker")
    assert "]52;c;bHM=" in str(said) and obeyed(str(said)) == []
