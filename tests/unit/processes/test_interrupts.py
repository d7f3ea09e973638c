from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import SimpleNamespace

import pytest

from guava_nb.processes import interrupts
from guava_nb.processes.interrupts import interrupts_call, interrupts_remembered, interrupts_wait


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals of Windows come on a thread of their own")


def test_an_interrupt_calls_and_the_old_handler_comes_back() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []
    with interrupts_call(lambda: seen.append(1)):
        interrupt()
        interrupt()
    assert seen == [1, 1] and signal.getsignal(signal.SIGINT) is before


def test_a_clean_up_runs_to_its_end_and_the_interrupt_comes_then() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        interrupt()
        done.append(1)
    assert done == [1]
    with interrupts_wait():
        done.append(2)
    assert done == [1, 2]


def test_an_error_of_the_clean_up_wins_over_the_interrupt() -> None:
    with pytest.raises(ValueError), interrupts_wait():
        interrupt()
        raise ValueError


def test_a_swallowed_interrupt_is_remembered() -> None:
    with interrupts_remembered() as interrupts:
        interrupts.check()
        with contextlib.suppress(KeyboardInterrupt):  # as a library might
            interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


def test_threads_that_get_no_signals_change_nothing() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def block() -> None:
        with interrupts_wait():
            seen.append(signal.getsignal(signal.SIGINT) is before)

    thread = threading.Thread(target=block)
    thread.start()
    thread.join(10)
    assert seen == [True]


def test_a_second_press_at_once_does_not_hit_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that waits ends with the first press within milliseconds; the second one is for it too, and not for the script."""
    before, seen = signal.getsignal(signal.SIGINT), []

    def sleep(seconds: float) -> None:
        assert 0 < seconds <= interrupts.SAME_PRESS_S
        clock[0] += seconds / 2
        if clock[0] < 0.3:
            interrupt()

    clock = [0.0]
    monkeypatch.setattr(interrupts, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    with interrupts_call(lambda: seen.append(clock[0])):
        interrupt()
    assert seen == [0.0, 0.25] and clock[0] >= 0.25 + interrupts.SAME_PRESS_S - 0.01
    assert signal.getsignal(signal.SIGINT) is before
    with interrupts_call(lambda: seen.append(clock[0])):
        interrupt()
        clock[0] += 1.0  # the block went on: nothing is waited for
    assert len(seen) == 3
