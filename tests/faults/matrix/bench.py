"""Runs the cells of the matrix on worker processes that stay from one cell to the next, and says what came of each.

All limits of time are 1/7.5 of their defaults, so that a stop of 5 s is one of 0.67 s beside a silence of 2 s, and one of
60 s outlasts silence and grace (45 s, here 6 s): where no process speaks for the worker its seat is given up meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import torch
from torch.utils.data import DataLoader, TensorDataset

from guava_nb.errors import GuavaError
from guava_nb.processes.local_workers import WorkerHandle, launch
from guava_nb.protocol.joincode import JoinCode
from guava_nb.sync import group_replica_set
from guava_nb.training.run import Run
from tests.faults.matrix.cells import ENDS, LINKS, MODES, NANS, RAISES, REPLACED, STEP, STOPS, Cell, expected
from tests.faults.matrix.injection import PLAN
from tests.support.processes import Session, Worker, eventually
from tests.support.relay import DOWN, UP

__all__ = ["Bench", "Outcome"]

SCALE = 7.5
SILENCE_S, GRACE_S, SHORT_STOP_S, LONG_STOP_S = 15 / SCALE, 30 / SCALE, 5 / SCALE, 60 / SCALE
ROWS, BATCH, EPOCHS = 30, 10, 2
LIMIT_S = 40.0
TOLERANCE = 1e-12
NOT_FIRED = "the fault did not fire"

CELL = """
import torch
from torch import nn
from tests.faults.matrix.injection import at


class Block(nn.Module):
    def __init__(self, rows, columns):
        super().__init__()
        self.linear = nn.Linear(rows, columns)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if at("forward") == "nan in buffer":
            self.seen.fill_(float("nan"))
        out = torch.relu(self.linear(x))
        if out.requires_grad:
            out.register_hook(lambda g: g * float("nan") if at("backward") == "nan in gradient" else None)
        return out


def Deep():
    return nn.Sequential(Block(10, 16), Block(16, 16), Block(16, 16), nn.Linear(16, 4))


class At:
    def step(self, closure=None):
        at("own optimizer")
        return super().step(closure)


class OwnAdamW(At, torch.optim.AdamW):
    pass


class OwnSGD(At, torch.optim.SGD):
    pass


def loss_fn(outputs, targets):
    loss = nn.functional.cross_entropy(outputs, targets)
    return loss * float("nan") if at("loss") == "nan in loss" else loss
"""

#: Which connection, and which way, carries the bytes that a phase waits for.
_WAYS = {
    "join": ("control", UP), "source": ("control", UP), "batch received": ("bulk", UP), "forward": ("bulk", UP),
    "backward": ("bulk", UP), "bucket half sent": ("bulk", UP), "waiting for the sum": ("bulk", DOWN),
    "checkpoint": ("bulk", UP),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------- plain PyTorch


def batches() -> DataLoader[Any]:
    """The same batches in every run."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, 10, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (ROWS,), generator=generator)
    return DataLoader(TensorDataset(x, y), BATCH, shuffle=True, generator=torch.Generator().manual_seed(9))


def held_out() -> DataLoader[Any]:
    return DataLoader(batches().dataset, 5)


@functools.cache
def plain(steps: int, optimizer_name: str = "AdamW", lr: float = 0.01) -> tuple[torch.nn.Module, list[float]]:
    """One process, whole batches, nothing of ours."""
    namespace: dict[str, Any] = {"__name__": "oracle"}
    exec(CELL, namespace)
    torch.manual_seed(0)
    model = namespace["Deep"]().double()
    optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=lr)
    losses: list[float] = []
    loader = batches()
    for batch in (batch for _ in range(EPOCHS) for batch in loader):
        if len(losses) == steps:
            break
        optimizer.zero_grad()
        loss = namespace["loss_fn"](model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return model, losses


@functools.cache
def order() -> list[list[int]]:
    """The ids of the samples of each epoch, in the order of the loader."""
    loader = batches()
    found = []
    for _ in range(EPOCHS):
        iterator = iter(loader)  # draws what a data loader draws
        found.append([i for ids in iterator._sampler_iter for i in ids])  # type: ignore[attr-defined]
    return found


def gap(model: torch.nn.Module, other: torch.nn.Module) -> float:
    ours, theirs = model.state_dict(), other.state_dict()
    if ours.keys() != theirs.keys():
        return float("inf")
    found = max(float((ours[k].double() - theirs[k].double()).abs().max()) for k in ours)
    return found if found == found else float("inf")


# ------------------------------------------------------------------------------------------------------------- a cell


@dataclass(frozen=True)
class Outcome:
    """What came of a cell.

    Attributes:
        kind: "goes on", "halts" or "fault".
        text: what is wrong, or what the error says.
        seconds: it took.
        is_right: it is what was written down.
    """

    kind: str
    text: str
    seconds: float
    is_right: bool


class Bench(Session):
    """An orchestrator, its workers behind relays, and the files through which faults are planned."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            folder, relayed=True, num_workers=2, heartbeat_s=2 / SCALE, silence_s=SILENCE_S, grace_s=GRACE_S, hash_every_steps=1,
            rejoin_timeout_s=30.0,
        )  # fmt: skip
        self.away = mock.patch.object(group_replica_set, "AWAY_LIMIT_S", group_replica_set.AWAY_LIMIT_S / SCALE)
        self.away.start()
        self.waiting: list[Worker] = []  # processes that have loaded everything and are no workers yet

    def close(self) -> None:
        self.away.stop()
        for worker in self.waiting:
            self._end(worker)
        super().close()

    def launch(self, code: JoinCode, name: str) -> WorkerHandle:
        """Start a worker's process by the entry that puts the points around its methods."""

        def start(words: list[str], **how: Any) -> subprocess.Popen[str]:
            how["env"] = {**how["env"], PLAN: str(self.folder / f"{name}.plan")}
            return subprocess.Popen([sys.executable, "-m", "tests.faults.matrix.worker"], **how)

        names = SimpleNamespace(Popen=start, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)
        with mock.patch("guava_nb.processes.local_workers.subprocess", names):
            return launch(code, "cpu", name, 1, self.orch.log_folder, self.orch.config)

    def ensure(self, count: int) -> list[Worker]:
        """Have exactly `count` workers, and a process that may become one more at once."""

        def is_complete() -> bool:
            for worker in list(self.workers):
                seats = [w.state for w in self.orch.status().workers if w.name == worker.name]
                if not worker.handle.alive or (seats and seats[-1] in ("lost", "left")):
                    self.workers.remove(worker)
                    self._end(worker)
            while len(self.workers) > count:
                self._end(self.workers.pop())
            while len(self.workers) < count:
                self.enter()
            seats = self.ready()
            if sorted(seats) != sorted(worker.name for worker in self.workers):
                return False
            self.workers.sort(key=lambda worker: seats.index(worker.name))  # as they joined: so places are given
            return True

        try:
            eventually(is_complete, 60, f"{count} workers are here")
        except AssertionError as error:
            states = [(worker.name, worker.pid, worker.handle.status()) for worker in self.workers]
            for worker in self.workers:
                worker.handle.kill()
            raise AssertionError(f"{error}: {states}") from error
        if not self.waiting:
            self.waiting.append(self._started())
        return self.workers

    @staticmethod
    def _end(worker: Worker) -> None:
        worker.handle.kill()
        worker.close()

    def _started(self) -> Worker:
        self._number += 1
        return Worker(self, f"w{self._number}", True)

    def enter(self) -> None:
        """Let a process that waits become a worker."""
        worker = self.waiting.pop() if self.waiting else self._started()
        self.workers.append(worker)
        (self.folder / f"{worker.name}.gate").touch()

    def run(self, cell: Cell, limit_s: float = LIMIT_S) -> Outcome:
        """Do a run with the fault, and say what came of it.

        Once more where the machine was too busy to keep a link alive, or the worker that was to fail had no part in the step,
        because it was slow and others did its work.
        """
        outcome = self._run(cell, limit_s)
        is_busy = cell.fault not in LINKS + STOPS and any(
            "nothing came from " in text for text in self.orch.status().notes[-8:]
        )
        again = not outcome.is_right and (is_busy or outcome.text.startswith(NOT_FIRED))
        return self._run(cell, limit_s) if again else outcome

    def _run(self, cell: Cell, limit_s: float) -> Outcome:
        started = time.monotonic()
        mode, wanted = MODES[cell.mode], expected(cell.mode, cell.phase, cell.fault)
        try:
            self.ensure(mode.workers)
            with contextlib.ExitStack() as stack:
                attempt = Attempt(self, cell, limit_s)
                stack.callback(attempt.clean)
                problem = attempt.problem_with(wanted)
                kind, text = ("halts" if wanted.halts else "goes on"), problem or attempt.said
        except Exception as error:
            problem = text = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - started
        kind = "fault" if problem else kind
        return Outcome(kind, " ".join(text.split()), seconds, kind != "fault")


class Attempt:
    """One run with one fault."""

    def __init__(self, bench: Bench, cell: Cell, limit_s: float) -> None:
        self.bench, self.cell, self.limit_s = bench, cell, limit_s
        self.mode = MODES[cell.mode]
        self.said = ""
        self._end_copies()
        options = self.mode.options
        self.oracle = (options.get("optimizer", "AdamW"), options.get("optimizer_args", {"lr": 0.01})["lr"])
        self.notes_before = set(bench.orch.status().note_numbers)
        self.strike_error: BaseException | None = None
        self.struck = threading.Event()
        ready = bench.ready()
        self.victim = bench.workers[-1 if self.mode.workers == 1 else 1]
        self.newcomer = bench.waiting[-1].name
        # Of whole replicas any is asked for the state: the first that is asked fires.
        anyone = cell.phase == "checkpoint" and self.mode.elastic
        self.at_home = (cell.phase, cell.fault) == ("checkpoint", "full disk")  # the file is the orchestrator's
        if cell.fault == "nan in input":
            self.victim = bench.workers[0]  # of stages only the first one takes inputs
        self.planned = [self.newcomer] if cell.phase == "join" else ready if anyone else [self.victim.name]
        self._write_plan()
        self._ended = threading.Event()
        self._striker = threading.Thread(target=self._strike, name="matrix-striker", daemon=True)

    def _end_copies(self) -> None:
        """A copy of the last run's state that comes now would reach the place of this run's fault before it begins."""
        sets, cluster = self.bench.orch._replica_sets, self.bench.orch._cluster
        sets.left.wait_no_more()
        if (left := sets.held_by_workers) is not None and left.copy is not None and cluster is not None:
            left.copy.wait(cluster, 10)

    # ------------------------------------------------------------------------------------------------------------- files

    def _file(self, kind: str) -> Path:
        return self.bench.folder / kind

    @property
    def name(self) -> str:
        """The worker at which the fault fired."""
        return str(json.loads(self._file("fired").read_text())["worker"])

    def _write_plan(self) -> None:
        cell = self.cell
        point = {
            "batch received": "work" if cell.fault in RAISES + NANS else "batch",
            "bucket half sent": "bucket", "waiting for the sum": "sum",
            "commit": "schedule" if cell.fault in RAISES else "commit",
        }.get(cell.phase, cell.phase)  # fmt: skip
        if cell.fault == "nan in loss":
            point = "loss"
        if str(self._options().get("optimizer")).startswith("Own"):
            point = "own optimizer"
        step = None if cell.phase in ("join", "source", "validation", "prediction", "leave") else STEP
        self._remove("claim", "fired", "go")
        record = {"point": point, "step": step, "fault": cell.fault}
        for name in () if self.at_home else self.planned:
            partial = self._file("partial")
            partial.write_text(json.dumps(record))
            os.replace(partial, self._file(f"{name}.plan"))

    def _remove(self, *kinds: str) -> None:
        for kind in kinds:
            self._file(kind).unlink(missing_ok=True)

    def _options(self) -> dict[str, Any]:
        """Options of the run, so that the user's own code runs where it is to raise."""
        phase, raises = self.cell.phase, self.cell.fault in RAISES
        if phase == "optimizer" and raises and self.cell.fault != "out of memory":  # memory torch's own ones lack, too
            return {**self.mode.options, "optimizer": f"Own{self.oracle[0]}"}
        if phase == "commit" and raises:
            return {**self.mode.options, "scheduler": "StepLR", "scheduler_args": {"step_size": 1000}}
        return self.mode.options

    def clean(self) -> None:
        """Leave workers that stand, and no plan."""
        self._ended.set()
        self._remove(*(f"{name}.plan" for name in self.planned))
        self._file("go").touch()
        if self._striker.is_alive():
            self._striker.join(10)
        spoilt = self.name if self._file("fired").exists() else ""
        for worker in list(self.bench.workers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGCONT)
            if worker.name == spoilt and self.cell.fault in (*REPLACED, "context death"):
                self.bench.workers.remove(worker)  # so that the next cell waits until its seat is given up, too
                self.bench._end(worker)

    # ------------------------------------------------------------------------------------------------- the other side's part

    def _strike(self) -> None:
        """Do what the fault needs beside the worker, once it has said that it is there."""
        try:
            while not self._file("fired").exists():
                if self._ended.wait(0.003):
                    return
            workers = self.bench.workers
            found = eventually(
                lambda: [w for w in list(workers) if w.name == self.name], 10, "it is one of the workers"
            )
            self._act(found[0])
            self.struck.set()
        except BaseException as error:
            self.strike_error = error
        finally:
            self._file("go").touch()

    def _act(self, worker: Worker) -> None:
        fault, phase = self.cell.fault, self.cell.phase
        if (
            (not self.mode.elastic or self.mode.workers == 1)
            and phase not in ("join", "prediction")
            and (fault in ENDS + REPLACED or phase == "leave")
        ):
            self.bench.enter()  # a mesh of a fixed size, or a run without workers, needs one for the place
        if fault in STOPS:
            process = psutil.Process(worker.pid)
            eventually(lambda: process.status() == psutil.STATUS_STOPPED, 10, "the worker is stopped")
            until = time.monotonic() + (
                SHORT_STOP_S if fault == "SIGSTOP 5 s" else LONG_STOP_S
            )  # the length of the fault itself
            while time.monotonic() < until and not self._is_given_up(worker):
                time.sleep(0.02)
            os.kill(worker.pid, signal.SIGCONT)
        elif fault == "deadlock" and not self.mode.spares and phase != "join":
            told = f"waits for {worker.name} since"  # so a person knows which process to end
            eventually(lambda: self._ended.is_set() or any(told in note for note in self._notes()), 20, told)
            worker.handle.kill()
        elif fault == "silence":
            assert worker.relay is not None
            for link in list(worker.relay.links):
                link.stall()
        elif fault in LINKS:
            lane, way = _WAYS.get(self.cell.phase, ("control", UP))
            assert worker.relay is not None
            link = worker.relay.links[0] if self.cell.phase == "join" else worker.link(lane)
            some = (
                7
                if fault == "cut in mid-frame"
                else random.Random(str(self.cell)).randrange(1, 60 if lane == "control" else 1500)
            )
            link.cut_at(way, link.bytes[way] + some, reset=fault != "cut in mid-frame")
            self.link = link

    def _is_given_up(self, worker: Worker) -> bool:
        if self.cell.phase == "join":  # it has not said hello, so it has no seat: its connections are ended
            assert worker.relay is not None
            return all(link.is_cut.is_set() for link in worker.relay.links)
        return self.bench.state_of(worker.name) in ("lost", "left")

    # --------------------------------------------------------------------------------------------------------- the run

    def problem_with(self, wanted: Any) -> str:
        """Do it all; return what is not as written down."""
        if not self.at_home:
            self._striker.start()
        run, error = self._train()
        if run is None:
            return f"did not end within {self.limit_s:g} s"
        fired = self._file("fired")
        if not fired.exists():
            return f"{NOT_FIRED}; {error!r}"
        if not self.at_home:
            self._striker.join(30)
            if self.strike_error is not None or not self.struck.is_set():
                return f"the fault was not carried out: {self.strike_error}"
        if self.cell.fault in LINKS[:1] + LINKS[2:]:
            eventually(self.link.is_cut.is_set, 10, "the connection was cut")
        return self._compare(run, error, wanted)

    def _train(self) -> tuple[Run | None, BaseException | None]:
        mode, bench, cell = self.mode, self.bench, self.cell
        bench.orch.set_mode(mode.name, **mode.settings)
        self.path = bench.folder / "matrix.pt"
        self.path.unlink(missing_ok=True)
        with self._full_disk():
            run = bench.train(
                batches(), EPOCHS, CELL, model="Deep", criterion="loss_fn", val_loader=held_out(), callbacks=[self], detach=True,
                **self._options(),
            )  # fmt: skip
            self.job = bench.orch._job
            if not run.wait(self.limit_s):
                told = f"{self.strike_error!r} on the other side; {run.status()!r}"
                run.interrupt()
                run.interrupt()
                run.wait(10)
                raise AssertionError(f"hangs: {told}")
        try:
            run.result()
            if cell.phase == "prediction":
                self.outputs = bench.orch.predict(held_out(), raw=True, progress=False)["outputs"]
        except Exception as error:
            return run, error
        return run, None

    @contextlib.contextmanager
    def _full_disk(self) -> Iterator[None]:
        if not self.at_home:
            yield
            return

        def save(content: Any, sink: Any) -> None:
            sink.write(b"some of it")
            self._file("fired").write_text('{"worker": ""}')
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with mock.patch.object(torch, "save", save):
            yield

    def on_step(self, run: Run, record: dict[str, Any]) -> None:
        """Join and leave between two steps; save a checkpoint after one."""
        phase, bench = self.cell.phase, self.bench
        if phase == "join" and record["step"] == 2:
            bench.enter()
            eventually(self._file("fired").exists, 20, "the newcomer is at the place of its fault")
        elif phase == "leave" and record["step"] == 2:
            self.victim.handle.leave()
        elif phase == "checkpoint" and record["step"] == STEP + 1:
            bench.orch.save_checkpoint(self.path)

    # --------------------------------------------------------------------------------------------------------- comparing

    def _notes(self) -> list[str]:
        """What was told since this began."""
        status = self.bench.orch.status()
        told = zip(status.note_numbers, status.notes, strict=True)
        return [text for number, text in told if number not in self.notes_before]

    def _compare(self, run: Run, error: BaseException | None, wanted: Any) -> str:
        with contextlib.suppress(AssertionError):  # told by another thread
            eventually(lambda: wanted.told in "\n".join(self._notes()), 5, wanted.told)
        notes = self._notes()
        problems = [*self._of_error(error, wanted), *self._of_samples(run, wanted)]
        problems += [f"no notice says {wanted.told!r}: {notes}"] if wanted.told not in "\n".join(notes) else []
        model, losses = plain(wanted.steps, *self.oracle)
        if len(run.history) == wanted.steps:
            worst = max([abs(r["loss"] - loss) for r, loss in zip(run.history, losses, strict=True)], default=0.0)
            problems += [f"losses differ by {worst:.1e}"] if not worst <= TOLERANCE else []
            difference = gap(run.model(), model)
            odd = [name for name, value in run.model().state_dict().items() if not value.isfinite().all()]
            problems += [f"weights differ by {difference:.1e} {odd}"] if difference > TOLERANCE else []
        else:
            problems.append(f"{len(run.history)} steps count, not {wanted.steps}")
        if not problems and not error:
            problems += self._of_passes(run, model)
        return "; ".join(problems)

    def _of_error(self, error: BaseException | None, wanted: Any) -> list[str]:
        self.said = f"{type(error).__name__}: {error}" if error else ""
        if not wanted.halts:
            return [f"it halts: {self.said}"] if error else []
        if error is None:
            return ["it goes on"]
        if not isinstance(error, GuavaError):
            return [f"no error of ours: {self.said}"]
        words = [wanted.halts, *([self.name] if wanted.names_worker else [])]
        lacking = [word for word in words if word.lower() not in self.said.lower()]
        unit = "round" if self.cell.mode == "local" else "step"
        if wanted.names_step and not re.search(rf"\b{unit} {STEP + 1}\b", self.said):
            lacking.append(f"{unit} {STEP + 1}")
        return [f"the error does not say {lacking}: {self.said}"] if lacking else []

    def _of_samples(self, run: Run, wanted: Any) -> list[str]:
        """The log of samples, against the loader's own order."""
        ledger, ids = self.job.accounting._ledger, order()
        found = [i for epoch in sorted(ledger._committed) for i in ledger._committed[epoch]]
        right = [i for epoch in ids for i in epoch][: wanted.steps * BATCH]
        problems = [] if found == right else [f"committed were {found}, not {right}"]
        counts = (run.lost_samples, run.duplicated_samples)
        return problems + ([] if counts == (0, 0) else [f"{counts[0]} samples lost, {counts[1]} doubled"])

    def _of_passes(self, run: Run, model: torch.nn.Module) -> list[str]:
        problems = []
        x, y = batches().dataset.tensors  # type: ignore[attr-defined]
        with torch.no_grad():
            outputs = model.eval()(x)
            loss = float(torch.nn.functional.cross_entropy(outputs, y))
        model.train()
        scores = run.validations
        if [v["samples"] for v in scores] != [ROWS] * EPOCHS or abs(scores[-1]["loss"] - loss) > TOLERANCE:
            problems.append(f"validations differ: {scores}, not {loss}")
        if self.cell.phase == "prediction" and not torch.allclose(
            torch.as_tensor(self.outputs), outputs, rtol=0, atol=TOLERANCE
        ):
            problems.append("predictions differ")
        if self.at_home:
            problems += [f"{self.path} was left half written"] if self.path.exists() else []
        elif self.cell.phase == "checkpoint":
            saved = torch.load(self.path, weights_only=True)["model"]
            expected_state = plain(STEP + 1, *self.oracle)[0].state_dict()
            worst = max(float((saved[k] - v).abs().max()) for k, v in expected_state.items())
            problems += [f"the checkpoint differs by {worst:.1e}"] if worst > TOLERANCE else []
        return problems
