"""How long a dialler waits for the TCP connection alone: a port that swallows what comes is answered within 5 s."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from guava_nb.errors import LinkTimeout
from guava_nb.link import handshake
from guava_nb.link.handshake import attach
from guava_nb.link.options import LinkOptions
from guava_nb.protocol.joincode import JoinCode
from guava_nb.protocol.messages import Attach

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
