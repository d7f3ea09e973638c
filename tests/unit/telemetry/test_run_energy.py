"""Energy of a run: what workers report, and what the orchestrator makes of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from guava_nb.protocol.messages import (
    AskEnergy,
    BoardEnergy,
    EndRun,
    Energy,
    Factory,
    Hello,
    Message,
    PhaseReport,
    Prepare,
    RunSpec,
)
from guava_nb.telemetry import FORWARD, SensorError
from guava_nb.telemetry.energy_reporter import EnergyReporter
from guava_nb.telemetry.run_energy import EnergyBook, RunEnergy
from tests.support.sensors import Clock, Scripted

SPEC = RunSpec(model=Factory("m"), criterion=Factory("MSELoss"), step=None, optimizer=Factory("SGD"), scheduler=None)


class Told:
    """Takes what a reporter sends."""

    def __init__(self) -> None:
        self.messages: list[Energy] = []
        self._changed = threading.Condition()

    def __call__(self, message: Message, buffers: Sequence[memoryview]) -> None:
        assert isinstance(message, Energy)
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()

    def answer(self, mark: int) -> Energy:
        with self._changed:
            assert self._changed.wait_for(lambda: any(m.mark == mark for m in self.messages), 30)
        return next(m for m in self.messages if m.mark == mark)


def reporter(told: Told, at: Any) -> EnergyReporter:
    return EnergyReporter(torch.device("cpu"), told, sensors=[Scripted(at, Clock())])


def test_a_worker_answers_with_its_joules_and_phases() -> None:
    told, watts = Told(), iter(range(10**6))
    made = reporter(told, lambda s: float(next(watts)))
    assert made.post(Prepare("r1", (), SPEC)) is False
    made.phases.add(FORWARD, 0.0, 1e12)  # everything that is measured falls into it
    assert made.post(AskEnergy("r1", 1)) and made.post(AskEnergy("r1", 2))
    first, second = told.answer(1), told.answer(2)
    assert first.boards[0].joules is not None and second.boards[0].joules is not None
    assert 0 <= first.boards[0].joules < second.boards[0].joules
    assert second.seconds > 0 and second.host_memory_bytes
    assert [part.phase for part in second.phases] == [FORWARD]
    assert second.phases[0].joules == pytest.approx(second.boards[0].joules)
    made.post(AskEnergy("another run", 3))
    made.post(EndRun("r1"))
    made.post(Prepare("r2", (), SPEC))
    made.post(AskEnergy("r2", 4))
    again = told.answer(4)
    assert again.run_id == "r2" and all(m.mark != 3 for m in told.messages)
    made.close()
    made.close()
    assert all(thread.name != "guava-energy" for thread in threading.enumerate())


@pytest.mark.parametrize("fault", [SensorError("gone"), RuntimeError("a driver's own"), KeyError("x")])
def test_a_sensor_that_fails_costs_its_figure_only(fault: Exception) -> None:
    def at(seconds: float) -> float:
        raise fault

    told = Told()
    made = reporter(told, at)
    made.post(Prepare("r", (), SPEC))
    made.post(AskEnergy("r", 7))
    answer = told.answer(7)
    assert answer.boards[0].joules is None and answer.boards[0].problem
    made.close()


def test_a_report_that_fails_is_one_lost_report(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(Told):
        def __call__(self, message: Message, buffers: Sequence[memoryview]) -> None:
            assert isinstance(message, Energy)
            if message.mark in (1, 2):
                raise ValueError("cannot be sent")
            super().__call__(message, buffers)

    told = Fails()
    made = reporter(told, lambda s: 1.0)
    made.post(Prepare("r", (), SPEC))
    for mark in (1, 2, 3):
        made.post(AskEnergy("r", mark))
    assert told.answer(3).boards
    made.close()
    assert len([record for record in caplog.records if record.exc_info]) == 1


HELLO = Hello(
    name="w", program="spawned", versions={}, hostname="host", device="cuda:0", device_name="a GPU", device_uuid=""
)


class Session:
    """Workers that answer what they are told to."""

    def __init__(self) -> None:
        self.book = EnergyBook()
        self.asked: list[tuple[int, int]] = []
        self.worked = {0: (30, 600.0)}
        self.run = RunEnergy(
            self.book, "r", self.tell, lambda rank: f"w{rank}", lambda rank: HELLO,
            lambda rank: self.worked.get(rank, (0, None)),
        )  # fmt: skip

    def tell(self, rank: int, message: Message) -> bool:
        assert isinstance(message, AskEnergy)
        self.asked.append((rank, message.mark))
        return rank != 9

    def report(self, rank: int, joules: float | None, key: str = "", mark: int = 0, run_id: str = "r") -> None:
        board = BoardEnergy(
            key=key or f"host/GPU-{rank}", name="a GPU", method="NVML energy counter", joules=joules, readings=10
        )
        self.book.take(
            rank,
            Energy(
                run_id=run_id, mark=mark, seconds=2.0, boards=(board,), phases=(PhaseReport("forward", 1.0, joules),)
            ),
        )


def test_a_run_adds_up_its_workers_and_epochs() -> None:
    session = Session()
    session.run.takes_part((0, 1))
    session.report(0, 10.0)
    session.run.end_epoch([0, 1, 9])
    mark = session.asked[-1][1]
    session.report(0, 30.0, mark=mark)
    session.report(1, 40.0, mark=mark)
    session.report(1, 7.0, run_id="an older run")
    session.run.end_epoch([0, 1])
    session.report(0, 50.0, mark=session.asked[-1][1])
    session.report(1, 90.0)
    first, second = session.run.records()
    assert (first["worker"], first["joules"], first["method"]) == ("w0", 50.0, "NVML energy counter")
    assert first["epochs"] == [30.0, 20.0]
    assert (second["joules"], second["epochs"]) == (90.0, [40.0, None])  # its second answer did not come
    assert first["phases"] == {"forward": {"seconds": 1.0, "joules": 50.0}}
    assert session.run.joules() == 140.0


def test_two_workers_on_one_board_count_once() -> None:
    session = Session()
    session.report(0, 100.0, key="host/GPU-x")
    session.report(1, 101.0, key="host/GPU-x")
    first, second = session.run.records()
    assert session.run.joules() == 100.0
    assert second["joules"] is None and "w0" in second["method"]
    assert second["boards"][0]["counted_at"] == "w0"


def test_what_was_not_measured_is_not_0() -> None:
    session = Session()
    session.run.takes_part((0, 1))
    session.report(0, None)
    assert [r["joules"] for r in session.run.records()] == [None, None]
    assert [r["method"] for r in session.run.records()] == ["not measured"] * 2
    assert session.run.joules() is None


def test_the_last_word_is_waited_for_and_no_longer_than_it_takes() -> None:
    session = Session()
    session.report(0, 1.0)

    def tell(rank: int, message: Message) -> bool:
        assert isinstance(message, AskEnergy)
        threading.Thread(target=session.report, args=(rank, 5.0), kwargs={"mark": message.mark}).start()
        return True

    session.run._tell = tell
    session.run.end([0])
    assert session.run.joules() == 5.0
    session.report(0, 1000.0)  # idle after the run: not a part of it
    assert session.run.joules() == 5.0


def test_a_report_that_comes_while_figures_are_read_waits() -> None:
    """A status is asked for by any thread, and a report may bring figures that none before it had."""
    session, reported = Session(), threading.Event()
    session.report(0, 1.0)

    def report() -> None:
        session.report(0, 2.0)
        reported.set()

    def worked(rank: int) -> tuple[int, float | None]:
        session.run._worked = lambda rank: (0, None)
        reporter.start()
        assert not reported.wait(0.05)
        return 0, None

    reporter = threading.Thread(target=report)
    session.run._worked = worked
    assert session.run.records()[0]["joules"] == 1.0
    reporter.join(10)
    assert reported.is_set() and session.run.records()[0]["joules"] == 2.0
