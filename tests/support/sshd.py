"""A real sshd on this machine: its own port, host keys and accounts' keys, none of the system's; and an `ssh` that knows it.

It runs as whoever runs the tests, on the loopback unless told otherwise, and is gone at the end with its connections.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from tests.support.processes import eventually

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")


def why_not() -> str:
    """Why no sshd can be started here, or ""."""
    if SSHD is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        return "sshd, ssh and ssh-keygen (packages openssh-server, openssh-client) are not all here"
    return ""


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as sock:
        return sock.getsockname()[1]


class Sshd:
    """An sshd and its users.

    Args:
        folder: for keys and logs; nobody else may write there, or sshd trusts no key in it.
        address: to listen on.
        prefix: words before the command, such as those that enter a network namespace.
        settings: lines of its configuration.
    """

    def __init__(self, folder: Path, address: str = "127.0.0.1", port: int = 0, prefix: Sequence[str] = ()) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder, self.address, self.prefix = folder, address, tuple(prefix)
        self.port = port or free_port()
        self.user = getpass.getuser()
        self.process: subprocess.Popen[bytes] | None = None
        for key in ("host", "user", "stranger"):
            self.new_key(key)
        shutil.copy(folder / "user.pub", folder / "authorized")
        self.trust()

    def new_key(self, name: str) -> None:
        path = self.folder / name
        path.unlink(missing_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, timeout=20)

    def trust(self) -> None:
        """Put the present host key among those that the client knows."""
        key = " ".join((self.folder / "host.pub").read_text().split()[:2])
        (self.folder / "known").write_text(f"[{self.address}]:{self.port} {key}\n")

    def start(self, *settings: str) -> None:
        if os.geteuid() == 0:
            os.makedirs("/run/sshd", exist_ok=True)  # it insists
        lines = [
            f"Port {self.port}", f"ListenAddress {self.address}", f"HostKey {self.folder}/host",
            f"AuthorizedKeysFile {self.folder}/authorized", "StrictModes no", "UsePAM no", "PidFile none",
            "PasswordAuthentication no", "KbdInteractiveAuthentication no", "LogLevel VERBOSE", *settings,
        ]  # fmt: skip
        (self.folder / "sshd_config").write_text("\n".join(lines) + "\n")
        with (self.folder / "sshd.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        eventually(
            lambda: f"Server listening on {self.address} port {self.port}" in self.log(),
            20,
            f"sshd listens: {self.log()}",
        )

    def log(self) -> str:
        path = self.folder / "sshd.log"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""

    def stop(self) -> None:
        """End it and every connection that it has: as if the machine went away."""
        process, self.process = self.process, None
        if process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for child in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        process.wait(20)
        (self.folder / "sshd.log").unlink(missing_ok=True)

    @property
    def config(self) -> Path:
        """A configuration for ssh in which this server is called "relay"."""
        path = self.folder / "ssh_config"
        path.write_text(
            f"Host relay\n  HostName {self.address}\n  Port {self.port}\n  User {self.user}\n"
            f"  IdentityFile {self.folder}/user\n  IdentitiesOnly yes\n  IdentityAgent none\n"
            f"  UserKnownHostsFile {self.folder}/known\n"
        )
        return path

    @property
    def path(self) -> str:
        """A PATH whose `ssh` reads that configuration, for programs that are given none."""
        folder = self.folder / "bin"
        folder.mkdir(exist_ok=True)
        script = folder / "ssh"
        script.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.config} "$@"\n')
        script.chmod(0o700)
        return os.pathsep.join((str(folder), os.path.dirname(sys.executable), os.environ["PATH"]))


@contextlib.contextmanager
def running(folder: Path, *settings: str, address: str = "127.0.0.1") -> Iterator[Sshd]:
    """A server that runs."""
    server = Sshd(folder, address)
    try:
        server.start(*settings)
        yield server
    finally:
        server.stop()
