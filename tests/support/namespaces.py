"""Machines that cannot reach each other, on one machine: network namespaces, each with one cable to a common one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Interface names have 15 characters at most.
TAG = f"g{os.getpid() % 100000}"


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def why_not() -> str:
    """Why namespaces cannot be made here, or ""."""
    if shutil.which("ip") is None:
        return "the command ip (package iproute2) is not here"
    try:
        ip("netns", "add", f"{TAG}x")
        ip("netns", "del", f"{TAG}x")
    except OSError as error:
        return f"network namespaces are not permitted here: {error}"
    return ""


@dataclass
class Island:
    """A namespace; `hub` is the common one's address as seen from here."""

    name: str
    address: str
    hub: str
    interface: str
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, words: Sequence[str], log: Path) -> subprocess.Popen[str]:
        """Run Python in here, its output into a file."""
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with log.open("w") as out:
            process = subprocess.Popen(
                [*enter(self), sys.executable, *words],
                stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, cwd=ROOT, env=environ,
            )  # fmt: skip
        self.processes.append(process)
        return process


def enter(island: Island) -> tuple[str, ...]:
    """Words in front of a command that runs in there."""
    return ("ip", "netns", "exec", island.name)


@contextmanager
def islands(count: int) -> Iterator[tuple[Island, list[Island]]]:
    """A hub and so many namespaces that reach it and not each other; all is gone afterwards, whatever happens."""
    hub = Island(f"{TAG}h", "0.0.0.0", "127.0.0.1", "")
    others = [Island(f"{TAG}w{k}", f"10.77.{k}.2", f"10.77.{k}.1", f"{TAG}p{k}") for k in range(count)]
    try:
        for island in (hub, *others):
            ip("netns", "add", island.name)
            ip("-n", island.name, "link", "set", "lo", "up")
        for k, island in enumerate(others):
            ip("link", "add", island.interface, "netns", island.name, "type", "veth", "peer", "name", f"{TAG}h{k}",
               "netns", hub.name)  # fmt: skip
            for where, interface, address in (
                (island.name, island.interface, island.address), (hub.name, f"{TAG}h{k}", island.hub)
            ):  # fmt: skip
                ip("-n", where, "addr", "add", f"{address}/24", "dev", interface)
                ip("-n", where, "link", "set", interface, "up")
        yield hub, others
    finally:
        for island in (hub, *others):
            for process in island.processes:
                process.kill()
                process.wait()
            _clear(island.name)


def _clear(name: str) -> None:
    """End what still runs in a namespace (workers' children), and remove it."""
    with suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, timeout=20, check=False)
        for pid in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        ip("netns", "del", name)
