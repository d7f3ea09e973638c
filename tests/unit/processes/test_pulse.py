"""When the process beside a worker speaks for it."""

from __future__ import annotations

import os

from guava_nb.processes.pulse import Pulse, _seen
from guava_nb.protocol.messages import Vitals


class Watched:
    """A worker as its watcher sees it, second by second."""

    def __init__(self) -> None:
        self.now, self.cpu_s, self.stopped = 0.0, 0.0, False
        self.doing = ("working", 3)
        self.pulse = Pulse(5.0, 0.0)

    def run(self, seconds: int, talks: bool = True, cores: float = 0.0) -> list[Vitals]:
        told = []
        for _ in range(seconds):
            self.now += 1.0
            self.cpu_s += cores
            if talks:
                self.pulse.heard(self.now)
            vitals = self.pulse.look(self.now, self.doing, 7, lambda: (self.stopped, self.cpu_s))
            told += [] if vitals is None else [vitals]
        return told


def test_nothing_is_told_of_a_worker_that_talks_and_gets_on() -> None:
    worker = Watched()
    for step in range(30):
        worker.doing = ("working", step)
        assert worker.run(5) == []
    worker.doing = ("ready", 30)
    assert worker.run(100) == []


def test_a_silent_worker_is_told_of_as_often_as_asked_and_its_return_once() -> None:
    worker = Watched()
    told = worker.run(63, talks=False, cores=1.0)
    assert [v.quiet_s for v in told] == list(range(5, 64, 5))
    assert all(v.busy_cores == 1.0 and not v.is_stopped for v in told)
    [back] = worker.run(3)
    assert back.quiet_s == 0


def test_a_silence_is_spoken_for_for_a_limited_time_and_anew_after_each_return() -> None:
    worker = Watched()
    for _ in range(2):
        told = worker.run(400, talks=False)
        assert [v.quiet_s for v in told] == list(range(5, 301, 5)) and [v.keeps_s for v in told] == list(
            range(295, -1, -5)
        )
        [back] = worker.run(3)
        assert back.quiet_s == 0


def test_stopped_and_standing_still_are_seen() -> None:
    worker = Watched()
    worker.stopped = True
    assert all(v.is_stopped for v in worker.run(20, talks=False))
    worker.stopped = False
    assert [(v.is_stopped, v.busy_cores) for v in worker.run(10, talks=False)] == [(False, 0.0)] * 2


def test_a_worker_long_at_one_step_is_told_of_though_it_talks() -> None:
    worker = Watched()
    told = worker.run(42, cores=2.0)
    assert len(told) == 4 and all(v.quiet_s == 0 and v.busy_cores == 2.0 and v.stuck_s >= 10 for v in told)


def test_a_watcher_that_stood_still_itself_blames_no_worker() -> None:
    worker = Watched()
    worker.doing = ("ready", 3)
    worker.run(3)
    worker.now += 60  # both slept, as a laptop does; what the worker said meanwhile is not read yet
    assert worker.run(4, talks=False) == []


def test_a_process_is_looked_at_from_outside() -> None:
    seen = _seen(os.getpid())
    assert seen is not None and not seen[0] and seen[1] > 0
    assert _seen(2**22 + 1) is None
