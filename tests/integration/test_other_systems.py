"""The orchestrator's side with no more than Windows has: no fork, few signals, no modes, locked files, spawned loaders."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from guava_nb import DistributedConfig, NetworkWorker, Orchestrator
from guava_nb.cli.pasting import PastedLines
from guava_nb.cluster.session_file import SavedSession, SessionFile
from guava_nb.data import loader_wrappers
from guava_nb.errors import ConfigError
from guava_nb.processes.nursery import begin_nursery, find_nursery
from guava_nb.worker.user_code import cell_runner
from tests.support.processes import eventually

CELL = """
from torch import nn

def Net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
"""


class Locked:
    """`os.replace` of a system where each file is being read at first."""

    def __init__(self) -> None:
        self.asked: dict[str, int] = {}

    def replace(self, partial: Path, path: Path) -> None:
        self.asked[str(partial)] = self.asked.get(str(partial), 0) + 1
        if self.asked[str(partial)] < 3:
            raise PermissionError(13, "The process cannot access the file because it is being used by another process")
        os.replace(partial, path)


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> Locked:
    if os.name != "nt":
        from tests.support.other_system import as_windows

        pytest.importorskip("mypy", reason="mypy brings the stubs of Python's library; it is part of the extra dev")
        made = Locked()
        as_windows(monkeypatch, replace=made.replace)
        return made
    return Locked()


def batches() -> DataLoader[Any]:
    """Loaded by a spawned process, as each is there."""
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return DataLoader(TensorDataset(x, torch.arange(24) % 3), 8, num_workers=1, multiprocessing_context="spawn")


@pytest.mark.timeout(200)
def test_a_run_with_a_process_of_ours_and_one_that_joined(locked: Locked, tmp_path: Path) -> None:
    """Takes some seconds: a worker and a loader are spawned, each with torch."""
    session = tmp_path / "session.json"
    config = DistributedConfig(num_workers=2, precision="fp64", threads_per_worker=1, session_file=str(session))
    with Orchestrator(config) as orch:
        (handle,) = orch.launch_workers(1)
        thread = threading.Thread(target=NetworkWorker(orch.join_code, gpu_id="cpu").connect_and_train, daemon=True)
        thread.start()
        orch.wait_for_workers(2, timeout=120)
        orch.share(CELL, "net")
        orch.register_model("Net")
        options: dict[str, Any] = {"criterion": "CrossEntropyLoss", "optimizer": "SGD", "optimizer_args": {"lr": 0.1}}
        run = orch.start_training(batches(), num_epochs=2, fresh=True, progress=False, **options)
        saved = tmp_path / "saved.pt"
        for _ in range(2):  # the second time over the first
            assert orch.save_checkpoint(saved) == saved
        assert session.exists() and orch.status().workers
    thread.join(60)
    assert not thread.is_alive() and handle.wait(60) and not session.exists()
    assert (len(run.history), run.lost_samples, run.duplicated_samples) == (6, 0, 0)
    model = _plain()
    weights = torch.load(saved, weights_only=True)["model"]
    far = max(float((weights[name] - value).abs().max()) for name, value in model.state_dict().items())
    # It was once 0.68, as if one of both had begun with other weights: other threads of this process may draw random numbers.
    assert far < 1e-9, (far, run.history, threading.enumerate())
    assert os.name == "nt" or set(locked.asked.values()) == {3}


def _plain() -> torch.nn.Module:
    names: dict[str, Any] = {}
    exec(CELL, names)
    torch.manual_seed(0)
    model = names["Net"]().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = batches().dataset.tensors  # type: ignore[attr-defined]
    for _ in range(2):
        for rows in range(0, 24, 8):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[rows : rows + 8]), y[rows : rows + 8]).backward()
            optimizer.step()
    return model


def test_two_sessions_hold_two_files(locked: Locked, tmp_path: Path) -> None:
    first, second = (SessionFile.take(tmp_path / "session.json") for _ in range(2))
    assert (first.path.name, second.path.name) == ("session.json", "session-2.json")
    first.save(kept := SavedSession(bytes(16), b"", b"", 1234))
    assert first.load() == kept
    for one in (first, second):
        one.release(forget=True)
    assert not first.path.exists()
    again = SessionFile.take(tmp_path / "session.json")
    assert again.path == first.path
    again.release(forget=True)


def test_no_nursery_begins(locked: Locked) -> None:
    begin_nursery(["never"], {})
    assert find_nursery({}) is None


def test_a_data_set_of_a_cell_is_refused_without_advice_to_fork(
    locked: Locked, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OfACell(TensorDataset):
        __module__ = "__main__"

    monkeypatch.setattr(loader_wrappers.multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)  # as in a kernel
    loader = DataLoader(OfACell(torch.zeros(2)), num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(ConfigError, match="cannot import .*OfACell") as refused:
        loader_wrappers.check_spawned(loader)
    assert "'fork'" not in str(refused.value)


def test_an_interrupt_ends_a_cell_at_a_worker(locked: Locked) -> None:
    calls, began = cell_runner.Interruptible(), threading.Event()

    def call() -> None:
        began.set()
        until = time.monotonic() + 30
        while time.monotonic() < until:
            time.sleep(0.01)

    def interrupt() -> None:
        began.wait(30)
        calls.interrupt()

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        calls.run(call)


def test_a_pasted_code_is_read_from_a_pipe(locked: Locked, monkeypatch: pytest.MonkeyPatch) -> None:
    out, into = os.pipe()
    with os.fdopen(out) as pipe, os.fdopen(into, "w") as writer:
        monkeypatch.setattr("sys.stdin", pipe)
        lines = PastedLines(lambda line: True)
        writer.write("guava1:code\n")
        writer.flush()
        found: list[str] = []
        eventually(lambda: found.extend(lines.take()) or found, 20, "the line is read")
        assert found == ["guava1:code"]
        lines.close()
        writer.write("the reader waits for a last line\n")
