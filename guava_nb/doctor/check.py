"""The outcome of one check, and what a script makes of all of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

__all__ = ["Check", "Status", "exit_status", "installed", "release"]

Status = Literal["ok", "-", "warning", "fail", "not tried"]


@dataclass(frozen=True, slots=True)
class Check:
    """What was found.

    Attributes:
        status: "-" when what is not here is not needed either; "fail" when guava_nb cannot work like this, "warning" when
            something will be missing or slow, "not tried" when something before it failed.
        detail: what is here, with numbers and units.
        fix: what to do, a line to run where there is one; empty when nothing is to be done.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""


def exit_status(checks: Sequence[Check]) -> int:
    """Return 1 when any check failed, else 0: a warning does not stop a script."""
    return int(any(check.status == "fail" for check in checks))


def release(text: str) -> tuple[int, ...]:
    """Return the numbers at the front of a version for comparing: "2.13.0+cpu" is (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def installed(distribution: str) -> str | None:
    """Return the version of a distribution that is installed here; None where it is not."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
