"""A session in a process beside its notebook: kernels are killed and it goes on; it is killed and another one goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from guava_nb.notebook.background.record import Record
from tests.integration.test_two_kernels import SHARE, error_of
from tests.support.kernels import ROOT, Kernel, wait_until

DATA = """%%guava_share --background --name data
import torch
from torch.utils.data import DataLoader, TensorDataset
from guava_nb.datasets.digits import split_digits
(images, labels), test_part = split_digits(0)

def shuffled():
    return DataLoader(TensorDataset(images, labels), 64, shuffle=True, generator=torch.Generator().manual_seed(3))

class Broken(TensorDataset):
    def __getitem__(self, index):
        return super().__getitem__(index // (80 - index))  # fails at sample 80

broken = DataLoader(Broken(images, labels), 16)
test = DataLoader(TensorDataset(*test_part), 120)
"""
TRAIN = "%guava_train --model Net --data shuffled() --optimizer Adam --lr 0.005 --fresh"
#: The weights that a run leaves, exactly, and its losses.
STATE = (
    "import hashlib\n"
    "print(run.state, hashlib.sha256(b''.join(v.numpy().tobytes() for v in run.model().state_dict().values())).hexdigest(), "
    "run.history[-1]['loss'], len(run.history), run.lost_samples, run.duplicated_samples)"
)


class Notebook:
    """One notebook and its kernels, one after another."""

    def __init__(self, folder: Path) -> None:
        self.environment = {"XDG_STATE_HOME": str(folder), "JPY_SESSION_NAME": "lesson.ipynb"}
        self.folder = folder
        self.kernels: list[Kernel] = []

    def kernel(self) -> Kernel:
        """A new one with the magics loaded."""
        self.kernels.append(Kernel(folder=self.folder, **self.environment))
        self.kernels[-1].run("%load_ext guava_nb")
        return self.kernels[-1]

    def restarted(self) -> Kernel:
        """A new one after the last one was killed."""
        self.kernels[-1].kill()
        self.kernels[-1].close()
        return self.kernel()

    @property
    def record(self) -> Record | None:
        """Of the background session."""
        return next(map(Record.read, (self.folder / "guava_nb").glob("*.background")), None)


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    made = Notebook(tmp_path)
    try:
        yield made
    finally:
        for kernel in made.kernels:
            kernel.close()
        if (record := made.record) is not None and record.lives:
            process = psutil.Process(record.pid)
            below = process.children(recursive=True)
            process.kill()
            for one in below:
                wait_until(lambda one=one: not one.is_running(), lambda: "end of a worker", 20)


@pytest.mark.timeout(280)
def test_kernels_are_killed_and_the_run_goes_on(notebook: Notebook) -> None:
    laptop = notebook.kernel()
    laptop.run(SHARE)
    laptop.run(DATA)
    laptop.run("%guava_up --background --local 1", 120)
    laptop.run(f"run = {TRAIN} --loss slow_loss --epochs 2")
    undisturbed = laptop.run(STATE)
    assert undisturbed.startswith("done ") and undisturbed.endswith(" 46 0 0\n")
    for moment in (None, "step [1-9]", r"\bdone\n"):
        wait = laptop.start(f"{TRAIN} --loss slow_loss --epochs 2{'' if moment else ' --detach'}")
        wait() if moment is None else laptop.wait_for(moment)
        laptop = notebook.restarted()  # no page is left, and no kernel
        shown = laptop.run("%guava_up")
        assert re.search(
            r"attached to its background session \(pid \d+, since .*run-\d is (preparing|training|done)", shown
        )
        laptop.run("run = %guava_status --follow")
        assert laptop.run(STATE) == undisturbed

    laptop.run(SHARE)  # as "run all" does, while a run goes on
    laptop.run(f"{TRAIN} --loss slow_loss --epochs 50 --detach")
    assert "is in the background session" in laptop.run(DATA)
    other = notebook.kernel()  # a second one at the same time
    assert "is training" in other.run("%guava_status")
    terminal = subprocess.run(
        [sys.executable, "-m", "guava_nb", "status"], env={**os.environ, **notebook.environment, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert terminal.returncode == 0 and "training: epoch" in terminal.stdout, terminal
    following = other.start("%guava_status --follow")
    other.wait_for("training: .*step")
    other.interrupt()
    assert "goes on; %guava_stop ends it" in following()[1]
    following = other.start("seen = %guava_status --follow")
    other.wait_for("training: .*step")
    assert "Stopping after this step" in laptop.run("%guava_stop")
    assert following()[0] == "ok" and other.run("print(seen.state, seen.done)") == "stopped True\n"

    training = laptop.start(f"{TRAIN} --loss slow_loss --epochs 50")
    laptop.wait_for("training: .*step")
    laptop.interrupt()
    assert training()[0] == "ok" and "Stopping after this step" in laptop.text
    assert "'accuracy'" in laptop.run("%guava_validate --data test")
    laptop.run("here = 3")
    assert "no variable here: variables of a notebook stay in its kernel. Put %%guava_share --background" in error_of(
        laptop, "%guava_train --model Net --data here --loss CrossEntropyLoss"
    )
    status, text = laptop.attempt("%guava_train --model Net --data broken --loss CrossEntropyLoss")
    assert status == "error" and "index // (80 - index)" in text and "answers.py" not in text, text
    assert "is closed" in laptop.run("%guava_down") and notebook.record is None
    assert "ClusterError: the process of the background session" in other.attempt("%guava_status")[1]
    assert "Nothing here yet" in other.run("%guava_status")
    assert "closed, and its runs" in laptop.attempt("run.history")[1]


@pytest.mark.timeout(280)
def test_its_process_is_killed_and_another_one_goes_on(notebook: Notebook) -> None:
    gpu, laptop = Kernel(), notebook.kernel()
    notebook.kernels.append(gpu)
    gpu.run("%load_ext guava_nb")
    laptop.run(SHARE)
    laptop.run(DATA)
    code = re.search(r"guava1:[\w-]+", laptop.run("%guava_up --background --workers 1", 120))
    assert code
    gpu.start(f"%guava_worker {code[0]} --name colab", 250)
    laptop.run(f"run = {TRAIN} --loss slow_loss --epochs 2")
    undisturbed = laptop.run(STATE)
    training = laptop.start(f"{TRAIN} --loss slow_loss --epochs 2")
    laptop.wait_for("step [1-9]")
    record = notebook.record
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)
    status, text = training()
    assert status == "error" and f"(pid {record.pid}) has ended without closing it" in text, text
    shown = laptop.run("%guava_up --background --workers 1 --show-code", 120)
    assert "it goes on here with the same join code" in shown and code[0] in shown, shown
    laptop.run(f"run = {TRAIN.removesuffix('--fresh')} --loss slow_loss --epochs 2 --resume session", 120)
    resumed = laptop.run(STATE)
    assert resumed.split()[:3] == undisturbed.split()[:3] and int(laptop.run("print(run.history[0]['step'])")) > 1
    os.kill(notebook.record.pid, signal.SIGKILL)  # and nobody looks before the next line
    shown = laptop.run("%guava_up --workers 1 --show-code", 120)
    assert "it goes on here with the same join code" in shown and code[0] in shown, shown
    laptop.run("%guava_down")


@pytest.mark.timeout(200)
def test_it_ends_by_itself_when_nobody_needs_it(notebook: Notebook) -> None:
    laptop = notebook.kernel()
    (notebook.folder / "parts.py").write_text(DATA.partition("\n")[2])
    laptop.run(SHARE)
    assert "--idle-limit needs --background" in error_of(laptop, "%guava_up --idle-limit 1h")
    laptop.run("%guava_up --background --idle-limit 2s --local 1", 120)
    laptop.run(f"{TRAIN.replace('shuffled()', 'parts:shuffled')} --loss CrossEntropyLoss --epochs 1")
    record = notebook.record
    assert record is not None and record.lives and json.loads(Path(record.connection).read_text())["transport"] == "ipc"
    assert not os.stat(record.connection).st_mode & 0o077
    laptop = notebook.restarted()
    wait_until(lambda: notebook.record and notebook.record.ended, lambda: "end by itself", 60)
    shown = laptop.run("%guava_up")
    assert "ended by itself" in shown and "no notebook was attached and no run went on" in shown
    saved = re.search(r"lies in (\S+\.pt)", shown)
    assert saved
    laptop.run(SHARE)
    assert "Loaded" in laptop.run(f"%guava_resume {saved[1]}")
    laptop.run("%guava_down")
