"""Errors after which a process cannot use its device any more, while another process can."""

from __future__ import annotations

from guava_nb.errors import GuavaError

__all__ = ["NOTE", "DeviceLost", "loses_device"]

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


class DeviceLost(GuavaError):
    """This process cannot use its device any more; a new one can."""


def loses_device(error: BaseException) -> bool:
    """Return whether a process cannot use its device after this error."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    return "CUDA error" in text and any(words in text for words in _STICKY)
