"""A worker's energy, on a thread of its own: reads the sensors, tells about once a second and when it is asked.

Nothing here reaches training: a fault costs one report.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch

from guava_nb.protocol.messages import AskEnergy, EndRun, Energy, Message, PhaseReport, Prepare
from guava_nb.telemetry import (
    EnergyMeter,
    EnergyWindow,
    Gauges,
    MachineMeter,
    NvmlBoard,
    PhaseBook,
    Sensor,
    open_device,
)
from guava_nb.telemetry.machine import RATES

__all__ = ["EnergyReporter"]

log = logging.getLogger(__name__)

#: Seconds between two readings of the sensors, and between two reports that were not asked for.
READ_S, REPORT_S = 0.1, 1.0
_JOIN_S = 2.0
_WINDOW = "run"


class EnergyReporter:
    """Measures one worker's device and machine while it has a run.

    Args:
        device: of the worker.
        send: queues a message for the orchestrator; never blocks.
        sensors: these instead of looking for some.
        up_bytes_s: says what the line to the orchestrator does.

    Attributes:
        phases: where the worker's loop tells what it does when.
        flops: of one sample, when they were counted.
    """

    def __init__(
        self,
        device: torch.device,
        send: Callable[[Message, Sequence[memoryview]], None],
        sensors: Sequence[Sensor] | None = None,
        up_bytes_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Look for nothing yet: the first run does."""
        self._up_bytes_s = up_bytes_s
        self.phases = PhaseBook()
        self.flops: float | None = None
        self._device, self._send, self._sensors = device, send, sensors
        self._orders: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._meter: EnergyMeter | None = None
        self._board: NvmlBoard | None = None
        self._machine = MachineMeter()
        self._run_id, self._due, self._why = "", 0.0, ""

    def post(self, message: Message) -> bool:
        """Take a message, in the thread that reads; returns True when it is for this reporter alone."""
        if not isinstance(message, Prepare | EndRun | AskEnergy):
            return False
        if isinstance(message, Prepare):  # before the loop sees it, and tells of its work
            self.phases.clear(time.monotonic())
        self._orders.put(message)
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="guava-energy", daemon=True)
            self._thread.start()
        return isinstance(message, AskEnergy)

    def close(self) -> None:
        """Stop. Safe to call twice."""
        thread, self._thread = self._thread, None
        self._orders.put(None)
        if thread is not None:
            thread.join(_JOIN_S)

    # -------------------------------------------------------------------------------------------------- its own thread

    def _main(self) -> None:
        told = False
        try:
            while True:
                try:
                    if not self._turn():
                        return
                except Exception:  # whatever a driver can do costs one report
                    if not told:
                        log.exception("a report of the energy was lost; this is told once")
                    told = True
                    self._due = time.monotonic() + REPORT_S
        finally:
            for thing in (self._meter, self._board):
                if thing is not None:
                    thing.close()

    def _turn(self) -> bool:
        """Wait for an order or the next reading; returns False at the end."""
        try:
            order = self._orders.get(timeout=READ_S if self._run_id else None)
        except queue.Empty:
            self._read()
            if time.monotonic() >= self._due:
                self._report(0)
            return True
        match order:
            case None:
                return False
            case Prepare(run_id=run_id):
                self._begin(run_id)
            case AskEnergy(run_id=run_id, mark=mark) if run_id == self._run_id:
                self._report(mark)
            case EndRun(run_id=run_id) if run_id == self._run_id:
                self._run_id = ""
                if self._meter is not None:
                    self._meter.cancel(_WINDOW)
        return True

    def _begin(self, run_id: str) -> None:
        if self._meter is None:
            self._open()
        assert self._meter is not None
        self._meter.take_increments()
        self._meter.begin(_WINDOW, restart=True)
        self.flops = None
        self._run_id, self._due = run_id, time.monotonic() + REPORT_S

    def _open(self) -> None:
        self._meter = EnergyMeter([self._device], sensors=self._sensors, background=False)
        self._why = "; ".join(f"{device}: {why}" for device, why in self._meter.unmeasured)
        if self._device.type == "cuda":
            board = open_device(self._device)
            self._board = board if isinstance(board, NvmlBoard) else None

    def _read(self) -> None:
        assert self._meter is not None
        self._meter.poll()
        self.phases.measured(self._meter.take_increments())

    def _report(self, mark: int) -> None:
        assert self._meter is not None
        window = self._meter.so_far(_WINDOW, synchronise=bool(mark))
        self.phases.measured(self._meter.take_increments())
        gauges = self._board.gauges() if self._board is not None else Gauges()
        self._send(self._record(mark, window, gauges), ())
        self._due = time.monotonic() + REPORT_S

    def _said(self) -> str:
        """What is not measured, and why."""
        missed = self._meter.missed_tasks if self._meter is not None else 0
        if not missed:
            return self._why
        note = f"{missed} tasks were not counted: too many ended between two readings, so name longer stretches"
        return "; ".join(filter(None, (self._why, note)))

    def _record(self, mark: int, window: EnergyWindow, gauges: Gauges) -> Energy:
        load = self._machine.look()
        return Energy(
            run_id=self._run_id,
            mark=mark,
            seconds=window.seconds,
            boards=window.boards,
            phases=tuple(PhaseReport(name, *totals) for name, totals in self.phases.totals().items()),
            why=self._said(),
            busy=gauges.busy,
            memory_used_bytes=gauges.memory_used_bytes,
            memory_bytes=gauges.memory_bytes,
            power_w=gauges.power_w,
            cpu_busy=load.cpu_busy,
            host_memory_used_bytes=load.memory_used_bytes,
            host_memory_bytes=load.memory_bytes,
            rates=tuple(getattr(load, name) for name in RATES),
            flops=self.flops,
            tasks=window.tasks,
            up_bytes_s=self._up_bytes_s(),
        )  # fmt: skip
