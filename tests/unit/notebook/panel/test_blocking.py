from __future__ import annotations

import signal
import threading

import pytest

from guava_nb.notebook.panel.blocking import Interrupted, interrupt_run, watch
from guava_nb.notebook.panel.panel import Panel
from guava_nb.render import View
from tests.support.fake_session import FakeRun


def frame() -> tuple[View, tuple[str, ...]]:
    return View("x"), ()


def watched(wait_results: list[str]) -> list[int]:
    """Run `watch` over a script of waits: "int" sends an interrupt, "raise" raises one, "end" ends."""
    answered: list[int] = []
    script = iter(wait_results)

    def wait(timeout_s: float) -> bool:
        for _ in range((action := next(script)).count("int")):
            signal.raise_signal(signal.SIGINT)
        if action == "raise":
            raise KeyboardInterrupt
        return action == "end"

    def answer(count: int) -> str:
        answered.append(count)
        return f"answer {count}"

    watch(wait, frame, frame, Panel(None), answer)
    return answered


@pytest.mark.parametrize(
    ("script", "answers"),
    [
        (["go", "end"], []),
        (["int", "go", "end"], [1]),
        (["int", "int", "end"], [1, 2]),
        (["intint", "end"], [1, 2]),
        (["raise", "int", "end"], [1, 2]),
    ],
)
def test_every_interrupt_is_answered_once_in_order(script: list[str], answers: list[int]) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert watched(script) == answers
    assert signal.getsignal(signal.SIGINT) is before


def test_the_handler_comes_back_and_the_panel_closes_when_something_raises() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError):
        watch(lambda timeout_s: bool(1 / 0), frame, frame, Panel(None), str)
    assert signal.getsignal(signal.SIGINT) is before


def test_it_works_in_a_thread_that_cannot_take_signals() -> None:
    answers: list[list[int]] = []
    thread = threading.Thread(target=lambda: answers.append(watched(["raise", "end"])))
    thread.start()
    thread.join(10)
    assert answers == [[1]]


def test_interrupted_renders_as_one_line() -> None:
    assert Interrupted("x was cut short")._render_traceback_() == ["Interrupted: x was cut short"]


def test_an_interrupt_promises_no_end_of_a_step_that_nobody_is_here_to_do() -> None:
    run = FakeRun()
    told = interrupt_run(run, 1, "vm to come back, up to 5 min more", 5.0)
    assert "within 10 s" in told and "last committed step" in told and "Interrupt again" in told
    assert "after this step" not in told
    assert "Aborting" in interrupt_run(run, 2, "vm to come back")
