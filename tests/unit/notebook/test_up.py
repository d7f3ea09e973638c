"""What %guava_up says before it does anything: hosts that let nothing through, and memory that is short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from guava_nb.cluster.session_file import SessionFile
from guava_nb.doctor.memory import WORKER_BYTES, Memory
from guava_nb.notebook import magics
from guava_nb.notebook import notebook_session as session
from guava_nb.notebook import up as opening
from guava_nb.notebook.host import Host, is_loopback
from guava_nb.notebook.up import memory_caution
from guava_nb.protocol.joincode import JoinCode
from tests.support.fake_session import SECRET_CODE, FakeOrchestrator

RULE = "Binder accepts no connection from outside"


@pytest.fixture
def on_binder(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (magics, session):
        monkeypatch.setattr(module, "detect_host", lambda shell: Host.BINDER)


@pytest.mark.parametrize(
    "line",
    [
        "%guava_up --workers 1",
        "%guava_up --local 2 --tunnel ngrok",
        "%guava_up --local 2 --workers 3",
        "%guava_up --local 2 --host 0.0.0.0",
        f"%guava_up --connect {SECRET_CODE}",
    ],
)
def test_on_binder_whoever_wants_others_is_told_what_works(notebook: Any, on_binder: None, line: str) -> None:
    shown = notebook.run(line)
    assert shown.ok, shown.text
    assert shown.lines[0].startswith(RULE) and "%guava_up --local 2" in shown.lines[0]


def test_on_binder_local_workers_need_no_word(notebook: Any, on_binder: None) -> None:
    assert RULE not in notebook.run("%guava_up --local 2").text
    assert RULE not in notebook.run("%guava_up").text  # shows the same session


def test_on_binder_a_tunnel_of_the_settings_is_seen_too(
    notebook: Any, on_binder: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GUAVA_TUNNEL", "cloudflared")
    assert RULE in notebook.run("%guava_up --local 2").text


def test_elsewhere_a_tunnel_needs_no_word(notebook: Any) -> None:
    assert RULE not in notebook.run("%guava_up --local 2 --tunnel ngrok").text


def test_on_binder_joining_says_so_unless_the_session_is_on_this_machine(notebook: Any, on_binder: None) -> None:
    assert RULE not in notebook.run(f"%guava_worker {SECRET_CODE}").text
    far = JoinCode.decode(SECRET_CODE).with_address("0.tcp.ngrok.io", 4242).encode()
    assert RULE in notebook.run(f"%guava_worker {far}").text


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_this_machine(address: str) -> None:
    assert is_loopback(address)
    assert not is_loopback("10.0.0.127")


def test_workers_that_fit_need_no_word() -> None:
    assert memory_caution(2, Memory(2 * WORKER_BYTES, 1 << 31)) == ""


def test_workers_that_do_not_fit_are_told_with_both_figures() -> None:
    said = memory_caution(3, Memory(3 * WORKER_BYTES - 1, 2_000_000_000, is_limited=True))
    assert "room for 2, not for 3 more" in said and "of the 2.0 GB that this host gives" in said


def test_memory_is_told_before_workers_start_and_only_for_those_that_are_missing(
    notebook: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = Memory(2 * WORKER_BYTES, 2_000_000_000)
    monkeypatch.setattr(opening, "memory_here", lambda: free)
    assert "Memory is short" not in notebook.run("%guava_up --local 2").text
    free = Memory(0, 2_000_000_000)
    assert "Memory is short" not in notebook.run("%guava_up --local 2").text  # they are here already
    shown = notebook.run("%guava_up --local 3")
    assert shown.ok and shown.lines[0].startswith("Memory is short") and "not for 1 more" in shown.lines[0]


def test_more_workers_than_this_machine_can_ever_hold_are_refused_and_none_is_started(notebook: Any) -> None:
    shown = notebook.run("%guava_up --local 99999")
    assert "--local 99999: a worker takes about" in shown.text and "give a smaller number" in shown.text
    assert notebook.orchestrators == []


def test_a_worker_from_elsewhere_that_goes_meanwhile_is_not_waited_for(notebook: Any) -> None:
    """Its machine lost its power just before: its seat is noticed to be empty while the new one starts."""
    notebook.run("%guava_up --workers 1")
    orchestrator = notebook.orchestrator
    orchestrator.here.append("colab")
    orchestrator.waiting = orchestrator.here.clear
    assert notebook.run("%guava_up --local 1").ok
    assert [name for name, _ in orchestrator.calls].count("launch") == 1
    assert orchestrator.here == ["worker-0"]


def counts(notebook: Any) -> list[Any]:
    return [value for name, value in notebook.orchestrator.calls if name == "wait_for_launched"]


def test_workers_elsewhere_are_started_once_and_waited_for(notebook: Any) -> None:
    shown = notebook.run("%guava_up --on ssh:gpu1,gpu2")
    assert shown.ok and "Starting workers by ssh." in shown.text and SECRET_CODE not in shown.text
    assert SECRET_CODE in notebook.run("%guava_up --on ssh:gpu1,gpu2 --show-code").text
    assert notebook.orchestrator.expected_workers == 2 and counts(notebook) == [2]
    again = notebook.run("%guava_up --on ssh:gpu1,gpu2")
    assert "was started already; %guava_down ends it" in again.text and counts(notebook) == [2]


def test_a_queue_is_not_waited_for_and_a_number_of_workers_stands(notebook: Any) -> None:
    shown = notebook.run("%guava_up --on slurm:8,time=4:00:00 --workers 5")
    assert shown.ok and "They join when they are started there" in shown.text
    assert notebook.orchestrator.expected_workers == 5 and counts(notebook) == []


def test_local_workers_and_others_are_both_expected(notebook: Any) -> None:
    assert notebook.run("%guava_up --on slurm:2 --local 1").ok
    assert notebook.orchestrator.expected_workers == 3


def test_those_that_are_late_are_told(notebook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeOrchestrator, "late", 1)
    assert "1 of 2 workers are here" in notebook.run("%guava_up --on ssh:a,b").text


def test_tab_offers_launchers(notebook: Any) -> None:
    assert {"ssh:", "slurm:"} == set(notebook.complete("%guava_up --on s"))
    assert "--on NAME:WHAT" in notebook.run("%guava_up -h").text


def test_a_second_kernel_of_one_notebook_is_told_that_there_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert opening._usable_session_file() == str(opening.session_file()) and capsys.readouterr().out == ""
    other = SessionFile.take(opening.session_file())
    try:
        assert opening._usable_session_file() == str(opening.session_file())
        assert "Another kernel has a session of this notebook open" in capsys.readouterr().out
    finally:
        other.release(forget=True)
