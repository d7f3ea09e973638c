"""What a worker does before its first run is there."""

from __future__ import annotations

import importlib
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from guava_nb.worker import preparation
from guava_nb.worker.preparation import warm_up
from tests.support.links import eventually


def test_a_gpu_is_started_on_a_thread_of_its_own_and_a_processor_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[torch.device, str]] = []

    def ones(*shape: int, device: torch.device) -> torch.Tensor:
        started.append((device, threading.current_thread().name))
        raise RuntimeError("out of memory")

    loaded: list[str] = []
    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(preparation, "importlib", SimpleNamespace(import_module=loaded.append))
    warm_up(torch.device("cpu"))
    assert not loaded
    warm_up(torch.device("cuda:1"))
    eventually(lambda: started == [(torch.device("cuda:1"), "guava-warm-device")], "no GPU was started")
    assert [importlib.import_module(name) for name in loaded] == [sys.modules["guava_nb.replica.group_replica"]]
