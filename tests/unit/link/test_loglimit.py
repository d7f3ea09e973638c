"""Log lines are limited and counted."""

from __future__ import annotations

import logging

import pytest

from guava_nb.link.loglimit import LogLimit

pytestmark = pytest.mark.timeout(30)


def test_log_lines_are_limited_and_counted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    monkeypatch.setattr("guava_nb.link.loglimit.time.monotonic", lambda: now[0])
    limit = LogLimit(logging.getLogger("test"), lines=3, window_s=10)
    for number in range(100):
        limit.warning("line %d", number)
    assert [record.message for record in caplog.records] == ["line 0", "line 1", "line 2"]
    now[0] = 11.0
    limit.warning("later")
    assert [record.message for record in caplog.records[3:]] == [
        "97 more lines like the ones before were left out",
        "later",
    ]
