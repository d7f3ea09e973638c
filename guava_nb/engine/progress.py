"""One tqdm bar for a run that is watched from a script."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from guava_nb.engine.interrupts import interrupts_call
from guava_nb.engine.run import Run
from guava_nb.engine.status import RunStatus

__all__ = ["watch"]

REFRESH_S = 0.25


def watch(run: Run, start: Callable[[], None], show: bool = True) -> None:
    """Start the run and wait for it on the calling thread, with a bar; an interrupt stops it, a second one at once.

    Args:
        start: called once interrupts are taken care of, so that none leaves a run behind that nobody watches.
        show: draw the bar.
    """
    bar = tqdm(
        total=run.total_steps,
        unit="step",
        file=sys.stderr,
        mininterval=0.5,
        disable=not (show and sys.stderr.isatty()),  # elsewhere each refresh would be a line
        dynamic_ncols=True,
        leave=True,
    )
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


def _update(bar: tqdm[Any], status: RunStatus) -> None:
    postfix = {"epoch": f"{status.epoch}/{status.num_epochs}"}
    if status.loss is not None:
        postfix["loss"] = f"{status.loss:.4f}"
    if status.val and status.val[-1][2] is not None:
        postfix["val acc"] = f"{status.val[-1][2]:.4f}"
    bar.set_description(status.state, refresh=False)
    bar.set_postfix(postfix, refresh=False)
    bar.update(status.step - bar.n)
