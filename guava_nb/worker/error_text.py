"""Text on its way to the orchestrator: whatever a user's code printed or raised becomes a message that can be sent.

A report that cannot be sent would end the worker, and then every other one that is given the same work.
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from guava_nb.errors import GuavaError
from guava_nb.protocol.messages import RunSpec

__all__ = [
    "NOTE",
    "DeviceLost",
    "advised_text",
    "error_text",
    "lost_device",
    "problem_text",
    "sendable",
    "trace_text",
    "user_traceback",
]

# What went wrong in the user's code, as the user should see it: their own lines, without ours around them.

_OURS = str(Path(__file__).resolve().parents[1])
#: Frames of torch that only pass a call on; each layer has some of them.
_PASS_ON = (
    "torch/nn/modules/module.py",
    "torch/nn/modules/container.py",
    "torch/overrides.py",
    "/pipelining/schedules.py",
)


def user_traceback(error: BaseException) -> str:
    """Format an exception with its causes, without this package's frames unless it was raised there."""
    formatted = traceback.TracebackException.from_exception(error)
    links = [formatted]
    while (link := links[-1].__cause__ or links[-1].__context__) is not None:
        links.append(link)
    in_a_cell = any(frame.filename.startswith("<cell ") for link in links for frame in link.stack)
    # Raised by a library that we called for the user, as a torch loss does: our frames would look like a fault of ours.
    by_others = bool(formatted.stack) and not formatted.stack[-1].filename.startswith(_OURS)
    if in_a_cell or by_others:
        for link in links:
            link.stack = traceback.StackSummary.from_list(f for f in link.stack if not _is_around(f, link.stack[-1]))
    return "".join(formatted.format())


def _is_around(frame: traceback.FrameSummary, last: traceback.FrameSummary) -> bool:
    """Whether a frame lies around the user's own lines and tells nothing of them."""
    passes_on = frame is not last and frame.filename.replace("\\", "/").endswith(_PASS_ON)
    return passes_on or frame.filename.startswith(_OURS)


#: Longest sentence and longest traceback that are sent: both end up in a notebook, from each worker.
MAX_TEXT_CHARS = 10_000
MAX_TRACE_CHARS = 20_000


def sendable(text: str) -> str:
    """Return the text with lone surrogates, which UTF-8 does not have, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def error_text(error: BaseException) -> str:
    """Return what an error says of itself, even when asking it raises."""
    try:
        text = str(error)
    except Exception as failed:  # the user's class; its name and the traceback go along
        return f"(it cannot be shown: its __str__ raised {type(failed).__name__})"
    more = len(text) - MAX_TEXT_CHARS
    return sendable(text if more <= 0 else f"{text[:MAX_TEXT_CHARS]} ... ({more} characters more)")


def problem_text(error: BaseException) -> str:
    """Return what an error says, after its class where the sentence is not one of this package's own."""
    if lost := lost_device(error):
        return f"{type(error).__name__}: {lost}. {NOTE}"
    return error_text(error) if isinstance(error, GuavaError) else f"{type(error).__name__}: {error_text(error)}"


def trace_text(error: BaseException) -> str:
    """Return an error's traceback, from the user's code on where it runs through a shared cell.

    Of a long one its middle is left out: the user's lines are at its beginning, and what it says of itself at its end may be
    longer than all of them.
    """
    text, half = user_traceback(error), MAX_TRACE_CHARS // 2
    if (more := len(text) - 2 * half) > 0:
        text = f"{text[:half]}\n[{more} characters are left out here]\n{text[-half:]}"
    return sendable(text)


#: CUDA's own words for errors that leave a context inconsistent: "to continue using CUDA, the process must be terminated and
#: relaunched" (CUDA Runtime API, cudaError_t).
_STICKY = (
    *("device-side assert triggered", "an illegal memory access", "unspecified launch failure", "misaligned address"),
    *("an illegal instruction", "operation not supported on global/shared address space", "invalid program counter"),
    *("hardware stack error", "the launch timed out", "uncorrectable ECC error", "uncorrectable NVLink error"),
)
NOTE = (
    "The process cannot use its device after this error: it is replaced by a new one, which joins again by itself. The commonest "
    "cause is a target or an index out of range, such as a class number that the output does not have: the same batch on the CPU "
    "names it"
)


#: How torch begins to say that numbers of two kinds met.
_UNLIKE_DTYPES = re.compile(
    r"mat1 and mat2 must have the same dtype|m1 and m2 to have the same dtype|Input type \(|RNN input dtype|Found dtype"
)
_FLOAT64 = re.compile(r"\b(double|float64)\b", re.IGNORECASE)
_WHOLE = re.compile(r"\b(unsigned char|byte|char|short|int|long|u?int(8|16|32|64))\b", re.IGNORECASE)


#: How torch begins to say that data and model do not fit, and what to do.
_UNFIT = (
    (
        re.compile(r"mat1 and mat2 shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)"),
        "A layer that takes {1} values for each row got {0}: give the model the size of the data (--model-args), or reshape "
        "the data",
    ),
    (
        re.compile(r"expected input\[[\d, ]+\] to have (\d+) channels, but got (\d+) channels"),
        "A layer that takes {0} channels got {1}: give the model the channels of the data, or change their order "
        "(torch wants [rows, channels, height, width])",
    ),
    (
        re.compile(r"Target (-?\d+) is out of bounds"),
        "A label is {0}, and labels of classes go from 0 to the number of the model's outputs - 1: give the model more outputs, "
        "or the data other labels",
    ),
    (
        re.compile(r"expected target dtype to be Long|expected scalar type Long but found"),
        "Labels of classes are whole numbers (labels.long() in the data set); for a number as the target take a loss such as "
        "MSELoss",
    ),
    (
        re.compile(r"The size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)"),
        "Two tensors have {0} and {1} values in a dimension where they must have as many: compare the shapes of outputs and "
        "targets; for classes the loss is CrossEntropyLoss",
    ),
    (
        re.compile(r"index out of range in self"),
        "A number is too large for the embedding: give the model as many entries as there are words (vocabulary size)",
    ),
)


def advised_text(error: BaseException, spec: RunSpec | None) -> str:
    """Return what an error says of itself, and what to do where batches do not fit the model of a run."""
    advice = _dtype_advice(error, "" if spec is None else spec.precision) or _shape_advice(error)
    return f"{error_text(error).rstrip('.')}. {advice}" if advice else error_text(error)


def _shape_advice(error: BaseException) -> str:
    text = error_text(error) if isinstance(error, RuntimeError | ValueError | IndexError) else ""
    found = ((pattern.search(text), advice) for pattern, advice in _UNFIT)
    return next((advice.format(*match.groups()) for match, advice in found if match), "")


def _dtype_advice(error: BaseException, precision: str) -> str:
    text = str(error) if isinstance(error, RuntimeError | ValueError | TypeError) else ""
    if "must be Tensor, not numpy" in text:
        return "Batches arrive as they were made, so make tensors in the data set or in preprocess (torch.as_tensor)"
    if not _UNLIKE_DTYPES.search(text):
        return ""
    if _FLOAT64.search(text) and precision != "fp64":
        return (
            "Double is float64, which is what NumPy makes of decimal numbers. To compute in it, train with precision='fp64' "
            "(--precision fp64); else make float32 of the data, in the data set or in preprocess (inputs.float())"
        )
    if _FLOAT64.search(text) and "float and double" in text.lower():
        return (
            "precision='fp64' (--precision fp64) makes float64 of model and data, and something here makes float32 again: leave "
            "float() out of forward and preprocess, or the precision out of the run"
        )
    if _WHOLE.search(text):
        return "Whole numbers met floating-point ones: make floats of them in the data set or in preprocess (inputs.float())"
    return ""


class DeviceLost(GuavaError):
    """This process cannot use its device any more; a new one can."""


def lost_device(error: BaseException) -> str:
    """Return the first line of an error after which a process cannot use its device; "" of all others."""
    if error.__cause__ is not None and (lost := lost_device(error.__cause__)):
        return lost
    text = str(error) if isinstance(error, RuntimeError) else ""
    return text.splitlines()[0] if "CUDA error" in text and any(words in text for words in _STICKY) else ""
