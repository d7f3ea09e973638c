"""A program's calls of torch get the group that stands, and torch's functions come back."""

from __future__ import annotations

import sys
import types
from datetime import timedelta

import pytest
import torch.distributed as dist

from guava_nb.backend.led_group import LedGroup, environment
from guava_nb.errors import ConfigError


def test_functions_are_led_and_come_back_also_where_they_were_imported_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs, made, told = (dist.init_process_group, dist.new_group), list[timedelta](), list[str]()
    monkeypatch.setattr(dist, "is_initialized", lambda: bool(made))
    led = LedGroup(1, 2, "guava", made.append, told.append)
    led.form(timedelta(seconds=5))
    led.lead()
    late = types.ModuleType("guava_test_late")
    monkeypatch.setitem(sys.modules, late.__name__, late)
    late.init_process_group = dist.init_process_group  # type: ignore[attr-defined]
    try:
        with pytest.raises(ConfigError, match=r"rank=0, world_size=-1\), but it was started as rank 1 of 2"):
            dist.init_process_group("gloo", rank=0)
        dist.init_process_group("nccl", rank=1, world_size=2)
        assert told == ["backend: guava (the script asked for nccl)"] and len(made) == 1
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group()
        made.clear()  # it destroyed its group, and asks for another one
        dist.init_process_group(timeout=timedelta(seconds=7))
        assert made == [timedelta(seconds=7)]
    finally:
        led.give_back()
    assert (dist.init_process_group, dist.new_group) == theirs
    assert late.init_process_group is theirs[0]  # type: ignore[attr-defined]


def test_the_environment_is_a_launcher_s() -> None:
    found = environment(3, 4, 1, 2)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("3", "4", "1", "2")
    assert {"MASTER_ADDR", "MASTER_PORT"} <= found.keys()
