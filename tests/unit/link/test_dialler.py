"""Pauses between two dials, and what a dialler refuses."""

from __future__ import annotations

import pytest

from guava_nb.errors import ConfigError
from guava_nb.link.dialler import Backoff, dial
from guava_nb.protocol.joincode import JoinCode

pytestmark = pytest.mark.timeout(30)


def test_pauses_between_attempts_grow_and_are_forgotten() -> None:
    backoff = Backoff()
    now, attempts = 1000.0, 0
    assert backoff.next_s(now) == 0
    while now < 1060.0:
        pause_s = backoff.next_s(now)
        assert 0.04 < pause_s <= 3.0
        now += pause_s
        attempts += 1
    assert 20 < attempts < 100  # a tunnel counts connections per minute
    assert backoff.next_s(now + 60) == 0


def test_an_identity_of_another_length() -> None:
    with pytest.raises(ConfigError, match="32 bytes, not 3"):
        dial(JoinCode.new("127.0.0.1", 9), lambda event: None, identity=b"abc")
