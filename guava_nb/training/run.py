"""A run as its user sees it: a handle with state, history and figures, filled by the job, read from any thread."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from guava_nb.cluster.group_path import Route
from guava_nb.config.units import show_bytes, show_float
from guava_nb.errors import ClusterError, of_the_user
from guava_nb.status import RunStatus, WireBytes
from guava_nb.telemetry.energy_record import EnergyRecord, energy_record
from guava_nb.telemetry.run_energy import RunEnergy
from guava_nb.telemetry.waits import Feeding
from guava_nb.training.byte_budget import Budget
from guava_nb.training.logs.figures import curves

__all__ = ["Run", "RunSources"]


def _nothing_fed() -> Feeding:
    return Feeding((0, 0), {})


@dataclass(frozen=True, slots=True)
class RunSources:
    """Where a run's handle asks for what it does not keep itself.

    Attributes:
        wire: bytes by kind so far.
        route: how the workers reach each other, None before that is known.
        layout: how one model is spread over the workers, in words.
        feeding: what is on its way to the workers.
        waits: who waited for whom.
        energy: of the workers; None knows of none.
        precision: arithmetic of the run.
        reading: how batches are read, in the words of the option `batch`.
        interrupt: stops the run after the current step; the second time at once.
        model: the model with the weights of the last committed step.
        budget: most bytes that the run may take, and those that it took; None without.
        settings: what a table of runs shows of it.
        kept: how many entries of the history would be left if the workers' processes were killed now, and if they vanished with
            their disks; None: nothing would be lost.
        export: writes a program of the run; None where the run has none.
    """

    wire: Callable[[], WireBytes] = WireBytes
    route: Callable[[], Route | None] = lambda: None
    layout: Callable[[], str] = str
    feeding: Callable[[], Feeding] = _nothing_fed
    waits: Callable[[], list[dict[str, Any]]] = list
    energy: RunEnergy | None = None
    precision: str = "fp32"
    reading: Callable[[], str] = str
    interrupt: Callable[[], None] = lambda: None
    model: Callable[[], torch.nn.Module] | None = None
    budget: Budget | None = None
    is_local: bool = False
    settings: tuple[tuple[str, str], ...] = ()
    kept: Callable[[], tuple[int, int] | None] = lambda: None
    export: Callable[..., Path] | None = None

    def frozen(self) -> RunSources:
        """Return sources that go on saying what these say now, for a run that has ended."""
        wire, route, layout, waits = self.wire(), self.route(), self.layout(), self.waits()
        reading = self.reading()
        return replace(
            self,
            reading=lambda: reading,
            wire=lambda: wire,
            route=lambda: route,
            layout=lambda: layout,
            waits=lambda: waits,
            feeding=_nothing_fed,
            kept=lambda: None,
        )


class Run:
    """Handle of one training run.

    Attributes:
        run_id: short name, unique in the session.
        history: one dict per committed step: step, epoch, loss, count, samples, tokens (None: not counted), learning_rate,
            gradient_norm
            (None: not known), seconds. With local sync one per round: step is its last one, round its number, steps how many.
        validations: one dict per validation: step, loss, accuracy, samples.
        epochs: one dict per epoch that was ended: step, epoch, loss, samples, seconds.
        wire: bytes by kind so far.
        budget: most bytes that it may take; None without.
        check: what came of the one-step check; None where no batch was cut so far, or it is off.
        losses: one dict per loss of work: steps and seconds that were done again, after which step the run went on, and from
            what: "disk", "snapshot" or "approximate weights".
        approximate: says that its weights come from approximate ones, and from which; "" where they are exact.
    """

    def __init__(
        self, run_id: str, mode: str, num_epochs: int, total_steps: int | None, sources: RunSources | None = None
    ) -> None:
        """Start in state "preparing"; the job drives it.

        Args:
            run_id: its name.
            mode: as `%guava_mode` names it.
            num_epochs: that are wished.
            total_steps: optimizer steps in all; None: not known.
            sources: of what others count; None: nothing does.
        """
        self.run_id = run_id
        self.mode = mode
        self.num_epochs = num_epochs
        self.total_steps = total_steps
        self.history: list[dict[str, Any]] = []
        self.validations: list[dict[str, Any]] = []
        self.epochs: list[dict[str, Any]] = []
        self.generations = 1
        self.lost_samples = 0
        self.duplicated_samples = 0
        self.workers: list[dict[str, Any]] = []
        self.losses: list[dict[str, Any]] = []
        self.approximate = ""
        self._sources = sources or RunSources()
        self.budget = self._sources.budget
        self.check: dict[str, Any] | None = None
        self._epoch = 0
        self._state = "preparing"
        self._message = ""
        self._waits_until: float | None = None
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None  # of the error, without what every raise of it adds
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._started, self._began_at = time.monotonic(), time.time()
        self._wall_s: float | None = None
        self._thread: int | None = None

    # ------------------------------------------------------------------------------------------------ for the user

    @property
    def done(self) -> bool:
        """Whether the run has ended: done, stopped or failed."""
        return self._ended.is_set()

    @property
    def state(self) -> str:
        """See `RunStatus.state`."""
        return self._state

    @property
    def error(self) -> BaseException | None:
        """What ended the run, if it failed."""
        return self._error

    @property
    def wire(self) -> WireBytes:
        """Bytes by kind since the run began; None for those that the workers exchange directly."""
        wire, route = self._sources.wire(), self._sources.route()
        direct = route is not None and route.path == "direct"
        return replace(wire, gradient_bytes=None, activation_bytes=None) if direct else wire

    @property
    def energy(self) -> list[dict[str, Any]]:
        """One dict per worker: worker, device, joules (None: not measured), method, boards, phases, joules of epochs."""
        return [] if self._sources.energy is None else self._sources.energy.records()

    @property
    def joules(self) -> float | None:
        """Of all workers so far, each board counted once; None when nothing was measured."""
        return None if self._sources.energy is None else self._sources.energy.joules()

    def energy_record(self, grams_per_kwh: float | None = None, price_per_kwh: float | None = None) -> EnergyRecord:
        """Return joules per worker, sample, step, token, epoch, phase and task, so far; see `EnergyRecord`.

        Args:
            grams_per_kwh: CO2 equivalent where the machines stand; without it none is told.
            price_per_kwh: in any currency.

        Raises:
            ConfigError: a factor is negative.
        """
        curves = {} if self._sources.energy is None else self._sources.energy.curves()
        return energy_record(self.report(), curves, self._sources.precision, grams_per_kwh, price_per_kwh)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; returns whether the run has ended. Does not raise the run's error: `result` does.

        Raises:
            ClusterError: a callback of this very run would wait for itself.
        """
        self._refuse_own_thread()
        return self._ended.wait(timeout_s)

    def interrupt(self) -> None:
        """Stop: the first time after the current step, the second time at once."""
        self._sources.interrupt()

    def stop(self, timeout_s: float = 60.0) -> bool:
        """Stop after the current step and wait until the run has ended; a callback of the run returns before that."""
        if not self.done:
            self.interrupt()
        return self.done if self._on_own_thread() else self.wait(timeout_s)

    def result(self) -> Run:
        """Wait for the end, raise the run's error if it failed, else return the run."""
        self._refuse_own_thread()
        self._ended.wait()
        if self._error is not None:
            __tracebackhide__ = True  # IPython leaves this frame out
            raise self._error.with_traceback(self._trace)
        return self

    def _on_own_thread(self) -> bool:
        return not self.done and self._thread == threading.get_ident()

    def _refuse_own_thread(self) -> None:
        if self._on_own_thread():
            raise ClusterError(
                f"a callback of run {self.run_id} cannot wait for the run's end, which comes after it; to stop the run, "
                "return True or call run.stop()"
            )

    def model(self) -> torch.nn.Module:
        """Return a model of yours with the weights of the last committed step, on the CPU.

        What you do to it changes neither what is saved nor what a further run goes on from. While you hold it, the next call
        after the end of the run returns the same one.

        Raises:
            WorkerLost: the workers that hold these weights are gone.
        """
        assert self._sources.model is not None, "a run is made by Orchestrator.start_training"
        return self._sources.model()

    def export(
        self, path: str | Path, *, form: str = "torch", overwrite: bool = False, save_data: bool = False
    ) -> Path:
        """Write a plain program of this run, which gives the same losses without guava_nb; returns where it lies.

        Args:
            path: file to write, such as train.py.
            form: "torch" for torchrun; "ray" for Ray Train, "fabric" for Lightning Fabric (data mode).
            overwrite: an existing file may be replaced.
            save_data: write tensors that lie in memory beside it, up to 256 MB; else a function is left to be filled in.

        Raises:
            ConfigError: the run does what no plain program can do, or the file exists; nothing was written.
        """
        assert self._sources.export is not None, "a run is made by Orchestrator.start_training"
        return self._sources.export(path, list(self.history), form, overwrite, save_data)

    def status(self) -> RunStatus:
        """Return a snapshot for display."""
        with self._lock:
            history, elapsed = self.history, self.elapsed_s()
            samples = sum(record["samples"] for record in history)
            recent = history[-20:]
            span = recent[-1]["seconds"] - recent[0]["seconds"] if len(recent) > 1 else 0.0
            loaded, kept = self.feeding().loaded, self._sources.kept()
            killed, vanished = ((None, None), (None, None)) if kept is None else map(self._since, kept)
            return RunStatus(
                run_id=self.run_id,
                state=self._state,
                mode=self.mode,
                epoch=self._epoch,
                num_epochs=self.num_epochs,
                step=sum(record.get("steps", 1) for record in history),
                total_steps=self.total_steps,
                samples=samples,
                elapsed_s=elapsed,
                samples_per_s=sum(r["samples"] for r in recent[1:]) / span if span > 0 else None,
                **curves(history, self.validations, self.epochs, lambda: self.energy),
                message=self._message,
                waits_s=None if self._waits_until is None else max(0.0, self._waits_until - time.monotonic()),
                wire=self.wire,
                path=_path_text(self._sources.route()),
                batch=self._sources.reading(),
                at_risk_steps=vanished[0],
                at_risk_s=vanished[1],
                at_risk_killed_steps=killed[0],
                at_risk_killed_s=killed[1],
                approximate=self.approximate,
                loaded_batches=loaded[0],
                loaded_bytes=loaded[1],
                joules=self.joules,
                devices=() if self._sources.energy is None else self._sources.energy.devices(),
                rounds=len(history) if self._sources.is_local else 0,
                steps_before=history[0]["step"] - history[0].get("steps", 1) if history else 0,
                budget_bytes=0 if self.budget is None else self.budget.limit.limit_bytes,
                settings=self._sources.settings,
                began_at=self._began_at,
                ended_at=None if self._wall_s is None else self._began_at + self._wall_s,
            )

    def report(self) -> dict[str, Any]:
        """Return the figures of the run as one JSON-ready object."""
        wire = self.wire
        step_s, route = _step_seconds(self.history), self._sources.route()
        return {
            "run_id": self.run_id,
            "mode": self.mode,
            "sync": "local" if self._sources.is_local else "step",
            "path": None if route is None else route.record(),
            "layout": self._sources.layout(),
            "batch": self._sources.reading(),
            "state": self._state,
            "workers": self.workers,
            "steps": sum(record.get("steps", 1) for record in self.history),
            "epochs": self._epoch,
            "samples": sum(record["samples"] for record in self.history),
            "tokens": _tokens(self.history),
            "train_loss": [record["loss"] for record in self.history],
            "val": {k: v for k, v in self.validations[-1].items() if k != "step"} if self.validations else None,
            "wall_s": self.elapsed_s(),
            "step_s": step_s,
            "wire": {name: getattr(wire, name) for name in WireBytes.__slots__},
            "budget": None if self.budget is None else self.budget.record(),
            "energy": self.energy,
            "energy_j": self.joules,
            "waits": self._sources.waits(),
            "check": self.check,
            "parity": None,  # `guava demo --check` fills it in
            "losses": self.losses,
            "approximate": self.approximate,
            "lost_samples": self.lost_samples,
            "duplicated_samples": self.duplicated_samples,
            "generations": self.generations,
        }

    def ending(self) -> str:
        """Say in a sentence how the run ended, and what it cost."""
        wire, steps = self.wire, sum(record.get("steps", 1) for record in self.history)
        loss = f", loss {show_float(self.history[-1]['loss'])}" if self.history else ""
        why = f" ({self._message})" if self._message else ""
        return (
            f"{self.run_id} ended: {self._state}{why}, {steps} steps in {self.elapsed_s():.0f} s{loss}, "
            f"{show_bytes(wire.out_bytes)} sent, {show_bytes(wire.in_bytes)} received, {self.lost_samples} samples lost, "
            f"{self.duplicated_samples} doubled"
        )

    def elapsed_s(self) -> float:
        """Return the seconds that it takes so far, or took."""
        return self._wall_s if self._wall_s is not None else time.monotonic() - self._started

    def __dir__(self) -> list[str]:
        """Return what is for the user, which is what tab offers."""
        return [name for name in super().__dir__() if name not in _FOR_THE_JOB]

    def __repr__(self) -> str:
        """One line: what and how far."""
        last = f", loss {show_float(self.history[-1]['loss'])}" if self.history else ""
        return (
            f"Run({self.run_id}: {self._state}, epoch {self._epoch}/{self.num_epochs}, step {len(self.history)}{last})"
        )

    # ------------------------------------------------------------------------------------------------- for the job

    def export_by(self, export: Callable[..., Path]) -> None:
        """Let `export` write programs of this run."""
        self._sources = replace(self._sources, export=export)

    def feeding(self) -> Feeding:
        """Return what is on its way to the workers at this moment."""
        return self._sources.feeding()

    def begin(self) -> None:
        """Begin to prepare, on the run's own thread, which calls its callbacks."""
        self._thread = threading.get_ident()
        self.move("preparing")

    def move(self, state: str, message: str = "", for_s: float | None = None) -> None:
        """Enter a state, which takes `for_s` at most.

        Args:
            state: as in `RunStatus`.
            message: for people: why, or what is waited for.
            for_s: seconds; None: not known.
        """
        with self._lock:
            self._state, self._message = state, message
            self._waits_until = None if for_s is None else time.monotonic() + for_s

    def begin_epoch(self, epoch: int) -> None:
        """Count epochs from 1 for people."""
        self._epoch = epoch + 1

    def add_step(self, record: dict[str, Any]) -> None:
        """Append a committed step."""
        with self._lock:
            self.history.append({**record, "seconds": time.monotonic() - self._started})

    def add_validation(self, record: dict[str, Any]) -> None:
        """Append a validation."""
        with self._lock:
            self.validations.append(record)

    def add_epoch(self, record: dict[str, Any]) -> None:
        """Append an epoch that was ended; it takes the place of its own record, where the run went back into it."""
        with self._lock:
            others = [one for one in self.epochs if one["epoch"] < record["epoch"]]
            self.epochs = [*others, {**record, "seconds": time.monotonic() - self._started}]

    def follow(
        self, seen: Sequence[list[dict[str, Any]]]
    ) -> tuple[tuple[list[dict[str, Any]], ...], list[dict[str, Any]]]:
        """Bring a reader up to date, from any thread.

        Args:
            seen: what it has of history, validations and epochs; what the run went back over is taken off their ends.

        Returns:
            What is new of each; and what was taken off.
        """
        taken: list[dict[str, Any]] = []
        with self._lock:
            here = (self.history, self.validations, self.epochs)
            for old, now in zip(seen, here, strict=True):
                while old and (len(old) > len(now) or now[len(old) - 1] is not old[-1]):
                    taken.append(old.pop())
            return tuple(now[len(old) :] for old, now in zip(seen, here, strict=True)), taken

    def since(self, kept: int) -> tuple[int, float]:
        """Return steps and seconds from an entry of the history, the first of which is 1, to the last."""
        with self._lock:
            return self._since(kept)

    def _since(self, kept: int) -> tuple[int, float]:
        rest, began = self.history[kept:], self.history[kept - 1]["seconds"] if 0 < kept <= len(self.history) else 0.0
        return sum(record.get("steps", 1) for record in rest), rest[-1]["seconds"] - began if rest else 0.0

    def rewind(self, steps: int) -> None:
        """Forget the history after `steps` steps: they will be done again."""
        with self._lock:
            del self.history[steps:]
            last = self.history[-1]["step"] if self.history else -1
            self.validations = [v for v in self.validations if v["step"] <= last]
            self.epochs = [one for one in self.epochs if one["step"] <= last]

    def end(self, state: str, error: BaseException | None = None, message: str = "") -> None:
        """End the run and wake all threads that wait for it.

        Args:
            state: "done", "stopped" or "failed".
            error: that ended it.
            message: for people; "" takes the error's.
        """
        frozen = self._sources.frozen()
        with self._lock:
            self._trace = None if error is None else of_the_user(error.__traceback__)
            self._state, self._error, self._message = state, error, message or (str(error) if error else "")
            if self.history:  # the next epoch may have begun, and nothing of it counts
                self._epoch = self.history[-1]["epoch"]
            self._waits_until = None
            self._wall_s = time.monotonic() - self._started
            self._sources = frozen
            if self.budget is not None:
                self.budget.end(frozen.wire().out_bytes + frozen.wire().in_bytes)
        self._ended.set()


#: Of a run's handle: what the job calls, and no user.
_FOR_THE_JOB = frozenset((
    "feeding", "export_by", "begin", "move", "begin_epoch", "add_step", "add_validation", "add_epoch", "follow", "since",
    "rewind", "end",
))  # fmt: skip


def _tokens(history: list[dict[str, Any]]) -> float | None:
    """Tokens of all committed steps; None when they are not counted."""
    known = [record["tokens"] for record in history if record.get("tokens") is not None]
    return sum(known) if known else None


def _path_text(route: Route | None) -> str:
    return "" if route is None else f"{route.path} ({route.backend}): {route.reason}"


def _step_seconds(history: list[dict[str, Any]]) -> dict[str, float | None]:
    """Median and 95th percentile of the time that a step took, of several in a round; None with fewer than two commits."""
    pairs = zip(history, history[1:], strict=False)
    gaps = sorted((now["seconds"] - before["seconds"]) / now.get("steps", 1) for before, now in pairs)
    if not gaps:
        return {"p50": None, "p95": None}
    return {"p50": statistics.median(gaps), "p95": gaps[min(len(gaps) - 1, int(0.95 * len(gaps)))]}
