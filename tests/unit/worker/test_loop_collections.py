from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from guava_nb.worker.loop import WorkerLoop


@pytest.mark.parametrize(("formed_in", "parallel", "times"), [(-1, None, 0), (4, None, 1), (-1, "a mesh", 1)])
def test_garbage_is_collected_only_behind_a_model_that_was_spread(formed_in: int, parallel: Any, times: int) -> None:
    """A collection takes a tenth of a second, and one model of one worker is freed without it."""
    seat: Any = SimpleNamespace(formed_in=formed_in, leave=lambda: None)
    loop = WorkerLoop(lambda message, buffers: None, torch.device("cpu"), seat=seat)
    run: Any = SimpleNamespace(replica=mock.Mock(), spec=SimpleNamespace(parallel=parallel))
    loop._run = run
    with mock.patch("guava_nb.worker.loop.gc.collect") as collect:
        loop._forget()
        assert (collect.call_count, loop._run) == (times, None)
