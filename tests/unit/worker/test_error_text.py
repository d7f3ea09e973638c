from __future__ import annotations

import pytest
import torch

from guava_nb.worker.error_text import MAX_TEXT_CHARS, MAX_TRACE_CHARS, error_text, loses_device, sendable, trace_text


def test_lone_surrogates_become_escapes() -> None:
    assert sendable("caf\u00e9 \udcff") == "caf\u00e9 \\udcff"


def test_an_error_that_cannot_show_itself_is_told_all_the_same() -> None:
    class Shy(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert "RuntimeError" in error_text(Shy())
    assert "Shy" in trace_text(Shy())


def test_long_texts_are_cut_where_they_tell_least() -> None:
    error = ValueError("begin" + "x" * 1_000_000 + "end")
    assert error_text(error).startswith("begin") and len(error_text(error)) < MAX_TEXT_CHARS + 20
    assert trace_text(error).rstrip().endswith("end") and len(trace_text(error)) < MAX_TRACE_CHARS + 20


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some other call",
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: unspecified launch failure",
    ],
)
def test_errors_that_a_context_does_not_survive(text: str) -> None:
    assert loses_device(RuntimeError(text))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: invalid configuration argument"),
        RuntimeError("device-side assert triggered"),
        ValueError("CUDA error: device-side assert triggered"),
        IndexError("Target 14 is out of bounds."),
    ],
)
def test_errors_after_which_the_device_goes_on(error: Exception) -> None:
    assert not loses_device(error)
