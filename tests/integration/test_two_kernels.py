"""Two real IPython kernels: one orchestrates, one works; TLS on loopback; interrupts, kills; nothing is left behind."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.kernels import Kernel, gone, wait_until

SHARE = """%%guava_share --name model
import os, time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x):
        return self.body(x.float() / 16)

class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.only = nn.Linear(64, 10)

    def forward(self, x):
        return self.only(x.float().flatten(1))

def slow_loss(outputs, targets):
    time.sleep(0.04)
    return nn.functional.cross_entropy(outputs, targets)

def very_slow_loss(outputs, targets):
    time.sleep(1.5)
    return nn.functional.cross_entropy(outputs, targets)

def stuck_loss(outputs, targets):
    time.sleep(float(os.environ.get("STUCK_S", 0)))
    return slow_loss(outputs, targets)
"""

DATA = """
import threading
import torch
from torch.utils.data import DataLoader, TensorDataset
from guava_nb.datasets.digits import split_digits
(images, labels), test_part = split_digits(0)
train = DataLoader(TensorDataset(images, labels), 64)
test = DataLoader(TensorDataset(*test_part), 120)

def guava_threads():
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("guava"))

def distance(run, lr):
    "Largest difference of any weight from a plain loop over as many batches as the run has committed."
    torch.manual_seed(0)
    plain = Net()
    optimizer = torch.optim.Adam(plain.parameters(), lr=lr)
    batches = (batch for _ in range(1000) for batch in train)
    for _ in run.history:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(inputs), targets).backward()
        optimizer.step()
    pairs = zip(plain.parameters(), run.model().parameters())
    with torch.no_grad():
        return max(float((a - b).abs().max()) for a, b in pairs)
"""
TRAIN = "%guava_train --model Net --data train --optimizer Adam --lr 0.005"
ORCHESTRATOR = "get_ipython().magics_manager.registry['GuavaMagics'].session._orchestrator"


@dataclass
class Pair:
    """Two notebooks in one session; `worker()` waits for the end of the worker's cell."""

    laptop: Kernel
    gpu: Kernel
    code: str
    worker: Callable[[], tuple[str, str]]
    port: int


@pytest.fixture(scope="module")
def kernels() -> Iterator[tuple[Kernel, Kernel]]:
    both = (Kernel(), Kernel())
    try:
        for kernel in both:
            kernel.run("%load_ext guava_nb")
        both[0].run(DATA)
        yield both
    finally:
        for kernel in both:
            kernel.close()


@pytest.fixture
def up_options() -> str:
    return "--workers 1"


@pytest.fixture
def pair(kernels: tuple[Kernel, Kernel], up_options: str) -> Iterator[Pair]:
    laptop, gpu = kernels
    code, port = open_session(laptop, up_options)
    worker = gpu.start(f"%guava_worker {code} --name colab")
    laptop.run(SHARE)
    try:
        yield Pair(laptop, gpu, code, worker, port)
    finally:
        laptop.run("%guava_down")
        worker()


def open_session(laptop: Kernel, options: str) -> tuple[str, int]:
    found = re.search(r"guava1:[\w-]+", laptop.run(f"%guava_up {options}"))
    assert found
    return found[0], int(laptop.run(f"{ORCHESTRATOR}.join_code.port"))


def error_of(kernel: Kernel, cell: str) -> str:
    """Run a cell that must fail; returns its error, which must be one line."""
    status, text = kernel.attempt(cell)
    shown = next((m["content"] for m in kernel.messages if m["msg_type"] == "error"), None)
    lines = "\n".join(shown["traceback"]).strip() if shown else text.strip()
    assert status == "error" and "\n" not in lines, text
    assert len(text.strip().splitlines()) == 1, text
    return text


def test_train_interrupt_train_on_save_and_leave_nothing(pair: Pair, tmp_path: Path) -> None:
    laptop, gpu = pair.laptop, pair.gpu
    shown = laptop.run(f"{TRAIN} --val test --loss CrossEntropyLoss --epochs 8 --out first")
    for wanted in ("colab", "validation", "accuracy", "samples/s", "wire", "MB out", "184 in 8 of 8 epochs"):
        assert wanted in shown, shown
    assert len(shown.splitlines()) < 40, "text for a page that cannot take a line back is sparse"
    assert laptop.run("first.state, first.report()['workers'][0]['worker']").strip() == "('done', 'colab')"
    assert float(laptop.run("first.validations[-1]['accuracy']")) > 0.9

    # The first interrupt, in mid-epoch: the cell ends well, the state is that of a commit, the worker stays.
    training = laptop.start(f"{TRAIN} --loss slow_loss --epochs 50 --fresh --out once")
    laptop.wait_for(r"training: .*step [1-9]")
    laptop.interrupt()
    status, text = training()
    assert status == "ok" and "Stopping after this step" in text and "Traceback" not in text, text
    assert laptop.run("once.state, once.report()['lost_samples']").strip() == "('stopped', 0)"
    assert float(laptop.run("distance(once, 0.005)")) < 1e-5

    # The second one, while a step takes long: it is given up, and the state is that of the commit before.
    training = laptop.start(f"{TRAIN} --loss very_slow_loss --epochs 50 --fresh --out twice")
    laptop.wait_for(r"training: .*step [1-9]")
    laptop.interrupt()
    laptop.wait_for("Stopping after")
    laptop.interrupt()
    status, text = training()
    assert status == "ok" and "Traceback" not in text, text
    assert laptop.run("twice.state, twice.report()['lost_samples']").strip() == "('stopped', 0)"
    assert float(laptop.run("distance(twice, 0.005)")) < 1e-5

    shown = laptop.run(f"{TRAIN} --val test --loss CrossEntropyLoss --epochs 4 --out last")
    assert "goes on from the weights of the last run; --fresh" in shown
    assert "colab" in laptop.run("%guava_status")
    assert "{'colab': 'cpu'}" in laptop.run("%%guava_px\nimport torch\ntorch.manual_seed(3)\nstr(device)")
    path = tmp_path / "model.pt"
    assert "weights_only=True" in laptop.run(f"%guava_save {path}")
    loaded = laptop.run(f"sorted(torch.load({str(path)!r}, weights_only=True)['model'])")
    assert "body.1.weight" in loaded
    assert "'accuracy': 0.9" in laptop.run("%guava_validate --data test")
    assert "step 92, whole epochs done: 4." in laptop.run(f"%guava_resume {path}")
    shown = laptop.run(f"{TRAIN} --loss CrossEntropyLoss --epochs 5 --out resumed")
    assert laptop.run("resumed.report()['steps'], resumed.history[0]['step']").strip() == "(23, 93)"

    processes = gpu.children()
    assert processes, "the worker is a process of its own"
    assert laptop.run("len(guava_threads()) > 0").strip() == "True"
    assert "Closed" in laptop.run("%guava_down")
    status, text = pair.worker()
    assert status == "ok" and "the orchestrator closed the session" in text and "Traceback" not in text, text
    wait_until(lambda: gone(processes), lambda: f"end of {processes}", 10)
    assert not laptop.children() and not gpu.children()
    assert laptop.run("guava_threads()").strip() == "[]"
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", pair.port), timeout=2):
        pass


def figures(text: str) -> list[str]:
    return re.findall(r"(?:loss|accuracy) \S+", text)


def test_a_mistake_is_one_line_that_says_what_to_do(pair: Pair, tmp_path: Path) -> None:
    laptop = pair.laptop
    (tmp_path / "only_here.py").write_text("VALUE = 1\n")
    laptop.run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    laptop.run(f"{TRAIN} --loss CrossEntropyLoss --epochs 1 --fresh")
    laptop.run(f"%guava_save {tmp_path / 'net.pt'}")
    for cell, wanted in [
        ("%guava_train --modle Net", "did you mean --model?"),
        ("%guava_train --model Nett --data train --loss CrossEntropyLoss", "did you mean 'Net'?"),
        ("%guava_train --model Net --data trian --loss CrossEntropyLoss", "did you mean train?"),
        ("%guava_train --model Net --data train --loss CrossEntropyLos", "did you mean 'CrossEntropyLoss'?"),
        ("%guava_train --model Net --data train", "give one of --loss or --step"),
        ("%guava_mode dta", "did you mean data?"),
        (f"%guava_resume {tmp_path / 'nte.pt'}", "net.pt"),
        (f"%guava_resume {tmp_path / 'only_here.py'}", "not a checkpoint of guava_nb"),
        (f"%guava_train --model Other --data train --loss slow_loss --resume {tmp_path / 'net.pt'}", "another model"),
        (f"{TRAIN} --loss slow_loss --epochs 1 --resume {tmp_path / 'net.pt'}", "Ask for more epochs"),
        (
            f"{TRAIN.replace('Adam', 'SGD')} --loss slow_loss --epochs 2 --resume {tmp_path / 'net.pt'}",
            "optimizer Adam",
        ),
        ("%%guava_share\n%pip install something", "notebook syntax"),
    ]:
        assert wanted in error_of(laptop, cell)
    # None of these lines trained anything: what was trained is what is validated.
    assert "did you mean 'Net'?" in error_of(laptop, "%guava_train --model Nett --data train --loss CrossEntropyLoss")
    laptop.run("%guava_train --model Other --data train --loss CrossEntropyLoss --epochs 1 --fresh")
    trained = laptop.run("%guava_validate --data test")
    assert "did you mean" in error_of(laptop, "%guava_train --model Net --data train --loss CrossEntropyLos")
    assert figures(laptop.run("%guava_validate --data test")) == figures(trained) != []
    refused = error_of(laptop, f"{TRAIN} --loss CrossEntropyLoss")
    assert "would throw away what the last one trained in 23 steps: another model was chosen since" in refused
    told = laptop.run(f"%guava_resume {tmp_path / 'net.pt'} --model Net")
    assert "no file has what" in told and "(%guava_save PATH) keeps it" in told
    laptop.run("scale = 2")
    laptop.run(
        "%%guava_share --name loss\ndef scaled(outputs, targets):\n    return scale * slow_loss(outputs, targets)"
    )
    assert "name 'scale' is used in cell 'loss'" in error_of(laptop, f"{TRAIN} --fresh --loss scaled")
    laptop.run("%%guava_share --name loss\nimport only_here\nscaled = slow_loss")
    status, text = laptop.attempt(f"{TRAIN} --fresh --loss scaled")
    assert status == "error"
    last = text.strip().splitlines()[-1]
    assert (
        "colab cannot import 'only_here'" in last
        and "put its code in a %%guava_share cell" in last
        and "%pip" not in last
    ), text
    laptop.run("%%guava_share --name loss\nscaled = slow_loss")
    laptop.run(f"{TRAIN} --fresh --loss scaled")


@pytest.mark.parametrize("up_options", ["--workers 2 --local 1"])
def test_interrupts_in_the_workers_own_cell(pair: Pair) -> None:
    laptop, gpu = pair.laptop, pair.gpu
    training = laptop.start(f"{TRAIN} --loss slow_loss --epochs 6 --fresh --out run")
    laptop.wait_for(r"training: .*step [1-9]")
    gpu.interrupt()
    status, text = pair.worker()
    assert status == "ok" and "Leaving after this step" in text and re.search(r"worker colab: left, step \d+", text), (
        text
    )
    status, text = training()
    assert status == "ok" and "colab left: asked to leave" in text, text
    assert laptop.run("run.state, run.lost_samples, run.duplicated_samples").strip() == "('done', 0, 0)"
    assert float(laptop.run("distance(run, 0.005)")) < 1e-4

    gpu.run("%env STUCK_S=60")
    stuck = gpu.start(f"%guava_worker {pair.code} --name colab")
    gpu.wait_for("ready on cpu")
    training = laptop.start(f"{TRAIN} --loss stuck_loss --epochs 3 --fresh --out run")
    gpu.wait_for("working on cpu")
    processes = gpu.children()
    gpu.interrupt()
    gpu.wait_for("Leaving after this step")
    gpu.interrupt()
    status, text = stuck()
    gpu.run("%env STUCK_S=0")
    assert status == "ok" and "process is ended" in text and "Traceback" not in text, text
    wait_until(lambda: gone(processes), lambda: f"end of {processes}", 10)
    status, text = training()
    assert status == "ok" and "colab was lost" in text, text
    assert laptop.run("run.state, run.lost_samples, run.duplicated_samples").strip() == "('done', 0, 0)"


def test_running_any_cell_again_is_safe(kernels: tuple[Kernel, Kernel]) -> None:
    laptop, gpu = kernels
    code, _ = open_session(laptop, "--workers 1")
    try:
        assert open_session(laptop, "--workers 1")[0] == code
        assert "--host did not change" in laptop.run("%guava_up --host 127.0.0.2")
        assert "The next run waits for 3 workers, before for 1" in laptop.run("%guava_up --workers 3")
        assert "The next run waits for 1 worker, before for 3" in laptop.run("%guava_up --workers 1")
        laptop.run(SHARE)  # a name that leads nowhere is told before workers are waited for
        assert "did you mean 'Net'?" in error_of(laptop, f"{TRAIN.replace('Net', 'Nett')} --loss slow_loss")
        waiting = laptop.start(f"{TRAIN} --loss slow_loss")
        laptop.wait_for("Waiting up to .* for workers: 0 of 1")
        laptop.interrupt()
        status, text = waiting()
        assert status == "error" and text.strip().splitlines()[-1].startswith("Interrupted: %guava_train"), text
        assert "Traceback" not in text

        gpu.run(f"%guava_worker '{code[:30]} {code[30:]}' --name colab --detach")
        worker = gpu.start(f"%guava_worker >>> {code}")
        gpu.wait_for("in that session already")
        for _ in range(2):
            assert "is shared" in laptop.run(SHARE)
            laptop.run("%load_ext guava_nb")
            assert "done" in laptop.run(f"{TRAIN} --loss CrossEntropyLoss --epochs 1")
        detached = laptop.run(f"{TRAIN} --loss slow_loss --epochs 50 --detach --out run")
        assert "%guava_stop ends it" in detached
        assert "a run is going on" in error_of(laptop, f"{TRAIN} --loss slow_loss")
        assert "colab" in laptop.run("%guava_status")
        assert "Stopping" in laptop.run("%guava_stop")
        waited = laptop.run("run.wait(30), run.state").strip().splitlines()
        assert waited[0] == "(True, 'stopped')" and "%guava_status --follow" in waited[-1], waited
    finally:
        laptop.run("%guava_down")
    status, text = worker()
    assert status == "ok" and "closed the session" in text, text
    assert "Nothing was open" in laptop.run("%guava_down")
    assert "Closed" in gpu.run("%guava_down")


def test_the_panel_of_a_page_shows_workers_loss_bytes_and_ends_as_plain_html(pair: Pair) -> None:
    laptop = pair.laptop
    laptop.run("%env GUAVA_UI=widget")
    try:
        laptop.run(f"{TRAIN} --loss slow_loss --val test --epochs 3 --fresh", 60)
        shown = [m for m in laptop.messages if m["msg_type"] in ("display_data", "update_display_data")]
        live = [m["content"]["data"]["value"] for m in laptop.messages if _is_widget_value(m)]
        places = [m["content"].get("transient", {}).get("display_id") for m in shown]
        curve = [m["content"]["data"] for m, place in zip(shown, places, strict=True) if place != places[0]]
        shown = [m for m, place in zip(shown, places, strict=True) if place == places[0]]
        first, last = shown[0]["content"]["data"], shown[-1]["content"]["data"]
        assert set(curve[-1]) == {"text/plain", "image/png"}, "what is stored of the curve needs no widget"
        assert "application/vnd.jupyter.widget-view+json" in first
        assert set(last) == {"text/plain", "text/html"}, "what is stored needs no widget"
        for wanted in ("colab", "69/69 steps", "validation", "accuracy", "samples/s", "kB out"):
            assert wanted in last["text/html"], last["text/html"]
        assert len(shown) + len(live) < 80
        data = laptop.run("%guava_status") and laptop.messages
        assert any("text/html" in m["content"].get("data", {}) for m in data)
    finally:
        laptop.run("%env GUAVA_UI=text")


def _is_widget_value(message: dict[str, object]) -> bool:
    content = message["content"]
    return message["msg_type"] == "comm_msg" and isinstance(content, dict) and "value" in content.get("data", {})


@pytest.mark.timeout(150)
def test_a_kernel_killed_on_either_side_leaves_nothing_behind() -> None:
    laptop, first, second = Kernel(GUAVA_GRACE_S="2"), Kernel(), Kernel(GUAVA_GRACE_S="2", GUAVA_REJOIN_TIMEOUT_S="3")
    try:
        for kernel in (laptop, first, second):
            kernel.run("%load_ext guava_nb")
        laptop.run(DATA)
        code, _ = open_session(laptop, "--workers 2 --local 1")
        laptop.run(SHARE)
        first.start(f"%guava_worker {code} --name colab")
        training = laptop.start(f"{TRAIN} --loss slow_loss --epochs 5 --out run")
        laptop.wait_for(r"training: .*step [1-9]")
        processes = first.children()
        assert processes
        first.kill()  # the worker's notebook: its process ends too, the run goes on with the other worker
        wait_until(lambda: gone(processes), lambda: f"end of {processes}", 15)
        status, text = training()
        assert status == "ok" and re.search(r"colab (left|was lost)", text), text
        assert laptop.run("run.state, run.lost_samples, run.duplicated_samples").strip() == "('done', 0, 0)"
        assert float(laptop.run("distance(run, 0.005)")) < 1e-4

        worker = second.start(f"%guava_worker {code} --name kaggle")
        second.wait_for("ready on cpu")
        laptop.start(f"{TRAIN} --loss slow_loss --epochs 50")
        second.wait_for("working on cpu")
        processes = laptop.children()
        laptop.kill()  # the orchestrator: the worker's cell ends with a line that says so, when nobody took its place
        status, text = worker()
        assert status == "error" and "Traceback" not in text, text
        assert re.search(r"ClusterError: worker kaggle failed: .*was away for more than 3 s", text), text
        assert not second.children()
        wait_until(lambda: gone(processes), lambda: f"end of {processes}", 15)
    finally:
        for kernel in (laptop, first, second):
            kernel.close()


@pytest.mark.timeout(300)
def test_a_session_outlives_its_kernel(tmp_path: Path) -> None:
    """The kernel is killed while it trains; in the next one the same code holds, and the worker comes back by itself."""
    gpu = Kernel()
    notebook = {"XDG_STATE_HOME": str(tmp_path), "JPY_SESSION_NAME": "lesson.ipynb"}
    laptop = Kernel(**notebook)
    try:
        for kernel in (laptop, gpu):
            kernel.run("%load_ext guava_nb")
        laptop.run(DATA)
        code, port = open_session(laptop, "--workers 1")
        worker = gpu.start(f"%guava_worker {code} --name colab", timeout_s=240)
        laptop.run(SHARE)
        laptop.start(f"{TRAIN} --loss slow_loss --epochs 50")
        laptop.wait_for("step 1[0-9]")
        laptop.kill()
        gpu.wait_for("joins again by itself")
        laptop.close()
        laptop = Kernel(**notebook)
        laptop.run("%load_ext guava_nb")
        laptop.run(DATA)
        shown = laptop.run("%guava_up --workers 1 --show-code")
        assert "it goes on here with the same join code" in shown and code in shown
        laptop.run(SHARE)
        assert "--resume session" in shown
        laptop.run(f"import torch; torch.save(Net().state_dict(), {str(tmp_path / 'begun.pt')!r})")
        line = f"{TRAIN} --loss CrossEntropyLoss --epochs 20 --weights {tmp_path / 'begun.pt'}"  # as a fine-tuning run begins
        assert "begun.pt is not read (--weights)" in laptop.run(f"resumed = {line} --resume session")
        laptop.run("first = resumed.history[0]['step']; print(resumed.state, first, len(resumed.history))")
        assert laptop.run("print([w['worker'] for w in resumed.report()['workers']])").strip() == "['colab']"
        assert (
            laptop.run("print(resumed.state, resumed.lost_samples, resumed.duplicated_samples)").strip() == "done 0 0"
        )
        # Batches do not depend on chance here, so the whole equals a plain loop over all steps, those of both kernels.
        steps = "type('R', (), {'history': range(first - 1 + len(resumed.history)), 'model': resumed.model})"
        assert int(laptop.run("print(first)")) > 10
        assert float(laptop.run(f"distance({steps}, 0.005)")) < 1e-4
        laptop.run("%guava_down")
        assert worker()[0] == "ok"
        assert "goes on here" not in laptop.run("%guava_up --workers 1")
        laptop.run("%guava_down")
    finally:
        laptop.close()
        gpu.close()
