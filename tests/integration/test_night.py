"""What happens to a notebook that stays open all night: cut imports, killed kernels, restarts; in real kernels."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from guava_nb.protocol.joincode import JoinCode
from tests.integration.test_two_kernels import DATA, SHARE, error_of
from tests.support.kernels import ROOT, Kernel, gone, wait_until

#: An interrupt in the middle of the import of torch, at an exact place: raised there, or sent to the kernel's process.
CUT = """
import os, signal, sys
class Cut:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.autograd":
            sys.meta_path.remove(self)
            {}
sys.meta_path.insert(0, Cut())
"""
CODE = "guava1:MwGtu5hwkIt-S12Jowaxk0I23AoQClDjuLpQT8O0r2o7Wm-QjAkxMjcuMC4wLjEApCuc"
TRAIN = "%guava_train --model Net --data train --optimizer Adam --lr 0.005"


@pytest.fixture
def without_torch(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel that has not loaded torch, as every kernel of a user begins: one that sees a folder more is not a warm one."""
    kernel = Kernel(PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    try:
        yield kernel
    finally:
        kernel.close()


def test_an_import_of_torch_that_a_cell_cut_is_told_and_nothing_is_tried_with_it(without_torch: Kernel) -> None:
    kernel = without_torch
    kernel.run(CUT.format("raise KeyboardInterrupt"))
    status, _ = kernel.attempt("import torch")
    assert status == "error"
    told = "torch is only half loaded in this kernel"
    assert told in kernel.run("%load_ext guava_nb")
    for magic in ("%guava_up", f"%guava_worker {CODE}"):
        status, text = kernel.attempt(magic)
        assert status == "error" and told in text and "restart the kernel" in text and "Traceback" not in text, text
    status, text = kernel.attempt("%%guava_share\nimport torch")
    assert status == "error" and text.count(told) == 1, text


def test_an_interrupt_of_the_first_magic_waits_until_torch_is_loaded(without_torch: Kernel) -> None:
    without_torch.run("%load_ext guava_nb")
    without_torch.run(CUT.format("os.kill(os.getpid(), signal.SIGINT)"))
    assert "Interrupted: %guava_up was cut short" in error_of(without_torch, "%guava_up")
    assert "session: open" in without_torch.run("%guava_up")


def test_a_worker_on_a_dead_code_is_told_or_ended_at_once(without_torch: Kernel) -> None:
    """A session that was closed refuses; a machine that is gone never answers, and nothing is lost by not waiting for it."""
    kernel = without_torch
    kernel.run("%load_ext guava_nb")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        code = JoinCode.decode(CODE).with_address("127.0.0.1", port).encode()
        worker = kernel.start(f"%guava_worker {code}")
        kernel.wait_for("worker: (starting|joining)")
        processes = kernel.children()
        kernel.interrupt()
        status, text = worker()
        assert status == "ok" and "had not joined yet; its process is ended" in text, text
        assert processes and gone(processes)
    status, text = kernel.attempt(f"%guava_worker {code}")
    assert status == "error" and "the session of this code was closed" in text and "starting" not in text, text


@pytest.fixture
def laptop(tmp_path: Path) -> Iterator[Kernel]:
    kernel = _notebook(tmp_path)
    try:
        yield kernel
    finally:
        kernel.close()


def _notebook(state: Path) -> Kernel:
    kernel = Kernel(XDG_STATE_HOME=str(state), JPY_SESSION_NAME="night.ipynb")
    kernel.run("%load_ext guava_nb")
    return kernel


@pytest.mark.timeout(240)
def test_a_night(laptop: Kernel, tmp_path: Path) -> None:
    laptop.run("%guava_up --local 1")
    laptop.run(DATA)
    laptop.run(SHARE)
    laptop.run(f"{TRAIN} --loss CrossEntropyLoss --epochs 2")
    laptop.run(f"{TRAIN} --loss slow_loss --epochs 99 --detach --out run")
    laptop.run("while not run.history: pass")
    kept = next(tmp_path.rglob("session-*.json")).with_suffix(".run-now")
    wait_until(kept.exists, lambda: "record of the run", 20)
    laptop.kill()
    laptop.close()

    again = _notebook(tmp_path)
    try:
        shown = again.run("%guava_up")
        assert "The workers that it had started on this machine ended with its kernel: %guava_up --local 1" in shown
        assert (
            "Run-2 was trained by workers of that kernel alone (local-1)" in shown
            and "back: the same line" not in shown
        )
        again.run(DATA)
        again.run(SHARE)
        gone = error_of(again, f"{TRAIN} --loss slow_loss --resume session")
        assert "--resume session: run-2 was trained by" in gone and "give --save-every 10min" in gone
        rows = [line.split()[:2] for line in again.run("%guava_runs").splitlines() if re.match(r"\s*run-\d", line)]
        assert rows == [["run-2", "killed"], ["run-1", "done"]]
    finally:
        again.close()
