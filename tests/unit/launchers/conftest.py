"""What tests of launchers share: stand-ins for programs, and an order with a code that must be seen nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from guava_nb.launchers.launcher import Order
from guava_nb.protocol.joincode import JoinCode
from tests.support.stand_ins import StandIns


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    return StandIns(tmp_path / "bin", monkeypatch)


@pytest.fixture
def order(tmp_path: Path) -> Order:
    return Order(JoinCode.new("192.0.2.7", 4711), True, 4711, tmp_path / "launched")
