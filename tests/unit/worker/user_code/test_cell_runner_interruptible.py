"""An interrupt reaches the call that it is meant for, on the main thread and on others, and nothing after it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest

from guava_nb.worker.user_code.cell_runner import Interruptible


def test_a_wait_on_the_main_thread_ends_and_the_handler_is_as_before() -> None:
    code, before = Interruptible(), signal.getsignal(signal.SIGINT)
    begun = threading.Event()
    thread = threading.Thread(target=lambda: (begun.wait(10), code.interrupt()))
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        code.run(lambda: (begun.set(), threading.Event().wait(60)))
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("times", [1, 50])
def test_a_loop_on_another_thread_ends_and_what_follows_does_not(times: int) -> None:
    code, begun, ended = Interruptible(), threading.Event(), threading.Event()
    told: list[str] = []

    def loop() -> None:
        begun.set()
        while True:
            ended.is_set()

    def main() -> None:
        try:
            code.run(loop)
        except KeyboardInterrupt:
            told.append("interrupted")
        ended.set()
        for _ in range(10_000):
            code.run(lambda: None)
        told.append("went on")

    thread = threading.Thread(target=main)
    thread.start()
    assert begun.wait(10)
    for _ in range(times):
        if not ended.is_set():
            code.interrupt()
    thread.join(20)
    assert told[0] == "interrupted"


def test_nothing_runs_and_nothing_is_interrupted() -> None:
    code = Interruptible()
    code.interrupt()
    assert code.run(lambda: 5) == 5
    raising: Callable[[], None] = lambda: 1 / 0  # noqa: E731
    with pytest.raises(ZeroDivisionError):
        code.run(raising)
    code.interrupt()
