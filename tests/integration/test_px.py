"""Code on two local workers from a real kernel: cells, an interrupt, values, files, packages, mistakes, a run that goes on."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.support.kernels import Kernel

NET = """%%guava_share --name model
import time
from torch import nn
import helper_of_px

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.only = nn.Linear(4, 2)

    def forward(self, x):
        return self.only(x) * helper_of_px.SCALE

def slow_loss(outputs, targets):
    time.sleep(0.05)
    return nn.functional.cross_entropy(outputs, targets)
"""
TRAIN = "%guava_train --model Net --data train --loss slow_loss --optimizer SGD --lr 0.1"


#: Seconds instead of a quarter of a minute.
SHORT_SLEEP = "from guava_nb.cluster import notices\nnotices.LOOK_S, notices.STOOD_S = 0.2, 1.0"


def _a_sleep(kernel: Kernel) -> None:
    """A laptop that sleeps stops all processes: that is told, and what ran goes on."""
    kernel.run(f"{TRAIN} --epochs 2 --fresh --detach --out slept")
    all_of_it = [kernel.process, *kernel.children()]
    for process in all_of_it:
        process.suspend()
    threading.Event().wait(2.5)
    for process in all_of_it:
        process.resume()
    kernel.run("slept.result()")
    assert kernel.run("slept.state, slept.status().samples").strip() == "('done', 128)"
    shown = kernel.run("%guava_status")
    assert "the orchestrator's process stood still for" in shown and "2 ready" in shown, shown


def error_of(kernel: Kernel, cell: str) -> str:
    status, text = kernel.attempt(cell)
    assert status == "error", text
    return text


def test_a_student_runs_code_on_two_workers(tmp_path: Path) -> None:
    helper = tmp_path / "helper_of_px.py"
    helper.write_text("SCALE = 1.0\n")
    kernel = Kernel()
    try:
        kernel.run("%load_ext guava_nb")
        assert "run %guava_up first" in error_of(kernel, "%%guava_px\n1")
        kernel.run(SHORT_SLEEP)
        kernel.run("%guava_up --local 2")
        _cells(kernel)
        _values(kernel)
        _files_and_a_run(kernel, helper)
        _a_sleep(kernel)
        code = kernel.run("%guava_up --show-code")
        code = next(word for word in code.split() if word.startswith("guava1:"))
        assert "of this notebook's own session" in error_of(kernel, f"%guava_worker {code}")
        assert "The next run waits for 3 workers, before for 2." in kernel.run("%guava_up --workers 3")
        kernel.run("%guava_down")
        assert "the session of this code was closed" in error_of(kernel, f"%guava_worker {code}")
        assert not kernel.children()
    finally:
        kernel.close()


def _cells(kernel: Kernel) -> None:
    shown = kernel.run(
        "%%guava_px\nimport os, time\nprint('here is', rank)\nprint('no end', end='')\npids = os.getpid()\nrank * 10"
    )
    for wanted in ("| here is 0", "| here is 1", "local-1 | no end", "local-2 | no end", "': 0", "': 10}"):
        assert wanted in shown, shown
    kernel.run("%guava_pull pids\nbefore = dict(pids)")
    many = kernel.run("%%guava_px --on local-2\nfor k in range(900): print('line', k)")
    assert "local-2 | line 0\n" in many and "left out here" in many and "local-1" not in many

    # Both sleep; one interrupt ends both, as it would here, and the processes are the same afterwards.
    ended = kernel.start("%%guava_px\nprint('sleeping')\ntime.sleep(600)")
    kernel.wait_for(r"local-1 \| sleeping(.|\n)*local-2 \| sleeping|local-2 \| sleeping(.|\n)*local-1 \| sleeping")
    kernel.interrupt()
    status, text = ended()
    assert status == "error" and "they stay in the session" in text and "Traceback" not in text, text
    kernel.run("%%guava_px\npids = os.getpid()")
    kernel.run("%guava_pull pids")
    assert kernel.run("pids == before, len(set(pids.values()))").strip() == "(True, 2)"

    text = error_of(kernel, "%%guava_px\ndef half(x):\n    return x / rank\nhalf(3)")
    assert "raised ZeroDivisionError: division by zero" in text
    assert "return x / rank" in text and "line 3" in text and "guava_nb/" not in text, text
    for cell, wanted in [
        ("%%guava_px --on local-3\n1", "no worker that is connected is called 'local-3'; there are: local-"),
        ("%%guava_px\n!nvidia-smi", "without %%guava_px"),
        ("%%guava_px\ninput('name? ')", "a worker has no keyboard"),
        ("%%guava_px\nbreakpoint()", "a worker has no keyboard"),
        ("%guava_pull pidz", "did you mean pids?"),
        ("%guava_pip --on local-1 'torch==1.0'", "pip refused"),
    ]:
        assert wanted in error_of(kernel, cell)


def _values(kernel: Kernel) -> None:
    kernel.run(
        "import torch, numpy\nimages = torch.arange(12.).reshape(3, 4)\nsetting = {'lr': [0.1, None], 'names': ('a', 'b')}"
    )
    assert "A worker that joins later" in kernel.run("%guava_push images setting --on local-2")
    kernel.run("%%guava_px --on local-2\nimages *= 2\nodd = object()\ntotal = images.sum().item(), setting")
    kernel.run("%guava_pull images total odd --on local-2")
    assert kernel.run("images[2, 3].item(), total == (132.0, setting)").strip() == "(22.0, True)"
    assert "object object at" in kernel.run("odd")
    kernel.run("large = numpy.random.rand(500_000)")
    kernel.run("%guava_push large")
    kernel.run("sent = large\n")
    kernel.run("got = %guava_pull large")
    assert kernel.run("got is large, len(got)").strip() == "(True, 2)"
    kernel.run("%%guava_px --rank 1\nmine = 132.0")  # of the two, the one that joined second
    assert kernel.run("mine = %guava_pull mine --rank 1\nprint(mine)").splitlines()[-1] == "132.0"
    assert kernel.run("[bool((large[name] == sent).all()) for name in large]").strip() == "[True, True]"


def _files_and_a_run(kernel: Kernel, helper: Path) -> None:
    kernel.run(f"import sys; sys.path.insert(0, {str(helper.parent)!r})")
    kernel.run(NET)
    kernel.run(
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "train = DataLoader(TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,))), 8)"
    )
    assert f"%guava_files {helper} sends it to the workers" in error_of(kernel, f"{TRAIN} --epochs 1")
    shown = kernel.run(f"%guava_files {helper}")
    assert "local-1: 1 new file." in shown and "joins later gets them too" in shown
    # A cell that cannot run elsewhere blocks what uses it, and nothing else; files go where the line says.
    unused = "%%guava_share --name half\ndef half(outputs, targets):\n    return slow_loss(outputs, targets) * scale"
    assert "Not all that is shared can be trained yet: name 'scale' is used in cell 'half' (line 2)" in kernel.run(
        unused
    )
    folder = helper.parent / "kept"
    kernel.run(f"{TRAIN} --epochs 1 --save-every 4 --checkpoint-dir {folder} --log csv")
    assert sorted(path.suffix for path in folder.iterdir()) == [".csv", ".csv", ".pt", ".pt"]
    assert "there is no folder" in error_of(kernel, f"{TRAIN} --epochs 1 --checkpoint-dir {folder}/deep/kept")
    text = error_of(kernel, TRAIN.replace("slow_loss", "half"))
    assert "'half' cannot be used: name 'scale' is used in cell 'half' (line 2)" in text and "Traceback" not in text
    assert "not sent, and what uses it cannot train: name 'scale'" in kernel.run("%guava_status")
    helper.write_text("SCALE = 2.0  # changed\n")
    assert "changed: helper_of_px.py; loaded anew: helper_of_px." in kernel.run(f"%guava_files {helper}")

    # While a run goes on, code is refused by its name, and the run does not feel it.
    kernel.run(f"{TRAIN} --epochs 40 --detach --out run")
    text = error_of(kernel, "%%guava_px\nworker")
    assert "is in progress: wait for it, or stop it" in text and "Traceback" not in text, text
    kernel.run("%guava_stop")
    kernel.run("run.wait()")
    assert kernel.run("run.state").strip() == "'stopped'"
    assert "local-1" in kernel.run("%%guava_px\nworker")
