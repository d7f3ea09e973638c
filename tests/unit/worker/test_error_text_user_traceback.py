"""Tracebacks of a user's code, without ours around it."""

from __future__ import annotations

import pytest

from guava_nb.errors import SourceError
from guava_nb.protocol.messages import Cell
from guava_nb.spec.cells import build_module, resolve
from guava_nb.worker.error_text import user_traceback

TEXT = "def loss(outputs):\n    return outputs.nothing\n"


def test_the_users_lines_stay_and_ours_go() -> None:
    with pytest.raises(SourceError) as caught:
        build_module([Cell("model", TEXT + "loss(3)\n")])
    text = user_traceback(caught.value)
    assert "<cell 'model'>" in text and "return outputs.nothing" in text
    assert text.index("AttributeError") < text.index("CellError")
    assert "spec/cells.py" not in text


def test_an_error_of_a_library_that_we_called_has_no_frames_of_ours() -> None:
    with pytest.raises(SourceError) as caught:
        resolve("colections:deque", None)
    cause = caught.value.__cause__
    assert cause is not None and "importlib" in user_traceback(cause) and "cells.py" not in user_traceback(cause)


def test_an_error_of_ours_keeps_its_frames() -> None:
    with pytest.raises(SourceError) as caught:
        resolve("Net", None)
    assert "cells.py" in user_traceback(caught.value)


def test_frames_of_torch_that_only_pass_a_call_on_are_left_out() -> None:
    text = "from torch import nn\nimport torch\nnet = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))\nnet(torch.zeros(1, 3))\n"
    with pytest.raises(SourceError) as caught:
        build_module([Cell("model", text)])
    told = user_traceback(caught.value)
    assert "<cell 'model'>" in told and "net(torch.zeros(1, 3))" in told and "linear.py" in told
    assert "_call_impl" not in told and "container.py" not in told
