"""What a worker tells is looked at where it arrives; and nothing that arrives ends the thread that handles it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.cluster import line_rate as line_survey
from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.job import Job
from guava_nb.cluster.job_events import FromWorker
from guava_nb.cluster.notices import Notices
from guava_nb.cluster.report_checks import (
    first_invalid_energy,
    first_invalid_rate,
    is_valid,
    without_invalid,
)
from guava_nb.cluster.roster import shortened
from guava_nb.cluster.worker_output import OutputLog
from guava_nb.errors import LinkClosed
from guava_nb.link.session_events import MessageArrived, SessionClosed, VisitArrived
from guava_nb.protocol.messages import (
    FROM_WORKERS,
    BoardEnergy,
    CrashReport,
    Energy,
    Hello,
    LineMeasured,
    Message,
    PhaseReport,
    Prepared,
    ShardReport,
    TaskEnergy,
    Vitals,
    channel_of,
)
from tests.support.direct import DirectWorker
from tests.support.hostile_text import hostile, obeyed
from tests.support.training import job_for, loader, plan_for, spec

HELLO = Hello(
    name="w",
    program="spawned",
    versions={},
    hostname="host",
    device="cpu",
    device_name="a CPU",
    device_uuid="",
)
BAD = [-1e300, -1.0, math.nan, math.inf, -math.inf, 1e300]


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_sound_figure_is_finite_and_not_negative(figure: float) -> None:
    assert is_valid(figure) == (math.isfinite(figure) and -1e-6 <= figure <= 1e30)
    found, odd = without_invalid(
        ShardReport(
            run_id="r",
            generation=1,
            step=1,
            shard=0,
            loss_sum=1.0,
            count=1.0,
            finite=True,
            rows=4,
            forward_s=figure,
            backward_s=0.5,
            wait_s=0.25,
            tokens=figure,
        )
    )
    assert (odd == "") == is_valid(figure)
    assert (found.forward_s, found.tokens) == ((figure, figure) if is_valid(figure) else (0.0, None))
    assert (found.backward_s, found.wait_s, found.rows) == (0.5, 0.25, 4)


@pytest.mark.parametrize("bad", BAD)
def test_every_figure_of_a_report_is_looked_at(bad: float) -> None:
    board, fine = (
        BoardEnergy(key="k", name="n", method="m", joules=1.0),
        Energy(
            run_id="r",
            mark=0,
            seconds=1.0,
            boards=(BoardEnergy(key="k", name="n", method="m", joules=None),),
            rates=(None, 0.0),
        ),
    )
    assert first_invalid_energy(fine) == ""
    for report in (
        Energy(run_id="r", mark=0, seconds=bad),
        Energy(run_id="r", mark=0, seconds=1.0, boards=(board, BoardEnergy(key="k", name="n", method="m", joules=bad))),
        Energy(run_id="r", mark=0, seconds=1.0, phases=(PhaseReport("forward", bad, None),)),
        Energy(run_id="r", mark=0, seconds=1.0, tasks=(TaskEnergy("x", 1.0, bad, 1),)),
        Energy(run_id="r", mark=0, seconds=1.0, rates=(None, bad)),
        Energy(run_id="r", mark=0, seconds=1.0, power_w=bad),
        Energy(run_id="r", mark=0, seconds=1.0, up_bytes_s=bad),
    ):
        assert first_invalid_energy(report)
    for found in (LineMeasured(1, bad, 1.0), LineMeasured(1, 1.0, bad), LineMeasured(1, 0.0, 1.0)):
        assert first_invalid_rate(found)
    assert first_invalid_rate(LineMeasured(1, 1.0, 1.0)) == ""


class Seated:
    """A cluster with one worker whose session is told what to say; what it handled is known by a `Log` that came through."""

    def __init__(self, folder: Path) -> None:
        self.notices: list[str] = []
        self.cluster = Cluster(OutputLog(folder), self.notices.append)
        self.session: Any = DirectWorker(self.cluster, "w").session
        self.session.send = lambda *args: None
        self.done = 0
        self.say(HELLO)

    def say(self, message: Message) -> None:
        self.cluster.on_event(MessageArrived(self.session, channel_of(message), message, memoryview(b""), self._count))

    def _count(self) -> None:
        self.done += 1

    def lose(self) -> None:
        """Close its session, and wait until all that came before is handled."""
        self.cluster.on_event(SessionClosed(self.session, LinkClosed("gone"), False))
        self.cluster.close()


@pytest.fixture
def seated(tmp_path: Path) -> Seated:
    return Seated(tmp_path)


@pytest.mark.parametrize("bad", BAD)
def test_an_odd_report_is_dropped_and_told_once(seated: Seated, bad: float) -> None:
    seated.say(Energy(run_id="r", mark=0, seconds=1.0))
    seated.say(Energy(run_id="r", mark=0, seconds=bad))
    seated.say(Energy(run_id="r", mark=0, seconds=bad))
    seated.lose()
    told = seated.cluster.energy.newest(0)
    assert told is not None and told.seconds == 1.0
    assert len([n for n in seated.notices if n.startswith("w") and "invalid energy value" in n]) == 1
    assert seated.cluster.roster.members[0].state == "lost" and seated.done == 4


def test_the_dispatcher_survives_what_an_event_makes_of_it(
    seated: Seated, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: Any) -> None:
        raise OverflowError("no such figure")

    monkeypatch.setattr(seated.cluster.energy, "take", fails)
    seated.say(Energy(run_id="r", mark=0, seconds=1.0))
    seated.lose()
    assert seated.cluster.roster.members[0].state == "lost" and seated.done == 2
    assert any(record.exc_info for record in caplog.records)


def test_odd_rates_and_odd_steps_name_the_worker(seated: Seated, monkeypatch: pytest.MonkeyPatch) -> None:
    class AnsweredJob(Job):
        """Gets the answer that a worker would give."""

        def pump(self, until: Any, timeout_s: float | None = None) -> bool:
            self.handle(FromWorker(0, LineMeasured(7, math.nan, 5.0, 10), memoryview(b""), lambda: None))
            return True

    assert seated.cluster.wait_for(1, 30.0) == [0]
    monkeypatch.setattr(line_survey, "Job", AnsweredJob)
    monkeypatch.setattr(line_survey, "_ids", iter([7]))
    assert "The line to w is not in these rates: up_bytes_s = nan." in line_survey.measure_lines(seated.cluster)
    assert seated.cluster.roster.members[0].line == (None, None)
    exchange = job_for(seated.cluster, spec(), plan_for(loader())).window.exchange
    bad = ShardReport(
        run_id="r",
        generation=1,
        step=1,
        shard=0,
        loss_sum=1.0,
        count=1.0,
        finite=True,
        rows=4,
        forward_s=math.nan,
        backward_s=0.0,
        wait_s=0.0,
    )
    assert exchange._sound(0, bad).forward_s == 0.0
    assert exchange._sound(0, bad).forward_s == 0.0
    seated.lose()
    assert [n.split(" reported")[0] for n in seated.notices if "an invalid" in n] == ["w", "w"]
    assert sum("line" in n for n in seated.notices) == 1


def test_every_text_of_every_record_of_a_worker_is_clean_before_anything_sees_it(
    seated: Seated, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Message] = []
    monkeypatch.setattr(seated.cluster.relay, "on_event", lambda event: seen.append(event.message))
    monkeypatch.setattr(seated.cluster._programs, "on_message", lambda session, message: seen.append(message))
    for record in (*FROM_WORKERS, CrashReport, Vitals):
        if record in FROM_WORKERS:
            seated.say(hostile(record))
        else:
            seated.cluster.on_event(VisitArrived(b"", hostile(record)))
    assert {type(message) for message in seen} == {*FROM_WORKERS, CrashReport, Vitals}
    assert [place for message in seen for place in obeyed(message, type(message).__name__)] == []
    seated.cluster.close()


def test_what_a_worker_could_not_prepare_is_told_without_what_a_terminal_obeys(seated: Seated) -> None:
    seen: list[Any] = []
    seated.cluster.takes = lambda rank, message, payload: bool(seen.append(message)) or True
    assert seated.cluster.wait_for(1, 30.0) == [0]
    seated.say(Prepared(run_id="r", ok=False, problem=f"no {CLIPBOARD}", traceback=f"File {UP}"))
    assert (seen[0].problem, seen[0].traceback) == (
        f"no {SHOWN}]52;c;bHM={SHOWN}",
        f"File {SHOWN}[2A{SHOWN}[J",
    )
    seated.cluster.close()


SHOWN = "\N{REPLACEMENT CHARACTER}"
CLIPBOARD, UP, TITLE = "\x1b]52;c;bHM=\x07", "\x1b[2A\x1b[J", "\x9b31;1H"


def test_control_characters_reach_neither_lines_nor_notices_nor_names() -> None:
    log, notices, kept = OutputLog(None), Notices(), list[str]()
    for text in (CLIPBOARD, UP, TITLE, "over\rwritten", "\x1b[1;31"):
        log.add("a", "stdout", [text])
        notices.add(text)
        texts = dict.fromkeys(("name", "hostname", "device_name"), f"{text}\nworker-2 joined")
        hello = shortened(Hello(program="spawned", versions={}, device="cpu", device_uuid="", **texts))
        kept += [hello.name, hello.hostname, *log.tail("a"), notices.numbered(1)[0][1]]
    assert not any(char in text for text in kept for char in "\x1b\x07\x9b\r\n")
    log.add("a", "stdout", ["\x1b[32mgreen\x1b[0m"])
    assert log.tail("a", 1) == ["\x1b[32mgreen\x1b[0m"]
    texts = dict.fromkeys(("name", "hostname", "device_name"), "\x1b[31mw\u202e1\u2028")
    hello = shortened(Hello(program="spawned", versions={}, device="cpu", device_uuid="", **texts))
    assert {hello.name, hello.hostname, hello.device_name} == {f"w{SHOWN}1{SHOWN}"}, "names have no colours"
