"""`--on ssh:...` with a real sshd: the check before the start, the way back, and that the end ends what was started."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from guava_nb import Orchestrator
from guava_nb.errors import ConfigError
from guava_nb.launchers.ssh import SshLauncher
from tests.support import sshd
from tests.support.processes import ROOT, eventually

pytestmark = [
    pytest.mark.skipif(bool(sshd.why_not()), reason=sshd.why_not() or "-"),
    pytest.mark.skipif(os.name == "nt", reason="sshd of POSIX"),
    pytest.mark.timeout(180),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sshd.Sshd]:
    """One machine under two names, as two entries of ~/.ssh/config."""
    folder = tmp_path_factory.mktemp("sshd")
    with sshd.running(folder, f"SetEnv PYTHONPATH={ROOT} OMP_NUM_THREADS=1", "AllowTcpForwarding yes") as running:
        text = running.config.read_text()
        running.config.write_text(text.replace("Host relay", "Host relay relay-2"))
        yield running


def launcher(server: sshd.Sshd, what: str) -> SshLauncher:
    return SshLauncher(what, ("-F", str(server.folder / "ssh_config")))


def marked(mark: str) -> list[psutil.Process]:
    """The workers of one start."""
    return [
        one
        for one in psutil.process_iter(["cmdline"])
        if mark in (one.info["cmdline"] or ()) and "worker" in one.info["cmdline"]
    ]


def test_workers_of_two_hosts_come_back_through_a_port_and_go_with_the_session(server: sshd.Sshd) -> None:
    started = launcher(server, f"relay,relay-2,device=cpu,python={sys.executable}")
    with Orchestrator() as orchestrator:  # listens on the loopback: without the port there is no way to it
        assert orchestrator.launch_on(started) is started and started.count == 2
        assert orchestrator.wait_for_launched(2, 90) == 2
        assert "relay, relay-2" in " ".join(orchestrator.status().notes)
        code = orchestrator.join_code.encode()
        words = [word for process in marked(started.mark) for word in process.cmdline()]
        assert words and code not in words and not any(word.startswith("guava1:") for word in words)
        assert sorted(orchestrator.run_code("1 + 1").values()) == [2, 2]
    eventually(lambda: not marked(started.mark), 30, "the workers are gone")


def test_a_worker_that_does_not_leave_is_ended_and_no_other(server: sshd.Sshd) -> None:
    mine, other = (launcher(server, f"relay,device=cpu,python={sys.executable}") for _ in range(2))
    with Orchestrator() as orchestrator:
        for one in (mine, other):
            orchestrator.launch_on(one)
        assert orchestrator.wait_for_launched(2, 90) == 2
        (worker,) = marked(mine.mark)
        worker.suspend()  # obeys nothing
        later = launcher(server, mine.what)  # as a kernel that was started anew knows it: by its text and mark
        later.mark = mine.mark
        assert later.end() == "" and not marked(mine.mark)
        assert len(marked(other.mark)) == 1
        eventually(lambda: "relay or the way to it ended the worker" in mine.look(), 20, "its end is told")


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("relay,python=/nowhere/python", "no /nowhere/python.*python=/path/to/venv"),
        ("relay,python={folder}/old", "has guava_nb 0.0.1, and .* is here"),
        ("relay,python={folder}/bare", "has no torch: ssh relay .*pip install torch"),
        ("unknown.invalid", "finds no machine called unknown.invalid"),
    ],
)
def test_what_a_host_lacks_is_told_before_anything_starts(
    server: sshd.Sshd, tmp_path: Path, what: str, sentence: str
) -> None:
    for name, facts in (
        ("old", '["/old", "3.11", "0.0.1", "2.13", 0, ""]'),
        ("bare", '["/bare", "3.11", null, null, 0, "ModuleNotFoundError: x"]'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\necho 'guava-facts {facts}'\n")
        (tmp_path / name).chmod(0o755)
    found = launcher(server, what.format(folder=tmp_path))
    with pytest.raises(ConfigError, match=sentence):
        found.check()
    assert found.end() == "" or "unknown.invalid" in what


def test_a_start_that_fails_on_one_host_ends_the_others(server: sshd.Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    started = launcher(server, f"relay,relay-2,device=cpu,python={sys.executable}")
    begin = started._start_on

    def start_on(host: str) -> None:
        if host == "relay-2":
            raise ConfigError("the second host is on fire")
        begin(host)

    monkeypatch.setattr(started, "_start_on", start_on)
    with Orchestrator() as orchestrator:
        with pytest.raises(ConfigError, match="on fire"):
            orchestrator.launch_on(started)
        eventually(lambda: not marked(started.mark), 30, "the first one's worker is gone")
        assert orchestrator.launched(started.what) is None
