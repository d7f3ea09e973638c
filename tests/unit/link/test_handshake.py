"""How long a dialler waits for the TCP connection alone: a port that swallows what comes is answered within 5 s.

And what a peer says of the connection has nothing in it that a terminal obeys.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from guava_nb.errors import LinkTimeout
from guava_nb.link import handshake
from guava_nb.link.handshake import Deadline, attach, receive_record, send_record
from guava_nb.link.options import LinkOptions
from guava_nb.protocol.framing import UNSEQUENCED, Decoder, OutgoingMessage
from guava_nb.protocol.joincode import JoinCode
from guava_nb.protocol.messages import Attach, Goodbye, InstallPackages, Message, channel_of
from guava_nb.transport.memory import memory_pair
from tests.support.hostile_text import hostile, obeyed

CODE = JoinCode.new("10.0.0.7", 4242, b"f" * 16)
RECORD = Attach(session_id=bytes(16), identity=bytes(32), purpose="control", incarnation=0, received={})


@pytest.mark.parametrize(
    ("set_s", "left_s", "wanted_s"), [(10.0, 10.0, 4.0), (60.0, 60.0, 24.0), (0.7, 0.7, 0.7), (10.0, 2.0, 2.0)]
)
def test_a_port_that_swallows_is_given_up_early(
    set_s: float, left_s: float, wanted_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def connect(host: str, port: int, timeout_s: float, options: object) -> None:
        asked.append(timeout_s)
        raise LinkTimeout("nothing came")

    monkeypatch.setattr(handshake, "connect", connect)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    with pytest.raises(LinkTimeout):
        attach(CODE, RECORD, replace(LinkOptions(), connect_timeout_s=set_s), left_s)
    assert asked == [pytest.approx(wanted_s)]


@pytest.mark.parametrize("record", sorted(UNSEQUENCED, key=lambda one: one.NUMBER), ids=lambda one: one.__name__)
def test_what_a_peer_says_before_a_session_stands_is_clean(record: type[Message]) -> None:
    ours, theirs = memory_pair()
    send_record(theirs, hostile(record))
    arrived, _ = receive_record(ours, Decoder(), Deadline(10.0, "speak", "it"))
    assert type(arrived.message) is record and obeyed(arrived.message) == []


def test_messages_of_the_session_stay_as_they_came() -> None:
    """They may be code; who takes a worker's cleans them."""
    ours, theirs = memory_pair()
    code = hostile(InstallPackages)
    sent = b"".join(
        bytes(part)
        for message, sequence in ((Goodbye("\a"), 0), (code, 1))
        for frame in OutgoingMessage(message, channel_of(message), sequence).frames()
        for part in frame
    )
    theirs.send_all((sent,))
    first, rest = receive_record(ours, Decoder(), Deadline(10.0, "speak", "it"))
    assert first.message == Goodbye("\N{REPLACEMENT CHARACTER}") and [one.message for one in rest] == [code]
