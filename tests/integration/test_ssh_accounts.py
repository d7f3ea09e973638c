"""`--on ssh:...` with two Unix accounts of their own behind a real sshd, one of them through the other as a jump host."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from guava_nb import Orchestrator
from guava_nb.errors import ConfigError
from guava_nb.launchers.ssh import SshLauncher
from tests.support import sshd
from tests.support.processes import ROOT, eventually

ACCOUNTS = ("guava-test-a", "guava-test-b")


def _why_not() -> str:
    if os.name == "nt" or os.geteuid() != 0:
        return "only root makes accounts"
    if shutil.which("useradd") is None or shutil.which("userdel") is None:
        return "useradd and userdel are not here"
    return sshd.why_not()


pytestmark = [pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "-"), pytest.mark.timeout(180)]


@dataclass(frozen=True)
class Machine:
    """An sshd with accounts; `python` is one that they may run, "" where there is none."""

    config: Path
    python: str

    def launcher(self, what: str) -> SshLauncher:
        return SshLauncher(what, ("-F", str(self.config)))


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    folder = Path(tempfile.mkdtemp(prefix="guava-accounts-"))
    server = sshd.Sshd(folder / "sshd")
    try:
        for account in ACCOUNTS:
            no_password = ["--password", "*"]  # sshd lets nobody into an account that is locked, as it would be without
            subprocess.run(
                ["useradd", "--create-home", "--shell", "/bin/sh", *no_password, account], check=True, timeout=30
            )
        for path in (folder, server.folder):
            path.chmod(0o755)  # sshd reads an account's keys as that account
        bare = folder / "bin"  # all that a machine without Python has
        bare.mkdir()
        (bare / "sh").symlink_to("/bin/sh")
        libraries = os.pathsep.join((str(ROOT), sysconfig.get_path("purelib")))
        server.start(
            "AllowTcpForwarding yes", "Match Address 127.0.0.2", f"SetEnv PATH={bare}", "Match all",
            f"SetEnv PYTHONPATH={libraries}",
        )  # fmt: skip
        yield Machine(_config(server), _python_for(ACCOUNTS[0], libraries))
    finally:
        server.stop()
        for account in ACCOUNTS:
            subprocess.run(["userdel", "--remove", account], capture_output=True, timeout=30, check=False)
        shutil.rmtree(folder)


def _config(server: sshd.Sshd) -> Path:
    closed = sshd.free_port()
    hosts = {
        "a": ("guava-test-a", server.port, ()),
        "b": ("guava-test-b", server.port, ("ProxyJump a",)),
        "bare": ("guava-test-b", server.port, ("BindAddress 127.0.0.2",)),
        "off": ("guava-test-a", closed, ()),
        "stranger": ("guava-test-a", server.port, (f"IdentityFile {server.folder}/stranger",)),
        "off-behind-a": ("guava-test-b", closed, ("ProxyJump a",)),
        "b-behind-off": ("guava-test-b", server.port, ("ProxyJump off",)),
        "b-behind-stranger": ("guava-test-b", server.port, ("ProxyJump stranger",)),
    }
    lines = []
    for name, (user, port, more) in hosts.items():
        lines += [f"Host {name}", f"User {user}", f"Port {port}", *more]
    lines += [
        "Host *", "HostName 127.0.0.1", "IdentitiesOnly yes", "IdentityAgent none", "Host * !stranger",
        f"IdentityFile {server.folder}/user", "Host *", f"UserKnownHostsFile {server.folder}/known",
    ]  # fmt: skip
    path = server.folder / "ssh_config"
    path.write_text("\n".join(lines) + "\n")
    return path


def _python_for(account: str, libraries: str) -> str:
    """A Python of this version that another account may run with the libraries of this one."""
    for python in (sys.executable, f"/usr/bin/python{sysconfig.get_python_version()}"):
        words = [
            "runuser",
            "-u",
            account,
            "--",
            "env",
            f"PYTHONPATH={libraries}",
            python,
            "-c",
            "import guava_nb, msgspec",
        ]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if subprocess.run(words, capture_output=True, timeout=60, check=False).returncode == 0:
                return python
    return ""


def workers(mark: str) -> dict[str, psutil.Process]:
    """The workers of one start, by their account."""
    found = {}
    for process in psutil.process_iter(["cmdline", "uids"]):
        words, uids = process.info["cmdline"] or (), process.info["uids"]
        if mark in words and "worker" in words and uids is not None:
            found[pwd.getpwuid(uids.real).pw_name] = process
    return found


@pytest.mark.whole  # four processes that load torch
def test_two_accounts_work_in_one_session_the_second_behind_the_first_and_both_are_ended(machine: Machine) -> None:
    if not machine.python:
        pytest.skip("no Python of this version can be run by another account")
    started = machine.launcher(f"a,b,device=cpu,python={machine.python}")
    with Orchestrator() as orchestrator:  # on the loopback: each account has a port that leads back
        orchestrator.launch_on(started)
        assert orchestrator.wait_for_launched(2, 120) == 2
        assert set(workers(started.mark)) == set(ACCOUNTS)
        assert set(orchestrator.run_code("import getpass; getpass.getuser()").values()) == set(ACCOUNTS)
        workers(started.mark)[ACCOUNTS[0]].suspend()  # obeys nothing: its own account ends it
    eventually(lambda: not workers(started.mark), 40, "the workers are gone")


@pytest.mark.parametrize(
    ("host", "sentence"),
    [
        ("off", "off is there, and its ssh port does not answer"),
        ("stranger", "stranger accepts none of the keys"),
        ("bare", "bare has no python3 or python: name one there"),
        ("off-behind-a", "jump host before off-behind-a accepts the login and does not get through to it .*refused"),
        ("b-behind-off", "b-behind-off leads through a jump host .*does not get past that one .*refused"),
        ("b-behind-stranger", "b-behind-stranger leads through a jump host .*Permission denied"),
    ],
)
def test_why_no_worker_can_be_started_is_told_of_the_right_machine(machine: Machine, host: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        machine.launcher(host).check()
