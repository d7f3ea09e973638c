"""Blocking in a cell until something ends, with interrupts that mean something.

An interrupt is counted, not raised: a `KeyboardInterrupt` in the middle of a display message would tear it. The first
one and the second one mean different things, so none may get lost between two instructions of the loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from guava_nb.notebook.display import say
from guava_nb.notebook.panel.panel import Frame, Panel
from guava_nb.processes.interrupts import Interrupts, interrupts_counted

__all__ = ["POLL_S", "Interrupted", "follow_lines", "interrupt_run", "interrupt_worker", "watch"]

#: Seconds of one wait: how late an interrupt is noticed at most.
POLL_S = 0.25


class Interrupted(KeyboardInterrupt):
    """A cell was interrupted where there was nothing to finish; shown as one line, and stops "run all"."""

    def _render_traceback_(self) -> list[str]:
        """Show the sentence alone: IPython calls this instead of printing a traceback."""
        return [f"Interrupted: {self}"]


def watch(
    wait: Callable[[float], bool],
    frame: Callable[[], Frame],
    last_frame: Callable[[], Frame],
    panel: Panel,
    on_interrupt: Callable[[int], str],
) -> None:
    """Draw until `wait(seconds)` says that it ended.

    Args:
        wait: blocks for at most the given seconds; True when it is over.
        frame: makes what the panel shows while it goes on.
        last_frame: makes what stays at the end.
        panel: is finished on return, also when something raises.
        on_interrupt: does what the n-th interrupt means and returns the sentence to say.
    """
    with interrupts_counted() as interrupts:
        try:
            _loop(wait, frame, panel, on_interrupt, interrupts)
            panel.finish(last_frame)
        finally:
            panel.close()


def _loop(
    wait: Callable[[float], bool],
    frame: Callable[[], Frame],
    panel: Panel,
    on_interrupt: Callable[[int], str],
    interrupts: Interrupts,
) -> None:
    answered, ended = 0, False
    while not ended:
        try:
            ended = wait(POLL_S)
        except KeyboardInterrupt:  # raised by hand, or in a thread that has no signals
            interrupts.count += 1
        while answered < interrupts.count and not ended:
            answered += 1
            say(on_interrupt(answered))
        if not ended:
            panel.update(frame)


def follow_lines(new_lines: Callable[[], list[str]], at_work: Callable[[], bool]) -> None:
    """Write lines as they come, until nothing is at work any more or the cell is interrupted."""
    with interrupts_counted() as interrupts:
        going = True
        while going and not interrupts.count:
            going = at_work()
            try:
                for line in new_lines():
                    say(line)
                if going:
                    time.sleep(POLL_S)
            except KeyboardInterrupt:  # raised by hand, or in a thread that has no signals
                return


def interrupt_run(run: Any, count: int = 1, awaited: str = "", grace_s: float = 0.0) -> str:
    """Do what the n-th interrupt of a watched run means; returns the sentence to say.

    Args:
        awaited: workers whose connections broke, when no other worker is here.
        grace_s: that a step has to end after the first one.
    """
    stopping = run.status().state == "stopping"
    run.interrupt()
    if count == 1 and not stopping and awaited:
        return (
            f"Stopping. No worker is here to end the step: if none is back within {2 * grace_s:g} s, the run ends at the last "
            "committed step. Interrupt again (or %guava_stop) to end it there now."
        )
    if count == 1 and not stopping:
        return "Stopping after this step. Interrupt again (or %guava_stop) to abort it now."
    return "Aborting the step now; the model keeps the state of the last committed step."


def interrupt_worker(worker: Any, count: int) -> str:
    """Do what the n-th interrupt in a worker's cell means; returns the sentence to say."""
    if count == 1 and not worker.status().joined:  # there is nothing to hand over, and its dialling may last
        worker.kill()
        return "The worker had not joined yet; its process is ended."
    if count == 1:
        worker.leave()
        return (
            "Leaving after this step, when the orchestrator has what only this worker holds. "
            "Interrupt again to end the process now."
        )
    worker.kill()
    return "The worker's process is ended."
