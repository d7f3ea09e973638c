"""Who asks for the wheel gets its bytes and no more; nothing is handed out before it is offered, nor to a crowd."""

from __future__ import annotations

import threading

import pytest

from guava_nb.link import wheel_desk
from guava_nb.link.registry import RefusedJoin
from guava_nb.link.wheel_desk import WheelDesk
from guava_nb.transport.memory import memory_pair


def test_it_sends_the_bytes_as_they_are_and_waits_until_the_visitor_closes() -> None:
    desk, wheel = WheelDesk(), bytes(range(256)) * 40
    with pytest.raises(RefusedJoin, match="this session offers no wheel"):
        desk.serve(memory_pair()[0])
    desk.offer(wheel)
    ours, theirs = memory_pair()
    serving = threading.Thread(target=desk.serve, args=(ours,))
    serving.start()
    came, view = b"", memoryview(bytearray(4096))
    while len(came) < len(wheel):
        came += bytes(view[: theirs.recv_into(view)])
    assert came == wheel and serving.is_alive()
    theirs.close()
    serving.join(10)
    assert not serving.is_alive()


def test_a_crowd_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel_desk, "_SEATS", 0)
    desk = WheelDesk()
    desk.offer(b"wheel")
    with pytest.raises(RefusedJoin, match="other notebooks are fetching the wheel"):
        desk.serve(memory_pair()[0])
