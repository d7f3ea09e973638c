"""Waiting for workers before a run: who is here, what is missing, and the cell to paste while it is missing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from guava_nb.notebook.display import say
from guava_nb.notebook.join_code import CodeBox
from guava_nb.notebook.panel.blocking import Interrupted
from guava_nb.notebook.panel.panel import Frame, Panel, make_panel
from guava_nb.processes.interrupts import interrupts_counted
from guava_nb.render import ready_workers, waiting_view

__all__ = ["wait_for_workers"]

_ADVICE = "Run %guava_worker elsewhere{where}, or interrupt and start some here: %guava_up --local 2."
_CODE_BELOW = " (the cell to paste stands below)"
_CODE_AGAIN = " (%guava_up --show-code shows the code again)"


def wait_for_workers(
    orchestrator: Any,
    count: int | None,
    cell: str,
    ui: str,
    panel: Panel,
    last: bool = False,
    look: Callable[[], None] = lambda: None,
) -> None:
    """Wait until the workers are here that a run needs, as long as the session's patience lasts.

    Args:
        count: how many; None: all that the session expects.
        cell: the one to paste elsewhere, shown meanwhile; "" for none. It is taken away again when the waiting ends.
        ui: one of `settings.UI_NAMES`.
        panel: of the cell; what comes next takes its place there. In text the waiting has lines of its own.
        last: nothing comes next in this cell.
        look: called a few times a second meanwhile, in the cell's own thread.

    Raises:
        RendezvousTimeout: too few came in time.
        Interrupted: the cell was interrupted; the session stays as it is.
    """
    expected = count or orchestrator.expected_workers
    if (here := ready_workers(orchestrator.status())) >= expected:
        return
    patience_s = orchestrator.config.rejoin_timeout_s
    in_text = ui in ("text", "none")
    advice = "" if in_text else _ADVICE.format(where=_CODE_BELOW if cell else _CODE_AGAIN)
    if in_text:  # no line can be taken back there, so no cell
        told = _ADVICE.format(where=_CODE_AGAIN)
        say(f"Waiting up to {patience_s:g} s for workers: {here} of {expected} are here. {told}")
        panel, cell = make_panel(ui), ""
    ends_s = time.monotonic() + patience_s

    def frame() -> Frame:
        left_s = None if in_text else ends_s - time.monotonic()
        return waiting_view(orchestrator.status().workers, expected, left_s, advice), ()

    try:
        with interrupts_counted() as interrupts, CodeBox(cell) as box:

            def on_wait(now_here: int) -> None:
                if interrupts.count:
                    raise Interrupted("%guava_train waits no longer; the session and the workers that are here stay")
                if not in_text or now_here != here:  # in text the sentence above says how it stands
                    panel.update(frame)
                look()
                box.show()  # below the panel: so after its first frame

            on_wait(here)
            orchestrator.wait_for_workers(count=count, timeout=patience_s, on_wait=on_wait)
    except BaseException:
        if in_text:
            panel.close()
        else:
            panel.finish(frame)
        raise
    if in_text:
        panel.close()
    elif last:
        panel.finish(frame)
