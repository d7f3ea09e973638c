"""The compiler of torch keeps out of the methods of works and groups."""

from __future__ import annotations

import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from guava_nb.backend.work import untraced

marks = torch._C._dynamo.eval_frame


def helper() -> int:
    return 1


class Traced:
    def call(self) -> int:
        return helper() + sum([helper() for _ in range(2)])


@untraced
class Untraced:
    def call(self) -> int:
        return helper() + sum([helper() for _ in range(2)])


@pytest.mark.skipif(not hasattr(marks, "set_code_exec_strategy"), reason="this torch has no such mark")
def test_the_compiler_is_offered_neither_a_method_nor_what_it_calls() -> None:
    """torch's C++ calls them while a compiled program runs, and then the compiler is offered each frame of Python."""
    offered: list[str] = []
    run_on = marks._FrameExecStrategy(marks._FrameAction.DEFAULT, marks._FrameAction.DEFAULT)

    def offer(frame: FrameType, *_: Any) -> Any:
        offered.append(frame.f_code.co_name)
        return SimpleNamespace(guarded_code=None, frame_exec_strategy=run_on, apply_to_code=False)

    def names_of(kind: Any) -> list[str]:
        offered.clear()
        made = kind()
        before = marks.set_eval_frame(offer)
        try:
            made.call()
        finally:
            marks.set_eval_frame(before)
        return [name for name in offered if name in ("call", "helper")]

    had = "torch._dynamo" in sys.modules
    assert names_of(Traced)[:2] == ["call", "helper"]
    assert names_of(Untraced) == []
    assert had or "torch._dynamo" not in sys.modules, "the mark must not load the compiler"
