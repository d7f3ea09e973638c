"""One tqdm bar for a run, or a pass over data, that is watched from a script."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from guava_nb.evaluation.passes import Progress
from guava_nb.processes.interrupts import interrupts_call
from guava_nb.status import RunStatus
from guava_nb.training.run import Run

__all__ = ["reporting", "watch"]

REFRESH_S = 0.25


def watch(run: Run, start: Callable[[], None], show: bool = True) -> None:
    """Start the run and wait for it on the calling thread, with a bar; an interrupt stops it, a second one at once.

    Args:
        start: called when interrupts are handled here, so that an interrupt cannot leave a run without a watcher.
        show: draw the bar.
    """
    bar = _bar(run.total_steps, "step", show)
    with interrupts_call(run.interrupt):
        start()
        try:
            ended = False
            while not ended:
                try:
                    ended = run.wait(REFRESH_S)
                except KeyboardInterrupt:  # raised by hand, or in a thread that has no signals
                    run.interrupt()
                _update(bar, run.status())
        finally:
            bar.close()


@contextmanager
def reporting(what: str, progress: bool | Progress) -> Iterator[Progress | None]:
    """Give what takes the progress of a pass: the user's function, a bar in a terminal, or None.

    Args:
        what: "validating", for instance.
        progress: a function, or whether to show a bar.
    """
    if callable(progress):
        yield progress
        return
    bar = _bar(None, "sample", progress)
    bar.set_description(what, refresh=False)

    def report(done: int, total: int | None) -> None:
        bar.total = total
        bar.update(done - bar.n)

    try:
        yield None if bar.disable else report
    finally:
        bar.close()


def _bar(total: int | None, unit: str, show: bool) -> tqdm[Any]:
    return tqdm(
        total=total,
        unit=unit,
        file=sys.stderr,
        mininterval=0.5,
        disable=not (show and sys.stderr.isatty()),  # elsewhere each refresh would be a line
        dynamic_ncols=True,
        leave=True,
    )


def _update(bar: tqdm[Any], status: RunStatus) -> None:
    postfix = {"epoch": f"{status.epoch}/{status.num_epochs}"}
    if status.loss is not None:
        postfix["loss"] = f"{status.loss:.4f}"
    if status.val and status.val[-1][2] is not None:
        postfix["val acc"] = f"{status.val[-1][2]:.4f}"
    bar.set_description(status.state, refresh=False)
    bar.set_postfix(postfix, refresh=False)
    bar.update(status.step - bar.n)
