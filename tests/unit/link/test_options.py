"""Settings of a link that cannot work."""

from __future__ import annotations

import pytest

from guava_nb.errors import ConfigError
from guava_nb.link.options import LinkOptions

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    "bad", [{"heartbeat_s": 0}, {"window_bytes": 0}, {"max_unauthenticated": 0}, {"heartbeat_s": 5, "silence_s": 8}]
)
def test_options_that_cannot_work(bad: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        LinkOptions(**bad)


def test_a_peer_that_is_not_believed_may_have_a_usual_window_unread() -> None:
    assert LinkOptions().most_unread_bytes is None
    for window, most in ((1 << 20, 256 << 20), (1 << 30, 1 << 30)):
        assert LinkOptions(window_bytes=window, payload_of=lambda session, message: 0).most_unread_bytes == most
