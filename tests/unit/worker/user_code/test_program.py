"""A program in a worker's process: what it finds, and what of it is taken back."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist

from guava_nb.protocol.messages import FormGroup, RunProgram
from guava_nb.worker.user_code.program import ProgramEnded, run_program

GROUP = FormGroup(run_id="p", generation=1, name="p/", rank=1, members=("a", "b"), backend="guava", timeout_s=1.0)
ORDER = RunProgram(
    request_id=1, name="train.py", text="", arguments=("--lr", "3"), seat=1, local_rank=1, local_size=2, group=GROUP
)


class Seat:
    """Notes the groups that are formed."""

    def __init__(self) -> None:
        self.formed: list[str] = []

    def form(self, order: FormGroup) -> None:
        self.formed.append(order.name)

    def complete(self) -> None:
        pass


def run(text: str) -> tuple[dict[str, Any], Seat]:
    module, seat = types.ModuleType("guava_px"), Seat()
    run_program(ORDER, module, seat, torch.device("cpu"), lambda: exec(text, vars(module)))  # type: ignore[arg-type]
    return vars(module), seat


PROGRAM = """
import os, sys, torch, torch.distributed as dist
found = __name__, sys.argv, os.environ["RANK"], os.environ["LOCAL_RANK"], sys.modules["__main__"].__dict__ is globals()
dist.init_process_group("nccl")
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
os.environ["RANK"] = "7"
"""


def test_it_runs_as_main_of_a_rank_and_the_process_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "5")
    before = (sys.modules["__main__"], sys.argv, dist.init_process_group, torch.get_default_dtype())
    names, seat = run(PROGRAM)
    assert names["found"] == ("__main__", ["train.py", "--lr", "3"], "1", "1", True)
    assert names["__name__"] == "guava_px" and seat.formed == ["p/1/", "p/2/"]
    assert "RANK" not in os.environ and os.environ["LOCAL_RANK"] == "5"
    assert (sys.modules["__main__"], sys.argv, dist.init_process_group, torch.get_default_dtype()) == before
    assert torch.zeros(1).device.type == "cpu"


def test_how_it_exits_says_whether_it_failed() -> None:
    run("import sys; sys.exit(0)")
    run("raise SystemExit")
    with pytest.raises(ProgramEnded, match="exit status 3"):
        run("import sys; sys.exit(3)")
    with pytest.raises(ProgramEnded, match="no data"):
        run("import sys; sys.exit('no data')")
    with pytest.raises(KeyError):
        run("{}['mine']")
    assert "RANK" not in os.environ
