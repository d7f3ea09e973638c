"""One worker's cells: what they see, what comes back, what their errors tell, and that runs do not feel them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from guava_nb.protocol.messages import CodeRan, CodeValues, Message, RunCode
from guava_nb.spec.plain_values import pack_values, unpack_values
from guava_nb.worker.user_code import cell_runner
from guava_nb.worker.user_code.cell_runner import CellRunner


class Runner:
    """A runner, and what it sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[Message, bytes]] = []
        self.runner = CellRunner(self._send, torch.device("cpu"))
        self.requests = 0

    def _send(self, message: Message, buffers: Sequence[memoryview]) -> None:
        self.sent.append((message, b"".join(map(bytes, buffers))))

    def run(
        self, text: str, wanted: tuple[str, ...] = (), most_bytes: int = 1000, **values: Any
    ) -> tuple[CodeRan, Any]:
        self.requests += 1
        tree, buffers = pack_values(values, strictly=True)
        message = RunCode(
            request_id=self.requests, cell="px", text=text, values=tree, wanted=wanted, rank=3, most_bytes=most_bytes
        )
        self.sent.clear()
        self.runner.answer(message, memoryview(bytearray(b"".join(map(bytes, buffers)))), "w0")
        ran = self.sent[-1][0]
        assert isinstance(ran, CodeRan) and ran.request_id == self.requests
        if len(self.sent) == 1:
            return ran, None
        (values_message, payload), _ = self.sent
        assert isinstance(values_message, CodeValues) and ran.nbytes == len(payload)
        return ran, unpack_values(values_message.values, payload)


def test_names_stay_and_the_last_expression_comes_back() -> None:
    made = Runner()
    assert made.run("x = 1\nclass Net: pass")[1] is None
    assert made.run("x + 1")[1] == {"": 2}
    assert made.run("x;")[1] is None
    assert made.run("(worker, rank, str(device), Net.__module__)")[1] == {"": ("w0", 3, "cpu", "guava_px")}
    assert made.run("rank = 9")[1] is None and made.run("rank")[1] == {"": 9}
    found = made.run("", ("x", "t"), t=torch.arange(3))[1]
    assert found["x"] == 1 and found["t"].tolist() == [0, 1, 2]
    assert repr(made.run("Net")[1][""]) == "<class 'guava_px.Net'>"


def test_an_error_has_the_user_s_lines_alone() -> None:
    ran, _ = Runner().run("def f():\n    return 1 / 0\nf()")
    assert (ran.type_name, ran.text, ran.nbytes) == ("ZeroDivisionError", "division by zero", -1)
    assert "return 1 / 0" in ran.traceback and "cell_runner" not in ran.traceback and "line 3" in ran.traceback
    assert Runner().run("raise SystemExit(3)")[0].type_name == "SystemExit"


def test_an_import_that_fails_says_what_brings_the_module() -> None:
    made = Runner()
    assert "%guava_pip installs it here" in made.run("import guava_nowhere.part")[0].text
    told = made.run("import guava_nb.notebok")[0].text
    assert "has no module 'notebok' in it" in told and "guava_pip" not in told
    assert made.run("from guava_nb import nothing_of_it")[0].text.startswith("cannot import name")


def test_what_is_missing_or_too_large_is_told_and_does_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Runner()
    made.run("weights = 1")
    ran, _ = made.run("", ("wieghts",))
    assert (ran.type_name, ran.traceback) == ("ConfigError", "") and "did you mean weights?" in ran.text
    ran, found = made.run("import torch\ntorch.zeros(1000)")
    assert found is None and "4.0 kB in 1 tensors" in ran.text and "take a part" in ran.text
    monkeypatch.setattr(cell_runner, "_MOST_TENSORS", 2)
    assert "in 3 tensors" in made.run("[torch.zeros(1) for _ in range(3)]")[0].text


def test_a_request_that_was_interrupted_before_it_came_is_not_begun() -> None:
    made = Runner()
    made.runner.interrupt(1)
    ran, _ = made.run("x = 1")
    assert ran.type_name == "KeyboardInterrupt"
    assert made.run("'x' in globals()")[1] == {"": False}


def test_random_numbers_of_runs_and_of_cells_do_not_touch_each_other() -> None:
    torch.manual_seed(5)
    plain = [torch.rand(1).item() for _ in range(2)]
    made = Runner()
    torch.manual_seed(5)
    first = torch.rand(1).item()
    made.run("import torch, random, numpy\ntorch.manual_seed(7); random.seed(1); numpy.random.seed(1)")
    assert [first, torch.rand(1).item()] == plain
    a = made.run("torch.rand(1).item()")[1][""]
    torch.manual_seed(7)
    assert a == torch.rand(1).item()


def test_an_error_that_takes_the_device_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made, told = Runner(), "CUDA error: device-side assert triggered"
    tree, _ = pack_values({}, strictly=True)
    text = f"raise RuntimeError({told!r})"
    message = RunCode(request_id=1, cell="px", text=text, values=tree, wanted=(), rank=0, most_bytes=0)
    assert made.runner.answer(message, memoryview(b""), "w0") == told
    ran = made.sent[-1][0]
    assert isinstance(ran, CodeRan) and "replaced by a new one" in ran.text
