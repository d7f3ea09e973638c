"""`--on ssh:...` with a real sshd: the check before the start, the way back, and that the end ends what was started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from guava_nb import Orchestrator
from guava_nb.errors import ConfigError
from guava_nb.launchers.install_check import PythonThere
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
    lines = [(one, one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])]
    return [one for one, words in lines if mark in words and "worker" in words]


def end_with_the_session(server: sshd.Sshd, started: SshLauncher, orchestrator: Orchestrator) -> None:
    assert sorted(orchestrator.run_code("1 + 1").values()) == [2] * started.count
    orchestrator.close()


def end_by_a_later_process(server: sshd.Sshd, started: SshLauncher, orchestrator: Orchestrator) -> None:
    """As a kernel that was started anew knows it: by its text and mark. The workers obey nothing."""
    for worker in marked(started.mark):
        worker.suspend()
    later = launcher(server, started.what)
    later.mark = started.mark
    assert later.end() == "" and not marked(started.mark)
    eventually(
        lambda: "relay or the way to it ended the worker" in " ".join(map(str, orchestrator.status().notes)),
        30,
        "it is told",
    )


@pytest.mark.parametrize("hosts", ["relay", "relay,relay-2"])
@pytest.mark.parametrize("end", [end_with_the_session, end_by_a_later_process])
def test_workers_come_back_through_a_port_and_are_ended_and_nothing_else(
    server: sshd.Sshd, hosts: str, end: Callable[..., None]
) -> None:
    started = launcher(server, f"{hosts},device=cpu,python={sys.executable}")
    words = [sys.executable, "-c", "input()", "worker", "--mark", f"{started.mark}0"]  # nearly the same, and not ours
    bystander = subprocess.Popen(words, stdin=subprocess.PIPE)
    try:
        with Orchestrator() as orchestrator:  # listens on the loopback: without the port there is no way to it
            assert orchestrator.launch_on(started) is started and started.count == len(hosts.split(","))
            assert orchestrator.wait_for_launched(started.count, 120) == started.count
            code, said = (
                orchestrator.join_code,
                [word for process in marked(started.mark) for word in process.cmdline()],
            )
            assert said and not any(code.encode() in word or word.startswith("guava1:") for word in said)
            end(server, started, orchestrator)
        eventually(lambda: not marked(started.mark), 30, "the workers are gone")
        assert bystander.poll() is None
    finally:
        bystander.communicate(b"\n", timeout=20)


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
    begin, python = started._start_on, PythonThere(sys.executable, "3", "1", "2")
    monkeypatch.setattr(started, "_pythons", dict.fromkeys(("relay", "relay-2"), python))
    monkeypatch.setattr(started, "check", lambda: None)

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
