"""The next shard under way while the present one computes: told with a stand-in for the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from guava_nb.replica.preprocess import place
from guava_nb.worker.device_prefetch import DevicePrefetch, copier_for


class Slow:
    """Copies when it is let; remembers what it did, and on which thread."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.log: list[str] = []
        self.threads: set[int] = set()
        self.fails = False

    def copy(self, parts: Any) -> Any:
        self.threads.add(threading.get_ident())
        self.log.append(f"copy {parts}")
        assert self.go.wait(10)
        if self.fails:
            raise torch.OutOfMemoryError("no memory for one more")
        return parts

    def arrived(self, copied: Any) -> str:
        self.log.append(f"arrived {copied}")
        return f"on the device: {copied}"


def give(value: str, log: list[str]) -> Callable[[], str]:
    def load() -> str:
        log.append(f"load {value}")
        return value

    return load


def test_the_copy_goes_on_while_the_caller_works_and_is_taken_once() -> None:
    copier = Slow()
    ahead = DevicePrefetch(copier)
    assert ahead.take("a", give("a", copier.log)) == "a"  # nothing was begun
    ahead.begin("b", give("b", copier.log))  # returns although the copy cannot end yet
    ahead.begin("b", give("b", copier.log))  # asked again: under way already
    copier.go.set()
    assert ahead.take("b", give("b", copier.log)) == "on the device: b"
    assert copier.log == ["load a", "load b", "copy b", "arrived b"]
    assert copier.threads == (copier.threads - {threading.get_ident()})
    assert ahead.take("b", give("b", copier.log)) == "b"
    ahead.close()


def test_another_shard_than_the_one_begun_is_loaded_in_its_turn() -> None:
    copier = Slow()
    copier.go.set()
    ahead = DevicePrefetch(copier)
    ahead.begin("old generation", give("b", copier.log))
    assert ahead.take("new generation", give("c", copier.log)) == "c"
    ahead.close()


def test_what_fails_ahead_is_done_again_in_its_turn() -> None:
    copier = Slow()
    copier.fails = True
    copier.go.set()
    ahead = DevicePrefetch(copier)
    ahead.begin("b", give("b", copier.log))
    assert ahead.take("b", give("b", copier.log)) == "b"

    def damaged() -> str:
        raise ValueError("cannot be unpacked")

    ahead.begin("c", damaged)
    with pytest.raises(ValueError, match="unpacked"):
        ahead.take("c", damaged)
    ahead.close()


def test_on_the_cpu_nothing_is_begun_and_nothing_copied() -> None:
    assert copier_for(torch.device("cpu")) is None
    ahead, batch = DevicePrefetch(None), {"x": torch.ones(3), "text": ["a"]}
    ahead.begin("a", lambda: pytest.fail("loaded ahead for nothing"))
    assert ahead.take("a", lambda: batch) is batch
    assert place(batch, torch.device("cpu")) is batch


def test_closing_leaves_no_thread() -> None:
    before = threading.active_count()
    copier = Slow()
    ahead = DevicePrefetch(copier)
    ahead.begin("a", give("a", copier.log))
    copier.go.set()
    ahead.close()
    assert threading.active_count() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none")
def test_on_cuda_the_batch_arrives_whole_while_the_device_is_busy() -> None:
    device = torch.device("cuda", 0)
    ahead = DevicePrefetch(copier_for(device))
    busy = torch.randn(4096, 4096, device=device)
    for number in range(20):
        batch = {"x": torch.full((3 << 20,), number, dtype=torch.uint8), "y": (torch.tensor(number), "text")}
        ahead.begin(number, lambda batch=batch: batch)
        for _ in range(20):
            busy = torch.tanh(busy @ busy)
        came = ahead.take(number, lambda: pytest.fail("was not brought ahead"))
        assert came["x"].is_cuda and came["y"][0].is_cuda and came["y"][1] == "text"
        assert int(came["x"].sum(dtype=torch.int64)) == number * (3 << 20) and int(came["y"][0]) == number
        del came
    ahead.close()
