from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from guava_nb.errors import ConfigError
from guava_nb.worker.error_text import (
    MAX_TEXT_CHARS,
    MAX_TRACE_CHARS,
    advised_text,
    error_text,
    lost_device,
    problem_text,
    sendable,
    trace_text,
)
from tests.support.training import spec

FLOAT32, FLOAT64 = spec(precision="fp32"), spec(precision="fp64")


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
    assert error_text(error).startswith("begin") and error_text(error).endswith(" ... (990008 characters more)")
    assert len(error_text(error)) < MAX_TEXT_CHARS + 40


def test_a_long_traceback_keeps_the_users_lines_and_the_end() -> None:
    def of_the_user() -> None:
        raise ValueError("begin" + "x" * 1_000_000 + "end")

    with pytest.raises(ValueError) as raised:
        of_the_user()
    text = trace_text(raised.value)
    assert "in of_the_user" in text and "ValueError: begin" in text and text.rstrip().endswith("end")
    assert "characters are left out here" in text and len(text) < MAX_TRACE_CHARS + 60


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some other call",
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: unspecified launch failure",
    ],
)
def test_errors_that_a_context_does_not_survive(text: str) -> None:
    error = RuntimeError(text)
    assert lost_device(error) == text.splitlines()[0]
    assert "replaced by a new one" in problem_text(error)
    wrapped = ConfigError("the model cannot be built")
    wrapped.__cause__ = error
    assert lost_device(wrapped) and "replaced by a new one" in problem_text(wrapped)


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
    assert not lost_device(error)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (torch.nn.Linear(6, 3), (4, 6)),
        (torch.nn.Conv1d(6, 3, 1), (4, 6, 5)),
        (torch.nn.GRU(6, 3), (4, 6)),
        (torch.nn.MultiheadAttention(6, 2), (4, 6)),
    ],
)
def test_numbers_of_unlike_kinds_are_told_with_what_to_do(layer: torch.nn.Module, shape: tuple[int, ...]) -> None:
    for dtype, way in ((torch.float64, "--precision fp64"), (torch.uint8, "Whole numbers met")):
        given = torch.zeros(shape, dtype=dtype)
        with pytest.raises((RuntimeError, ValueError)) as raised:
            layer(*[given] * (3 if isinstance(layer, torch.nn.MultiheadAttention) else 1))
        told = advised_text(raised.value, FLOAT32)
        assert told.startswith(str(raised.value)) and way in told and "preprocess" in told


@pytest.mark.parametrize(
    ("work", "way"),
    [
        (lambda: torch.nn.Linear(64, 3)(torch.zeros(4, 50)), "takes 64 values for each row got 50"),
        (lambda: torch.nn.Conv2d(3, 4, 1)(torch.zeros(2, 1, 8, 8)), "takes 3 channels got 1"),
        (lambda: torch.nn.CrossEntropyLoss()(torch.zeros(2, 3), torch.tensor([0, 7])), "A label is 7"),
        (lambda: torch.nn.CrossEntropyLoss()(torch.zeros(2, 3), torch.zeros(2)), "labels.long()"),
        (lambda: torch.zeros(4, 10) - torch.zeros(4, 6), "have 10 and 6 values"),
        (lambda: torch.nn.Embedding(5, 2)(torch.tensor([9])), "vocabulary size"),
    ],
)
def test_data_that_does_not_fit_the_model_is_told_with_what_to_do(work: Callable[[], object], way: str) -> None:
    with pytest.raises((RuntimeError, IndexError)) as raised:
        work()
    told = advised_text(raised.value, FLOAT32)
    assert told.startswith(str(raised.value).rstrip(".")) and way in told


def test_a_run_in_float64_tells_what_makes_float32_again() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.nn.Linear(2, 2).double()(torch.zeros(1, 2))
    assert "leave float() out of forward" in advised_text(raised.value, FLOAT64)


def test_other_errors_are_told_as_they_are() -> None:
    for error, of_run in (
        (RuntimeError("mat1 and mat2 must have the same dtype, but got Half and Float"), FLOAT32),
        (RuntimeError("mat1 and mat2 must have the same dtype, but got Double and Float"), FLOAT64),
        (RuntimeError("a double free of an int"), FLOAT32),
        (OSError("Found dtype Double"), None),
    ):
        assert advised_text(error, of_run) == str(error)


def test_arrays_where_tensors_belong_are_told() -> None:
    with pytest.raises(TypeError) as raised:
        torch.nn.Linear(2, 2)(np.zeros((1, 2), np.float32))
    assert "torch.as_tensor" in advised_text(raised.value, None)
