"""Text of programs: imports in ruff's order, calls and heads that fit the line, and only the cells that are needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.errors import ConfigError
from guava_nb.export.source_text import Imports, call, cells_for, define, known_imports, literal
from guava_nb.protocol.messages import Cell

ROOT = Path(__file__).resolve().parents[3]

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(PLAIN)
def test_a_literal_is_the_value(value: object) -> None:
    assert ast.literal_eval(literal(value)) == value


@given(st.lists(st.integers(0, 10**12).map(str), max_size=20), st.integers(0, 40))
def test_a_call_means_the_same_however_it_is_wrapped(arguments: list[str], before: int) -> None:
    wrapped = call("function", arguments, before, 4)
    assert ast.dump(ast.parse(wrapped)) == ast.dump(ast.parse(f"function({', '.join(arguments)})"))
    assert all(len(line) <= 120 for line in wrapped.splitlines()[1:])


def formatted(text: str) -> str:
    words = [sys.executable, "-m", "ruff", "format", "--config", str(ROOT / "pyproject.toml"), "-"]
    return subprocess.run(words, input=text, capture_output=True, text=True, timeout=30, check=True).stdout


def test_calls_heads_and_imports_stand_as_the_formatter_leaves_them() -> None:
    lines = [f"value = {call('function', [f'argument_{k}=1' for k in range(n)], 8)}" for n in (1, 5, 8, 12)]
    heads = [
        define("name", [f"parameter_{k}: int" for k in range(n)], "None") + "\n    return None\n\n" for n in (1, 5, 8)
    ]
    imports = Imports(["from torch import nn", "import os", "import torch", "import numpy as np", "import argparse"])
    text = imports.text() + "\n\n" + "\n".join(lines) + "\n\n\n" + "\n".join(heads).rstrip() + "\n"
    assert formatted(text) == text
    words = [sys.executable, "-m", "ruff", "check", "--select", "I", "--no-cache", "-"]
    assert subprocess.run(words, input=text, capture_output=True, text=True, timeout=30, check=False).returncode == 0


CELLS = [
    Cell(
        "model",
        "import torch\nfrom torch import nn\n\n\nclass Net(nn.Linear):\n    pass\n\n\nif __name__ == '__main__':\n    Net()\n",
    ),
    Cell("other", "class Other:\n    pass\n"),
]


def test_only_the_cells_behind_a_name_are_taken_and_their_imports_go_to_the_top() -> None:
    imports = Imports()
    text = cells_for(CELLS, {"Net"}, set(), imports)
    assert text == "class Net(nn.Linear):\n    pass"
    assert imports.text() == "import torch\nfrom torch import nn"


def test_a_cell_that_needs_guava_or_a_name_of_the_program_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'loss' imports guava_nb \(line 1\)"):
        cells_for([Cell("loss", "from guava_nb import gather_batch\ndef f():\n    pass\n")], {"f"}, set(), Imports())
    with pytest.raises(ConfigError, match=r"'net' defines 'share'"):
        cells_for([Cell("net", "def share():\n    pass\n")], {"share"}, {"share"}, Imports())


def test_imports_are_those_of_the_names_that_stand_there() -> None:
    text = "log = logging.getLogger()\nx: Any = torch.zeros(1)\n"
    assert known_imports(text, "", Imports()) == ["import logging", "import torch", "from typing import Any"]


@pytest.mark.parametrize("shared", ["def islice():\n    pass\n", ""])
def test_another_meaning_of_a_name_that_the_program_imports_is_refused(shared: str) -> None:
    theirs = Imports([] if shared else ["from more_itertools import islice"])
    with pytest.raises(ConfigError, match="'islice' of its own"):
        known_imports("islice([], 1)", shared, theirs)
