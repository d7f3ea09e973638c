"""`guava worker` as the first process of a container, where no signal without a handler arrives: SIGTERM is a leave."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from guava_nb import Orchestrator
from guava_nb.launchers.k8s_manifest import ASKED, JobWish, job_of
from tests.support.processes import ROOT, eventually

NEW_NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc")


def _may_not() -> str:
    if shutil.which("unshare") is None:
        return "unshare (package util-linux) is not here"
    return (
        ""
        if subprocess.run([*NEW_NAMESPACE, "true"], capture_output=True).returncode == 0
        else "no right to make namespaces"
    )


pytestmark = [pytest.mark.skipif(bool(_may_not()), reason=_may_not() or "-"), pytest.mark.timeout(150)]


class First:
    """The command of a Job's pod, as process 1 of a namespace of its own."""

    def __init__(self, code_path: Path) -> None:
        container = job_of("guava-test", JobWish(1, "image", 0, sys.executable))["spec"]["template"]["spec"][
            "containers"
        ][0]
        words = [str(code_path) if word == "/var/run/guava/join-code" else word for word in container["command"]]
        self._outer = subprocess.Popen(
            [*NEW_NAMESPACE, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        self.process = eventually(lambda: psutil.Process(self._outer.pid).children(), 20, "it begins")[0]

    def line(self) -> str:
        assert self._outer.stdout is not None
        return self._outer.stdout.readline()

    def end(self) -> tuple[int, str]:
        output, _ = self._outer.communicate(timeout=60)
        return self._outer.returncode, output

    def kill(self) -> None:
        for process in (*psutil.Process(self._outer.pid).children(recursive=True), self._outer):
            process.kill()
        self._outer.communicate(timeout=20)


def has_joined(first: First, orchestrator: Orchestrator, path: Path) -> int:
    orchestrator.wait_for_workers(1, 90)
    return ASKED


def waits_for_its_code(first: First, orchestrator: Orchestrator, path: Path) -> int:
    caught, bit = Path(f"/proc/{first.process.pid}/status"), 1 << (signal.SIGTERM - 1)
    eventually(lambda: int(caught.read_text().partition("SigCgt:\t")[2].split()[0], 16) & bit, 30, "it takes SIGTERM")
    return 128 + signal.SIGTERM


@pytest.mark.parametrize("at", [waits_for_its_code, has_joined])
def test_sigterm_ends_it_with_a_leave_and_tells_the_job_that_it_was_asked(
    at: Callable[..., int], tmp_path: Path
) -> None:
    path = tmp_path / "join-code"
    with Orchestrator() as orchestrator:
        if at is has_joined:
            path.write_text(orchestrator.join_code.encode())
        else:
            os.mkfifo(path)  # opening it waits, as a volume that is not there yet
        first = First(path)
        try:
            expected = at(first, orchestrator, path)
            first.process.send_signal(signal.SIGTERM)
            status, output = first.end()
        except BaseException:
            first.kill()
            raise
        assert status == expected, output
        if at is has_joined:
            eventually(lambda: "asked to leave" in " ".join(map(str, orchestrator.status().notes)), 20, "it is told")
