"""What a Python elsewhere says of itself, and the sentence where something is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from guava_nb.config.version import installed_version
from guava_nb.launchers.install_check import FACTS, PythonThere, facts_in

OURS = installed_version()


def test_this_python_has_all_of_it() -> None:
    done = subprocess.run([sys.executable, "-c", FACTS], capture_output=True, text=True, timeout=60)
    found = facts_in(f"Welcome to lab!\n{done.stdout}")
    assert found is not None and found.path == sys.executable and found.guava == OURS
    assert found.torch and found.missing("here", "pip install", "") == ""


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            PythonThere("/p", "3.9", OURS, None, 0, "ModuleNotFoundError: No module named 'torch'"),
            "has no torch: PIP torch; OTHER",
        ),
        (
            PythonThere("/p", "3.9", OURS, None, 0, "OSError: libcudart.so"),
            "has no torch that loads (OSError: libcudart.so): PIP",
        ),
        (PythonThere("/p", "3.9", None, "2.13"), f"has no guava_nb: install this version, {OURS}"),
        (PythonThere("/p", "3.9", "9.9", "2.13"), f"has guava_nb 9.9, and {OURS} is here"),
    ],
)
def test_what_is_missing(found: PythonThere, sentence: str) -> None:
    said = found.missing("gpu1", "PIP", "; OTHER")
    assert said.startswith("gpu1: /p (Python 3.9)") and sentence in said and said.endswith("; OTHER")


def test_a_python_that_did_not_run_says_nothing() -> None:
    assert facts_in("bash: python3: command not found\n") is None
