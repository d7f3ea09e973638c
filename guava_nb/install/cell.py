"""The cell that makes a notebook without guava_nb a worker of a session: it holds the way, the proof, and the wheel's hash."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from importlib import metadata
from typing import TypeVar

from guava_nb.install import bootstrap
from guava_nb.install.wheel import DISTRIBUTION, Wheel
from guava_nb.link.registry import WHEEL
from guava_nb.protocol.framing import OutgoingMessage
from guava_nb.protocol.handshake_proof import PREAMBLE
from guava_nb.protocol.joincode import JoinCode
from guava_nb.protocol.messages import Attach, Channel

__all__ = ["WORKER_NEEDS", "bootstrap_text", "plain_cell", "wheel_request", "worker_cell", "worker_requirements"]

#: Of our dependencies those that a worker in a notebook imports, or its user's code may expect; a test runs one with no more.
WORKER_NEEDS = (
    *("torch", "numpy", "msgspec", "zstandard", "websockets", "cryptography"),
    *("psutil", "filelock", "pyyaml", "python-dotenv", "pyflakes", "tqdm", "nvidia-ml-py"),
)
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def plain_cell(code: JoinCode) -> str:
    """The cell for a notebook that has guava_nb. Holds the secret."""
    return f"%load_ext guava_nb\n%guava_worker {code.encode()}"


def worker_cell(code: JoinCode, wheel: Wheel) -> str:
    """The cell for a notebook that may lack guava_nb: fetches the wheel from the session of the code. Holds the secret."""
    size_mb = len(wheel.content) / 1e6
    return "\n".join(
        [
            f"# Brings guava_nb {wheel.version} ({size_mb:.1f} MB) from the session itself, checks it, installs it, and works.",
            bootstrap_text(),
            f'guava_nb_cell(\n    "{code.encode()}",',
            f'    name="{wheel.name}", size={len(wheel.content)},\n    sha256="{wheel.sha256}",',
            f"    needs={worker_requirements()!r},",
            f'    preamble={PREAMBLE!r}, request=bytes.fromhex("{wheel_request().hex()}"),\n)',
            plain_cell(code),
        ]
    )


def worker_requirements() -> list[str]:
    """What pip is asked for where it is missing, with our bounds."""
    known = {name[0]: text for text in metadata.requires(DISTRIBUTION) or () if (name := _NAME.match(text))}
    return [known.get(name, name) for name in WORKER_NEEDS]


def wheel_request() -> bytes:
    """The record that asks for the wheel, as it goes over the connection."""
    record = Attach(session_id=bytes(16), identity=bytes(32), purpose=WHEEL, incarnation=0, received={})
    frames = OutgoingMessage(record, Channel.CONTROL, 0).frames()
    return b"".join(bytes(buffer) for frame in frames for buffer in frame)


def bootstrap_text() -> str:
    """The text of `bootstrap.py` as one function, without docstrings, annotations and comments: it leaves one name behind."""
    tree = _Bare().visit(ast.parse(inspect.getsource(bootstrap)))
    body = textwrap.indent(ast.unparse(tree), "    ")
    return f"def guava_nb_cell(*words, **more):\n{body}\n    bring(*words, **more)"


_Documented = TypeVar("_Documented", ast.Module, ast.ClassDef, ast.FunctionDef)


class _Bare(ast.NodeTransformer):
    """Takes away what only a reader of this package needs."""

    def visit_Module(self, node: ast.Module) -> ast.Module:  # noqa: N802 - ast's names
        node.body = [one for one in node.body if not self._is_ours(one)]
        return self._without_docstring(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:  # noqa: N802
        return self._without_docstring(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:  # noqa: N802
        node.returns = None
        for argument in (*node.args.args, *([node.args.vararg] if node.args.vararg else [])):
            argument.annotation = None
        return self._without_docstring(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.Assign:  # noqa: N802
        assert node.value is not None
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def _without_docstring(self, node: _Documented) -> _Documented:
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        self.generic_visit(node)
        return node

    @staticmethod
    def _is_ours(statement: ast.stmt) -> bool:
        if isinstance(statement, ast.ImportFrom):
            return statement.module in ("__future__", "typing")
        return isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__"
