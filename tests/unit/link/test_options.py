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
