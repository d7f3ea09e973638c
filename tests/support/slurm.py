"""A real Slurm on this machine: its own munge, controller and three nodes, none of the system's; gone at the end."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.support.processes import eventually
from tests.support.sshd import free_port

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scancel", "squeue", "scontrol", "sinfo")
_PATH = f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin"
NODES = ("n1", "n2", "n3")


def why_not() -> str:
    """Why no Slurm can be started here, or ""."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"{', '.join(missing)} (packages slurmctld, slurmd, slurm-client, munge) are not here"
    return "" if os.geteuid() == 0 else "slurmd starts tasks as root"


_SETTINGS = """
ClusterName=test
SlurmctldHost={host}
SlurmUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPort={port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
MpiDefault=none
JobRequeue=1
SwitchType=switch/none
"""


class Slurm:
    """Its daemons.

    Args:
        folder: short, since the path of a socket is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._daemons = folder, list[subprocess.Popen[bytes]]()
        folder.chmod(0o755)
        lines = [_SETTINGS.format(folder=folder, host=socket.gethostname(), port=free_port())]
        for name in NODES:
            (folder / f"spool-{name}").mkdir()
            where = f"NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={free_port()}"
            lines.append(f"NodeName={name} {where} CPUs=2 RealMemory=2000")
        lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
        (folder / "state").mkdir()
        (folder / "cgroup.conf").touch()
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
        (folder / "munge.key").chmod(0o600)

    def start(self) -> None:
        names = {
            name: f"{self.folder}/{name}"
            for name in ("munge.key", "munge.sock", "munged.pid", "munged.log", "munge.seed")
        }
        munged = [
            "munged", "--foreground", "--force", f"--key-file={names['munge.key']}", f"--socket={names['munge.sock']}",
            f"--pid-file={names['munged.pid']}", f"--log-file={names['munged.log']}", f"--seed-file={names['munge.seed']}",
        ]  # fmt: skip
        self._run(munged)
        eventually(lambda: (self.folder / "munge.sock").exists(), 20, "munge listens")
        self._run(["slurmctld", "-D"])
        for name in NODES:
            self._run(["slurmd", "-D", "-N", name])
        eventually(lambda: self.ask("sinfo", "-h", "-o", "%t").split() == ["idle"], 60, "three nodes are idle")

    def _run(self, words: list[str]) -> None:
        with (self.folder / f"{words[0]}.out").open("ab") as log:
            found = shutil.which(words[0], path=_PATH)
            assert found is not None
            self._daemons.append(
                subprocess.Popen(
                    [found, *words[1:]], env=self.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            )

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": f"{self.folder}/slurm.conf"}

    def ask(self, *words: str) -> str:
        return subprocess.run(words, env=self.environ, capture_output=True, text=True, timeout=30).stdout

    def stop(self) -> None:
        self.ask("scancel", "--user=root", "--signal=KILL", "--full")
        for daemon in reversed(self._daemons):
            with contextlib.suppress(psutil.NoSuchProcess):
                family = psutil.Process(daemon.pid).children(recursive=True)
                daemon.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(10)
                for process in family:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            if daemon.poll() is None:
                daemon.kill()
                daemon.wait(10)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Slurm]:
    """A cluster that runs."""
    cluster = Slurm(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
