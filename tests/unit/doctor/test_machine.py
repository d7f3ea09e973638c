"""Checks of memory, cores and disk, on machines that are made up."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from guava_nb.doctor import Check, machine
from guava_nb.doctor.memory import WORKER_BYTES, Memory


def test_memory_cores_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    memory = Memory(10 * WORKER_BYTES, 4 << 30)
    monkeypatch.setattr(machine, "memory_here", lambda: memory)
    check = machine.check_memory()
    assert check.status == "ok" and check.detail.endswith("of 4.0 GiB free, room for about 10 small workers")
    memory = Memory(2 * WORKER_BYTES - 1, 2 << 30, is_limited=True)
    check = machine.check_memory()
    assert check.status == "warning" and "of 2.0 GiB that this host gives free, room for about 1 small" in check.detail

    monkeypatch.setattr(machine, "allowed_cores", lambda: 1)
    assert machine.check_cores().status == "warning"
    monkeypatch.setattr(machine, "allowed_cores", lambda: 2)
    assert machine.check_cores() == Check("cores", "ok", "2")

    monkeypatch.setattr(machine.shutil, "disk_usage", lambda place: types.SimpleNamespace(free=5 << 30))
    assert machine.check_disk(tmp_path) == Check("disk", "ok", f"5.0 GiB free in {tmp_path}")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda place: types.SimpleNamespace(free=1 << 20))
    assert machine.check_disk(tmp_path).status == "warning"
