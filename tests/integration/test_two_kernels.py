"""Two real IPython kernels: one orchestrates, one works; TLS on loopback; interrupts; nothing is left behind."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.manager import start_new_kernel

ROOT = Path(__file__).resolve().parents[2]

SHARE = """%%guava_share --name model
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x):
        return self.body(x.float() / 16)

def slow_loss(outputs, targets):
    import time
    time.sleep(0.05)
    return nn.functional.cross_entropy(outputs, targets)
"""

DATA = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from guava_nb.data.digits import split_digits
train_part, test_part = split_digits(0)
train = DataLoader(TensorDataset(*train_part), 64, shuffle=True, generator=torch.Generator().manual_seed(0))
test = DataLoader(TensorDataset(*test_part), 120)
"""


class Kernel:
    """A kernel whose cells are run by a thread, so that both sides can run at once."""

    def __init__(self) -> None:
        env = {**os.environ, "GUAVA_UI": "text", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.manager, self.client = start_new_kernel(kernel_name="python3", env=env, startup_timeout=90)
        self.text = ""

    def run(self, cell: str, timeout_s: float = 90) -> str:
        """Run a cell that must end well; returns what it printed."""
        status, text = self.attempt(cell, timeout_s)
        assert status == "ok", text
        return text

    def attempt(self, cell: str, timeout_s: float = 90) -> tuple[str, str]:
        out: list[str] = []

        def keep(message: Any) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                out.append(content["text"])
            elif message["msg_type"] in ("execute_result", "display_data", "update_display_data"):
                out.append(content["data"].get("text/plain", ""))
            elif message["msg_type"] == "error":
                out.append("\n".join(content["traceback"]))
            self.text = "".join(out)

        reply = self.client.execute_interactive(cell, timeout=timeout_s, output_hook=keep, allow_stdin=False)
        return reply["content"]["status"], "".join(out)

    def start(self, cell: str) -> Callable[[], tuple[str, str]]:
        """Run a cell on a thread; returns a function that waits for its end."""
        result: list[tuple[str, str]] = []
        thread = threading.Thread(target=lambda: result.append(self.attempt(cell, 180)))
        thread.start()

        def wait() -> tuple[str, str]:
            thread.join(180)
            assert result, "the cell never ended"
            return result[0]

        return wait

    def wait_for(self, pattern: str, timeout_s: float = 60) -> None:
        """Wait until the running cell printed something."""
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline, f"{pattern!r} did not come; so far: {self.text}"
            threading.Event().wait(0.05)

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernels() -> Iterator[tuple[Kernel, Kernel]]:
    first, second = Kernel(), Kernel()
    try:
        yield first, second
    finally:
        first.close()
        second.close()


def children_of(*kernels: Kernel) -> list[psutil.Process]:
    return [
        child
        for kernel in kernels
        for child in psutil.Process(kernel.manager.provisioner.process.pid).children(recursive=True)
    ]


@pytest.mark.timeout(300)
def test_a_notebook_trains_with_a_worker_in_another_notebook(kernels: tuple[Kernel, Kernel], tmp_path: Path) -> None:
    laptop, gpu = kernels
    for kernel in kernels:
        kernel.run("%load_ext guava_nb")
    text = laptop.run("%guava_up --workers 1")
    code = re.search(r"guava1:[\w-]+", text)
    assert code, text
    worker = gpu.start(f"%guava_worker {code[0]} --name colab")
    laptop.run(SHARE)
    laptop.run(DATA)
    arguments = "--model Net --data train --optimizer Adam --lr 0.005"
    laptop.run(f"%guava_train {arguments} --val test --loss CrossEntropyLoss --epochs 8 --out first")
    assert laptop.run("first.state, first.report()['workers'][0]['worker']").strip() == "('done', 'colab')"
    assert float(laptop.run("first.validations[-1]['accuracy']")) > 0.9

    # An interrupt ends the cell without a traceback, at a commit; the worker stays; the next cell trains on.
    for number in range(2):
        training = laptop.start(f"%guava_train {arguments} --loss slow_loss --epochs 50 --out run{number}")
        laptop.wait_for(r"(?i)(train|step)")
        threading.Event().wait(1.5)
        laptop.interrupt()
        status, text = training()
        assert status == "ok" and "Traceback" not in text, text
        assert laptop.run(f"run{number}.state, run{number}.report()['lost_samples']").strip() == "('stopped', 0)"
    laptop.run(f"%guava_train {arguments} --val test --loss CrossEntropyLoss --epochs 1 --out last")
    assert float(laptop.run("last.validations[-1]['accuracy']")) > 0.9

    laptop.run(f"%guava_save {tmp_path / 'model.pt'}")
    loaded = laptop.run(f"sorted(torch.load({str(tmp_path / 'model.pt')!r}, weights_only=True)['model'])")
    assert "body.1.weight" in loaded
    score = laptop.run("%guava_validate --data test")
    assert "accuracy" in score

    # A user's mistake is one line.
    for cell, wanted in [
        ("%guava_train --model Nett --data train --loss CrossEntropyLoss", "Net"),
        ("%guava_train --modle Net", "--model"),
        ("%guava_mode pipelin", "data"),
    ]:
        status, text = laptop.attempt(cell)
        assert status == "error" and wanted in text and len(text.strip().splitlines()) <= 2, text

    port = int(
        laptop.run(
            "import guava_nb; get_ipython().magics_manager.registry['GuavaMagics'].session._orchestrator.join_code.port"
        )
    )
    assert children_of(gpu), "the worker is a process of its own"
    laptop.run("%guava_down")
    status, text = worker()
    assert status == "ok", text
    assert not children_of(*kernels)
    threads = laptop.run(
        "import threading; sorted(t.name for t in threading.enumerate() if t.name.startswith('guava'))"
    )
    assert threads.strip() == "[]"
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port), timeout=2):
        pass
