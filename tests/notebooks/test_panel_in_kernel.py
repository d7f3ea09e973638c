"""The panel and interrupts in a real kernel: what a front end would receive."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

ROOT = Path(__file__).resolve().parents[2]
#: Folders with other versions of ipykernel, each called by its version (`pip install --no-deps --target FOLDER/6.17.1 ...`).
VERSIONS = [folder for folder in os.environ.get("GUAVA_IPYKERNELS", "").split(os.pathsep) if folder]
WIDGET = "application/vnd.jupyter.widget-view+json"
SETUP = """
from guava_nb.notebook import load
from guava_nb.notebook.magics import GuavaMagics
from guava_nb.notebook.panel.panel import make_panel
from guava_nb.notebook.notebook_session import NotebookSession
from guava_nb.render import Progress, View
from fake_session import FakeOrchestrator, FakeRun, FakeWorker
run = FakeRun(num_steps=10_000)
shell = get_ipython()
load(shell)
magics = shell.magics_manager.registry["GuavaMagics"]
magics.session = NotebookSession(shell, lambda **settings: FakeOrchestrator(settings, run), FakeWorker)
loader = []
"""
#: A kernel starts, and loads what SETUP names, each within so many seconds: together well before a test's own limit.
START_S = 75
TRAIN = "%guava_train --model Net --loss L --data loader"


#: Room for three starts of START_S, which say what they waited for; then the test itself.
pytestmark = pytest.mark.timeout(300)


class Kernel:
    """Runs cells and keeps every message they caused."""

    def __init__(self, manager: Any, client: Any) -> None:
        self.manager, self.client = manager, client

    def run(self, cell: str, interrupt_after: str = "", timeout_s: float = 60) -> SimpleNamespace:
        """Run a cell; sends one interrupt when `interrupt_after` first appears in a message."""
        messages: list[Any] = []

        def keep(message: Any) -> None:
            nonlocal interrupt_after
            messages.append(message)
            if interrupt_after and interrupt_after in str(message["content"]):
                interrupt_after = ""
                self.manager.interrupt_kernel()

        reply = self.client.execute_interactive(cell, timeout=timeout_s, output_hook=keep, allow_stdin=False)
        by_kind: dict[str, list[Any]] = {}
        for message in messages:
            by_kind.setdefault(message["msg_type"], []).append(message["content"])
        text = "".join(content["text"] for content in by_kind.get("stream", []))
        return SimpleNamespace(ended=reply["content"]["status"], messages=messages, text=text, **by_kind)


@pytest.fixture(scope="module", params=["", *VERSIONS], ids=lambda folder: Path(folder).name or "installed")
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    env = {name: value for name, value in os.environ.items() if name not in ("CI", "GUAVA_UI")}
    env["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))  # no other kernel's session is there
    paths = [request.param, str(ROOT), str(ROOT / "tests" / "support"), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    begun = time.monotonic()
    manager, client = start_new_kernel(kernel_name="python3", env=env, startup_timeout=START_S)
    started = Kernel(manager, client)
    try:
        try:
            ready = started.run(SETUP, timeout_s=START_S)
        except TimeoutError:
            took, which = time.monotonic() - begun, request.param or "installed here"
            pytest.fail(f"the kernel {which} did not load guava_nb within {START_S} s; it began {took:.0f} s ago")
        assert ready.ended == "ok", getattr(ready, "error", ready.text)
        if request.param:
            told = started.run("import ipykernel; print(ipykernel.__version__)").text
            assert told.strip() == Path(request.param).name
        assert started.run("%guava_up --local 1").ended == "ok"
        yield started
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def fresh_run(kernel: Kernel, ui: str, source: str = "FakeRun(num_steps=10_000)") -> None:
    cell = f"import os; os.environ['GUAVA_UI'] = {ui!r}; run = {source}; magics.session._orchestrator.next_run = run"
    assert kernel.run(cell).ended == "ok"


@pytest.mark.parametrize("ui", ["widget", "html", "text"])
def test_ten_thousand_updates_are_few_messages_and_nothing_live_stays(kernel: Kernel, ui: str) -> None:
    fresh_run(kernel, ui)
    started = time.monotonic()
    shown = kernel.run(f"r = {TRAIN}")
    allowed = 10 + 12 * (time.monotonic() - started)  # four drawings a second, each a message or three
    assert shown.ended == "ok"
    assert len(shown.messages) < allowed, [m["msg_type"] for m in shown.messages]
    assert sum(len(str(message["content"])) for message in shown.messages) < 60_000 + 80_000 * (
        time.monotonic() - started
    ), "a frame of up to 26 kB three times a second, and the first and the last"
    if ui == "text":
        assert "steps       10000 in 1 of 1 epochs" in shown.text
        assert len(shown.text.splitlines()) < 40
        return
    first, last = shown.display_data[0], shown.update_display_data[-1]
    assert set(first["data"]) == {"text/plain", "text/html"} | ({WIDGET} if ui == "widget" else set())
    assert set(last["data"]) == {"text/plain", "text/html"}
    assert last["transient"]["display_id"] == first["transient"]["display_id"]
    assert "10000/10000 steps" in last["data"]["text/html"]


def test_the_kernels_interrupt_button_stops_after_the_step_again_and_again(kernel: Kernel) -> None:
    for _ in range(3):
        fresh_run(kernel, "text", "FakeRun(num_steps=10**9)")
        kernel.run("import time; wait = run.wait; run.wait = lambda s: (time.sleep(0.02), wait(s))[1]")
        shown = kernel.run(f"r = {TRAIN}", interrupt_after="training:")
        assert shown.ended == "ok"
        assert "Stopping after this step" in shown.text
        assert "Traceback" not in str(shown.messages)
        assert "stopped" in shown.text
    assert kernel.run("assert r.state == 'stopped' and r.interrupts == 1").ended == "ok"


def test_an_interrupt_of_a_plain_magic_is_one_line_and_an_error(kernel: Kernel) -> None:
    kernel.run("import time; magics.session.validate = lambda args, panel: (print('now', flush=True), time.sleep(30))")
    shown = kernel.run("%guava_validate --data loader", interrupt_after="now")
    assert shown.ended == "error"
    assert shown.error[0]["traceback"] == [
        "Interrupted: %guava_validate was cut short; %guava_status shows where things stand"
    ]


def test_user_mistakes_are_one_line_on_the_page(kernel: Kernel) -> None:
    shown = kernel.run("%guava_train --model Net --loss L --data laoder")
    assert shown.ended == "error"
    assert shown.text.count("\n") == 1
    assert "did you mean loader?" in shown.text


#: What is broken for a while in the kernel: how, and how it is mended.
FAULTS = {
    "comm": (
        "from ipywidgets import Widget\nkept = Widget._send\n"
        "def broken(*args, **settings): raise LookupError('parent_header')\nWidget._send = broken",
        "Widget._send = kept",
    ),
    "display": (
        "kept = shell.display_pub.publish\n"
        "def broken(*args, **settings): raise LookupError('parent_header')\nshell.display_pub.publish = broken",
        "shell.display_pub.publish = kept",
    ),
    "no widgets": ("import sys\nkept = sys.modules.pop('ipywidgets', None)\nsys.modules['ipywidgets'] = None",
                   "sys.modules.pop('ipywidgets')\nif kept: sys.modules['ipywidgets'] = kept"),
}  # fmt: skip
SLOWLY = "import time; wait = thing.wait; thing.wait = lambda s: (time.sleep(0.02), wait(s))[1]"


def told_faults(fault: str) -> int:
    """Times that a fault is told of: a page without widgets is none."""
    return 0 if fault == "no widgets" else 1


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_is_wrong_with_the_display_training_goes_on(kernel: Kernel, fault: str) -> None:
    fresh_run(kernel, "widget", "FakeRun(num_steps=40)")
    kernel.run(f"thing = run; {SLOWLY}")
    assert kernel.run(FAULTS[fault][0]).ended == "ok"
    shown = kernel.run(f"r = {TRAIN}")
    assert kernel.run(f"{FAULTS[fault][1]}\nassert r.state == 'done' and r.step == 40").ended == "ok"
    assert shown.ended == "ok"
    assert shown.text.count("switched off (LookupError: parent_header)") == told_faults(fault)
    assert "Traceback" not in str(shown.messages)


def own_worker(kernel: Kernel, ui: str, num_waits: int) -> SimpleNamespace:
    """Run %guava_worker over a stand-in that works for a second and whose figures change with each look."""
    cell = f"""
import os, time
from dataclasses import replace
from guava_nb.status import OwnFigures
class Changing(FakeWorker):
    def status(self):
        self.figures = OwnFigures('T4', self.waits, 0.5, 0.01, joules=1.0 * self.waits, out_bytes=self.waits)
        return replace(super().status(), lines=tuple(f'printed {{n}}' for n in range(self.waits // 100)))
def start(code, device, name):
    global thing
    thing = Changing(code, device, name, num_waits={num_waits})
    wait, every = thing.wait, max(1, {num_waits} // 100)
    thing.wait = lambda s: (time.sleep(0.01) if thing.waits % every == 0 else None, wait(s))[1]
    return thing
magics.session.worker._start = start
os.environ['GUAVA_UI'] = {ui!r}
from fake_session import OTHER_CODE
os.environ['GUAVA_JOIN_CODE'] = OTHER_CODE
"""
    assert kernel.run(cell).ended == "ok"
    shown = kernel.run("%guava_worker")
    assert kernel.run("assert not thing.alive and thing.calls == []").ended == "ok"
    return shown


@pytest.mark.parametrize("ui", ["widget", "html", "text"])
def test_a_worker_s_ten_thousand_looks_are_few_messages_too(kernel: Kernel, ui: str) -> None:
    started = time.monotonic()
    shown = own_worker(kernel, ui, 10_000)
    seconds = time.monotonic() - started
    assert shown.ended == "ok"
    assert len(shown.messages) < 10 + 12 * seconds, [m["msg_type"] for m in shown.messages]
    assert "guava1:" not in str(shown.messages).replace("guava1:<hidden>", "")
    if ui == "text":
        assert "10000 samples, 50 % of each batch" in shown.text
        return
    last = shown.update_display_data[-1]
    assert set(last["data"]) == {"text/plain", "text/html"}
    assert "10000 samples" in last["data"]["text/html"] and "printed 99" in last["data"]["text/html"]
    assert len(str(last)) + len(shown.text) < 30_000, "of what is saved in the notebook"


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_is_wrong_with_the_display_a_worker_works_on(kernel: Kernel, fault: str) -> None:
    assert kernel.run(FAULTS[fault][0]).ended == "ok"
    shown = own_worker(kernel, "widget", 40)
    assert kernel.run(FAULTS[fault][1]).ended == "ok"
    assert shown.ended == "ok"
    assert shown.text.count("switched off (LookupError: parent_header)") == told_faults(fault)


def test_tab_in_a_front_end_offers_what_the_magic_takes_and_nothing_else(kernel: Kernel) -> None:
    def offered(line: str) -> list[str]:
        reply = kernel.client.complete(line, reply=True, timeout=30)
        return list(reply["content"]["matches"])

    assert offered("%guava_up --co") == ["--connect", "--compression"]
    assert offered("r = %guava_train --precision ") == ["fp32", "bf16", "fp16", "fp64", "auto"]
    assert offered("%guava_mode ")[:5] == ["data", "pipeline", "tensor", "zero", "hybrid"]


def test_the_python_of_the_kernel_is_this_one(kernel: Kernel) -> None:
    assert sys.executable in kernel.run("import sys; print(sys.executable)").text
