"""What a worker can say of its own work, read off the messages that pass: nothing in its loop has to keep count.

Pure: messages and the time are told. `figures` may be called from any thread.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from guava_nb.protocol.messages import Abort, EndRun, Energy, Message, Prepare, Ready, Shard, StepApplied
from guava_nb.status import OwnFigures
from guava_nb.telemetry.device_figures import device_now
from guava_nb.telemetry.waits import Waits

__all__ = ["OwnWork"]


class OwnWork:
    """One worker's count of its own work.

    Args:
        device: torch's name of it.
        device_name: its maker's.
    """

    def __init__(self, device: str, device_name: str) -> None:
        """Nothing was done yet."""
        self._on_cpu, self._blank = device == "cpu", OwnFigures(device_name=device_name)
        self._lock = threading.Lock()
        self._figures = self._blank
        self._waits = Waits()
        self._given: dict[tuple[int, int], tuple[int, float]] = {}  # (step, shard): rows, share
        self._done: dict[int, int] = {}  # rows of shards worked on, by step
        self._run_id = ""
        self._energy: Energy | None = None

    def arrived(self, message: Message) -> None:
        """Take note of a message of the orchestrator."""
        if not isinstance(message, Prepare | Shard | Abort | EndRun):
            return
        with self._lock:
            match message:
                case Prepare(run_id=run_id):
                    self._run_id, self._figures, self._waits, self._energy = run_id, self._blank, Waits(), None
                    self._given.clear()
                    self._done.clear()
                case Shard(run_id=self._run_id):
                    rows = sum(message.part_rows) or message.rows
                    share = rows / message.global_rows if message.global_rows else 0.0
                    self._given[message.step, message.shard] = (rows, share)
                case Abort(run_id=self._run_id, last_committed=last):
                    self._done = {step: rows for step, rows in self._done.items() if step <= last}
                    self._given = {at: given for at, given in self._given.items() if at[0] <= last}
                case EndRun(run_id=self._run_id):
                    self._run_id = ""

    def sent(self, message: Message, now_s: float) -> None:
        """Take note of a message of this worker's."""
        if not isinstance(message, Ready | StepApplied | Energy):
            return
        with self._lock:
            if message.run_id != self._run_id:
                return
            match message:
                case Ready():
                    self._worked(message, now_s)
                case StepApplied(step=step, ready=ready):
                    if ready is not None:
                        self._worked(ready, now_s)
                    self._committed(step)
                case Energy():
                    self._energy = message

    def _worked(self, ready: Ready, now_s: float) -> None:
        rows, share = self._given.pop((ready.step, ready.shard), (ready.rows, None))
        self._done[ready.step] = self._done.get(ready.step, 0) + rows
        self._waits.reported(now_s, ready.wait_s)
        self._figures = replace(
            self._figures, share=share, step_s=ready.forward_s + ready.backward_s, waits=self._waits.worker_waits
        )

    def _committed(self, step: int) -> None:
        rows = sum(self._done.pop(done) for done in [known for known in self._done if known <= step])
        self._given = {at: given for at, given in self._given.items() if at[0] > step}
        self._figures = replace(self._figures, samples=self._figures.samples + rows)

    def figures(self) -> OwnFigures:
        """Return what is known now, without the link, which has its own counters."""
        with self._lock:
            told = {} if self._energy is None else device_now(self._energy, self._on_cpu, bool(self._run_id))
            return replace(self._figures, **told)
