"""Python text: imports in ruff's order, calls that fit the line, and the shared cells that a program needs.

Knows Python's grammar only.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterable, Sequence

from guava_nb.errors import ConfigError
from guava_nb.protocol.messages import Cell
from guava_nb.spec.cell_checks import cells_behind

__all__ = ["LINE_LENGTH", "Imports", "call", "cells_for", "define", "known_imports", "literal"]

LINE_LENGTH = 120


class Imports:
    """Imports of a program, each once.

    Args:
        lines: such as "import torch" and "from torch import nn".
    """

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self._plain: dict[str, None] = {}
        self._names: dict[str, dict[str, None]] = {}
        for line in lines:
            self.add(line)

    def add(self, line: str) -> None:
        """Add one import statement."""
        (statement,) = ast.parse(line).body
        assert isinstance(statement, ast.Import | ast.ImportFrom)
        self.take(statement)

    def take(self, statement: ast.Import | ast.ImportFrom) -> None:
        """Add a parsed statement."""
        for alias in statement.names:
            said = alias.name + (f" as {alias.asname}" if alias.asname and alias.asname != alias.name else "")
            if isinstance(statement, ast.Import):
                self._plain[said] = None
            else:
                self._names.setdefault("." * statement.level + (statement.module or ""), {})[said] = None

    def take_all(self, others: Iterable[str]) -> None:
        """Add several statements."""
        for line in others:
            self.add(line)

    def means(self, name: str) -> str:
        """Return the statement that binds a name, "" where none does."""
        for said in self._plain:
            if (said.rpartition(" as ")[2] if " as " in said else said.partition(".")[0]) == name:
                return f"import {said}" if " as " in said else f"import {name}"
        for module, names in self._names.items():
            for said in names:
                if said.rpartition(" as ")[2].strip() == name:
                    return f"from {module} import {said}"
        return ""

    def text(self) -> str:
        """Return them as ruff sorts and formats them."""
        sections: dict[int, list[str]] = {}
        for said in sorted(self._plain):
            sections.setdefault(_section(said), []).append(f"import {said}")
        for module in sorted(self._names):
            names = sorted(self._names[module], key=_rank)
            sections.setdefault(_section(module), []).append(_from(module, names))
        return "\n\n".join("\n".join(sections[number]) for number in sorted(sections))


def _section(module: str) -> int:
    top = module.partition(".")[0].partition(" ")[0]
    return 0 if top == "__future__" else 1 if top in sys.stdlib_module_names else 2


def _rank(name: str) -> tuple[int, str]:
    bare = name.partition(" ")[0]
    if bare.isupper() and len(bare) > 1:
        return 0, name
    return (1 if bare[:1].isupper() else 2), name


def _from(module: str, names: Sequence[str]) -> str:
    aliased = [name for name in names if " as " in name]
    plain = [name for name in names if name not in aliased]
    lines = []
    if plain:
        line = f"from {module} import {', '.join(plain)}"
        if len(line) > LINE_LENGTH:
            line = f"from {module} import (\n" + "".join(f"    {name},\n" for name in plain) + ")"
        lines.append(line)
    return "\n".join([*lines, *(f"from {module} import {name}" for name in aliased)])


def literal(value: object) -> str:
    """Return plain data as the formatter writes it: text in double quotes."""
    if isinstance(value, str):
        text = repr(value)
        return f'"{text[1:-1]}"' if text[0] == "'" and '"' not in text else text
    if isinstance(value, list | tuple):
        inside = ", ".join(map(literal, value))
        if isinstance(value, list):
            return f"[{inside}]"
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(one)}" for key, one in value.items()) + "}"
    return repr(value)


def call(function: str, arguments: Sequence[str], before: int = 0, indent: int = 0) -> str:
    """Return a call on one line if it fits, else wrapped as the formatter does.

    Args:
        function: what is called.
        arguments: their texts.
        before: characters on its first line before it, indentation included.
        indent: spaces before its statement.
    """
    line = f"{function}({', '.join(arguments)})"
    if before + len(line) <= LINE_LENGTH or not arguments:
        return line
    space = " " * indent
    inside = f"{space}    {', '.join(arguments)}"
    if len(inside) <= LINE_LENGTH:
        return f"{function}(\n{inside}\n{space})"
    return f"{function}(\n" + "".join(f"{space}    {one},\n" for one in arguments) + f"{space})"


def define(name: str, parameters: Sequence[str], returns: str) -> str:
    """Return the head of a function, wrapped as the formatter does."""
    line = f"def {name}({', '.join(parameters)}) -> {returns}:"
    if len(line) <= LINE_LENGTH:
        return line
    inside = f"    {', '.join(parameters)}"
    if len(inside) <= LINE_LENGTH:
        return f"def {name}(\n{inside}\n) -> {returns}:"
    return f"def {name}(\n" + "".join(f"    {one},\n" for one in parameters) + f") -> {returns}:"


# ------------------------------------------------------------------------------------------------------ shared cells


def cells_for(cells: Sequence[Cell], names: Collection[str], taken: Collection[str], imports: Imports) -> str:
    """Return the text of the shared cells behind some names, with their imports moved to `imports`.

    Args:
        cells: all of them, in their order.
        names: shared names that the program uses.
        taken: names that the program has for its own.
        imports: takes the imports of these cells.

    Raises:
        ConfigError: they use guava_nb, or define a name that the program needs.
    """
    wanted = set().union(*(cells_behind(name, cells) for name in names)) if names else set()
    texts = [_body(cell, taken, imports) for cell in cells if cell.name in wanted]
    return "\n\n\n".join(text for text in texts if text)


def _body(cell: Cell, taken: Collection[str], imports: Imports) -> str:
    lines, gone = cell.text.splitlines(), set[int]()
    for statement in ast.parse(cell.text).body:
        span = range(statement.lineno - 1, statement.end_lineno or statement.lineno)
        if isinstance(statement, ast.Import | ast.ImportFrom):
            imports.take(statement)
            gone.update(span)
        elif isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
            gone.update(span)  # it does not run in a shared cell, and would run in a program
        elif clash := sorted(_defined(statement) & set(taken)):
            raise ConfigError(
                f"shared cell {cell.name!r} defines {clash[0]!r}, which the program needs for a function of its own: give it "
                "another name"
            )
    _refuse_guava(cell)
    return "\n".join(line.rstrip() for number, line in enumerate(lines) if number not in gone).strip("\n")


def _defined(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _refuse_guava(cell: Cell) -> None:
    for node in ast.walk(ast.parse(cell.text)):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if any(module.partition(".")[0] == "guava_nb" for module in modules):
            raise ConfigError(
                f"shared cell {cell.name!r} imports guava_nb (line {getattr(node, 'lineno', 0)}), which is not there when the "
                "program runs: write what it does there in torch, or keep that run in guava_nb"
            )


#: What programs import for the names that they use.
_KNOWN = (
    "import argparse", "import gc", "import hashlib", "import itertools", "import logging", "import os",
    "import random",
    "import tempfile", "import numpy as np",
    "import torch", "import torch.distributed as dist", "from collections import OrderedDict",
    "from collections.abc import Iterable, Iterator, Sequence", "from fnmatch import fnmatch",
    "from functools import cache, partial",
    "from itertools import islice", "from math import gcd", "from pathlib import Path", "from typing import Any",
    "from torch import nn", "from torch.distributed.device_mesh import DeviceMesh, init_device_mesh",
    "from torch.distributed.fsdp import fully_shard", "from torch.distributed.optim import ZeroRedundancyOptimizer",
    "from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B",
    "from torch.distributed.pipelining import SplitPoint, pipeline",
    "from torch.distributed.tensor import DTensor, Replicate, distribute_tensor",
    "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module",
    "from torch.nn.parallel import DistributedDataParallel", "from torch.utils._pytree import tree_leaves, tree_map",
    "from torch.utils._pytree import tree_map_only", "from torch.utils.checkpoint import checkpoint",
    "from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset", "import ray.train.torch",
    "from ray.train import Checkpoint", "from ray.train.torch import TorchTrainer", "from lightning.fabric import Fabric",
)  # fmt: skip


def known_imports(text: str, shared: str, imports: Imports) -> list[str]:
    """Return the imports of what a program names, as far as programs of this room need any.

    Args:
        text: the program without its imports and without shared cells.
        shared: text of the shared cells, without their imports.
        imports: theirs.

    Raises:
        ConfigError: a shared cell has another meaning for one of these names.
    """
    used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    theirs = {name for statement in ast.parse(shared).body for name in _defined(statement)}
    found = []
    for line in _KNOWN:
        (statement,) = ast.parse(line).body
        assert isinstance(statement, ast.Import | ast.ImportFrom)
        for alias in statement.names:
            name = alias.asname or alias.name.partition(".")[0]
            if name in used:
                said = alias.name + (f" as {alias.asname}" if alias.asname else "")
                of = f"from {statement.module} " if isinstance(statement, ast.ImportFrom) else ""
                found.append(f"{of}import {said}")
                if name in theirs or imports.means(name) not in ("", found[-1]):
                    raise ConfigError(
                        f"a shared cell has a {name!r} of its own, and the program needs that name ({found[-1]}): give it "
                        "another name"
                    )
    return found
