"""Real worker processes for tests: a session with its workers, each behind a relay of its own if wanted, and traps.

A trap stops a worker at an exact place of an exact step: the shared cell looks for a file named after its process and
does what stands there. So a test knows where a worker is when it kills, stops or cuts it, and never sleeps to be right.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from guava_nb import DistributedConfig, Orchestrator
from guava_nb.processes.local_workers import WorkerHandle, launch
from guava_nb.protocol.joincode import JoinCode
from guava_nb.training.run import Run
from tests.support.relay import Link, Relay

ROOT = Path(__file__).resolve().parents[2]

CELL = """
import ctypes, json, os, pathlib, time
import torch
from torch import nn

FOLDER = pathlib.Path({folder!r})
_calls = 0


def checking():
    # The one-step check runs forwards beside the steps; traps are set by the forwards of steps.
    return any(type(mode).__name__ == "WithoutRandomness" for mode in torch.overrides._get_current_function_mode_stack())


def trap(where):
    if checking():
        return None
    try:
        plan = json.loads((FOLDER / f"{{os.getpid()}}.json").read_text())
    except FileNotFoundError:
        return None
    if plan["where"] != where or plan["call"] != _calls:
        return None
    (FOLDER / f"{{os.getpid()}}.reached").touch()
    if plan["do"] == "hold":
        until = time.monotonic() + 30
        while (FOLDER / f"{{os.getpid()}}.json").exists() and time.monotonic() < until:
            time.sleep(0.005)
    elif plan["do"] == "exit":
        print("about to leave without a word")
        os._exit(7)
    elif plan["do"] == "hold the lock":
        ctypes.PyDLL(None).usleep(int(plan["seconds"] * 1e6))  # a PyDLL keeps Python's lock while it is called
    elif plan["do"] == "segfault":
        print("about to touch what is not mine")
        ctypes.string_at(0)
    elif plan["do"] == "raise":
        raise ValueError("this batch is cursed")
    elif plan["do"] == "print":
        for k in range(plan["lines"]):
            print("line", k)
    return plan["do"]


class Net(nn.Module):
    def __init__(self, width=16, dropout=0.0):
        super().__init__()
        self.first = nn.Linear(10, width)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(width, 4)

    def forward(self, x):
        global _calls
        if self.training and not checking():
            _calls += 1
            trap("forward")
        hidden = torch.relu(self.first(x))
        if hidden.requires_grad:
            # Reached after the last layer's gradient is complete (and sent), before the first layer's.
            hidden.register_hook(lambda gradient: trap("backward") and None)
        return self.last(self.drop(hidden))


def loss_fn(outputs, targets):
    loss = nn.functional.cross_entropy(outputs, targets)
    return loss * float("inf") if torch.is_grad_enabled() and trap("loss") == "inf" else loss
"""


def eventually(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Wait until a condition on another process or thread holds; returns what it gave."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"did not happen within {timeout_s:g} s: {what}"
        threading.Event().wait(0.01)
    return found


# ------------------------------------------------------------------------------------------------ the plain oracle


def data(rows: int = 101) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, 10, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 4, (rows,), generator=generator))


def loader(rows: int = 101, batch_size: int = 32, seed: int = 9, dtype: torch.dtype = torch.float64) -> DataLoader[Any]:
    x, y = data(rows).tensors
    order = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(x.to(dtype), y), batch_size=batch_size, shuffle=True, generator=order)


class PlainTraining:
    """One process, whole batches, nothing of ours: what every run is measured against."""

    def __init__(
        self,
        folder: Path,
        batches: Any,
        optimizer: str = "AdamW",
        optimizer_args: dict[str, Any] | None = None,
        dtype: torch.dtype = torch.float64,
        **model_args: Any,
    ) -> None:
        namespace: dict[str, Any] = {"__name__": "oracle"}
        exec(CELL.format(folder=str(folder)), namespace)
        torch.manual_seed(0)
        self.model = namespace["Net"](**model_args).to(dtype)
        self.batches = batches
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), **(optimizer_args or {"lr": 0.01}))
        self.losses: list[float] = []

    def epochs(self, count: int = 1, limit: int | None = None) -> PlainTraining:
        """Train so many epochs, or until `limit` steps of this call are done."""
        done = 0
        self.model.train()
        for _ in range(count):
            for x, y in self.batches:
                if done == limit:
                    return self
                self.optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(self.model(x), y)
                loss.backward()
                self.optimizer.step()
                self.losses.append(float(loss.detach()))
                done += 1
        return self


def difference(a: torch.nn.Module, b: torch.nn.Module) -> float:
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    return max(float((ours[k].double() - theirs[k].double()).abs().max()) for k in ours)


# ------------------------------------------------------------------------------------------------- workers and session


class Worker:
    """A worker process of a test, behind a relay or not."""

    def __init__(self, session: Session, name: str, relayed: bool, identity: bytes | None = None) -> None:
        code = session.through(session.orch.join_code)
        self.relay = Relay(code.port, rate_bytes_s=session.rate_bytes_s) if relayed else None
        if self.relay is not None:
            code = code.with_address("127.0.0.1", self.relay.port)
        self.session, self.folder, self.name = session, session.folder, name
        with pytest.MonkeyPatch.context() as patch:
            if identity is not None:  # another process's, as when a machine was cloned
                patch.setattr("guava_nb.processes.local_workers.secrets.token_bytes", lambda count: identity)
            self.handle: WorkerHandle = session.launch(code, name)

    @property
    def pid(self) -> int:
        return self.handle.pid

    @property
    def _plan(self) -> Path:
        return self.folder / f"{self.pid}.json"

    @property
    def _reached(self) -> Path:
        return self.folder / f"{self.pid}.reached"

    def trap(self, where: str, call: int, do: str = "hold", **more: Any) -> None:
        """Lay a trap at its `call`-th shard of the coming run."""
        self.release()
        partial = self._plan.with_suffix(".partial")
        partial.write_text(json.dumps({"where": where, "call": call, "do": do, **more}))
        os.replace(partial, self._plan)

    def wait_trapped(self, timeout_s: float = 40) -> None:
        eventually(self._reached.exists, timeout_s, f"{self.name} reaches its trap")

    def release(self) -> None:
        self._plan.unlink(missing_ok=True)
        self._reached.unlink(missing_ok=True)

    def link(self, lane: str) -> Link:
        """The relay's link that carries a lane now: only the session knows which one that is."""
        assert self.relay is not None
        cluster = self.session.orch._cluster
        assert cluster is not None
        rank = next(m.rank for m in cluster.members() if m.name == self.name and m.alive)
        held = cluster.session(rank)
        assert held is not None
        connection = held._lanes[lane].connection
        assert connection is not None, f"{self.name} has no {lane} connection now"
        return next(link for link in self.relay.links if link.address == connection.peer)

    def close(self) -> None:
        self.release()
        self.handle.close()
        if self.relay is not None:
            self.relay.__exit__()


class Session:
    """An orchestrator and its workers; `ensure` replaces those that a test has killed.

    Attributes:
        through: what workers make of the orchestrator's code, where they come another way.
        rate_bytes_s: of each worker's relay, each way; None is as fast as it gets.
    """

    def __init__(self, folder: Path, relayed: bool = False, rate_bytes_s: float | None = None, **settings: Any) -> None:
        self.through: Callable[[JoinCode], JoinCode] = lambda code: code
        config = DistributedConfig(precision="fp64", bucket_mb=0.001, threads_per_worker=1, **settings)
        self.orch = Orchestrator(config)
        self.folder, self.rate_bytes_s = folder, rate_bytes_s
        self.workers: list[Worker] = []
        self._relayed = relayed
        self._number = 0
        self.orch.open()

    def ensure(self, count: int) -> list[Worker]:
        """Have exactly `count` workers; returns them in order of rank."""
        for worker in [w for w in self.workers if not w.handle.alive]:
            worker.close()
            self.workers.remove(worker)
        for worker in self.workers:
            worker.release()
        while len(self.workers) > count:
            self.workers.pop().close()
        while len(self.workers) < count:
            self._number += 1
            self.workers.append(Worker(self, f"w{self._number}", self._relayed))
        eventually(lambda: len(self.ready()) == count, 90, f"{count} workers are here; there are {self.ready()}")
        by_name = {worker.name: worker for worker in self.workers}
        return [by_name[name] for name in self.ready()]

    def launch(self, code: JoinCode, name: str) -> WorkerHandle:
        """Start a worker's process."""
        return launch(code, "cpu", name, 1, self.orch.log_folder)

    def ready(self) -> list[str]:
        return [w.name for w in self.orch.status().workers if w.state in ("ready", "working")]

    def state_of(self, name: str) -> str:
        return [w.state for w in self.orch.status().workers if w.name == name][-1]

    def train(self, batches: Any, epochs: int = 2, cell: str | None = None, **options: Any) -> Run:
        """Train the trapped net from its beginning."""
        self.orch.share(CELL.format(folder=str(self.folder)) if cell is None else cell, "net")
        self.orch.register_model(options.pop("model", "Net"), options.pop("model_args", None))
        given = {
            **({} if "step" in options else {"criterion": "loss_fn"}),
            "optimizer": "AdamW",
            "optimizer_args": {"lr": 0.01},
            "fresh": options.get("resume") is None,
            "progress": False,
            **options,
        }
        return self.orch.start_training(batches, num_epochs=epochs, **given)

    def wait_sent_ahead(self, worker: Worker, run: Run) -> None:
        """Wait until a lone worker that stands still has at least three shards more than it has done."""
        cluster = self.orch._open_cluster()
        (rank,) = cluster.roster.ready()
        sent = eventually(
            lambda: run.feeding().in_flight[rank][0] >= 3 and cluster.seats.total_bytes(rank)[0],
            20,
            "more shards are sent",
        )
        eventually(lambda: worker.handle.status().figures.in_bytes >= sent, 20, "they have arrived")

    def assert_undisturbed(self, run: Run, plain: PlainTraining) -> None:
        """The run equals plain PyTorch on the same batches, each sample committed once."""
        assert run.wait(60), run
        run.result()
        assert len(run.history) == len(plain.losses)
        gap = max(abs(record["loss"] - loss) for record, loss in zip(run.history, plain.losses, strict=True))
        assert gap <= 1e-12
        assert difference(run.model(), plain.model) <= 1e-9
        assert (run.lost_samples, run.duplicated_samples) == (0, 0)

    def close(self) -> None:
        for worker in self.workers:
            worker.release()
        self.orch.close()
        for worker in self.workers:
            worker.close()
        shutil.rmtree(self.orch.log_folder, ignore_errors=True)
