"""`systems.md` has each place where the sources use what Windows or macOS lacks or takes otherwise, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from tests.support.systems import SYSTEMS, absent, nodes_of, uses

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "guava_nb"
SOURCES = sorted(PACKAGE.rglob("*.py"))
WORKFLOW = ROOT / ".github/workflows/systems.yml"
pytest.importorskip("mypy", reason="mypy brings the stubs of Python's library; it is part of the extra dev")


def rows() -> list[tuple[set[str], set[str], list[str]]]:
    """What is used, the files, and what happens on each system, by row of the page's table."""
    lines = [
        line for line in (PACKAGE / "systems.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")
    ]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    return [(set(re.findall(r"`([^`]+)`", one[0])), set(re.findall(r"`([^`]+)`", one[1])), one[2:]) for one in cells]


def used() -> set[tuple[str, str]]:
    return {(name, path.relative_to(PACKAGE).as_posix()) for path in SOURCES for name in uses(path)}


def test_the_page_has_each_use_and_no_other() -> None:
    named = [{(name, file) for name in names for file in files} for names, files, _ in rows()]
    found = used()
    assert not (lacking := found - set().union(*named)), f"not in systems.md: {sorted(lacking)}"
    for row, (names, files, _) in zip(named, rows(), strict=True):
        held = row & found
        assert names == {name for name, _ in held} and files == {file for _, file in held}, (
            f"not used any more: {sorted(names - {n for n, _ in held})} {sorted(files - {f for _, f in held})}"
        )


def test_each_row_says_what_happens_on_both_systems() -> None:
    assert all(len(said) == len(SYSTEMS) and all(said) for *_, said in rows())


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import os\nos.fork()", {"os.fork"}),
        ("from os import setsid as s", {"os.setsid"}),
        ("import os as o\no.killpg(1, 9)", {"os.killpg"}),
        ("import os\ngetattr(os, 'geteuid', None)", {"os.geteuid"}),
        ("import signal\nsignal.SIGKILL\nsignal.SIGINT", {"signal.SIGKILL", "signal.SIGINT"}),
        ("import fcntl", {"fcntl"}),
        ("import pwd, grp, termios", {"pwd", "grp", "termios"}),
        ("from resource import getrlimit", {"resource", "resource.getrlimit"}),
        ("import socket\nsocket.AF_UNIX\nsocket.AF_INET", {"socket.AF_UNIX"}),
        ("open('/dev/shm/x')", {"/dev"}),
        ("p.mkdir(mode=0o700)", {"mode="}),
        ("import os\nos.open('x', os.O_RDONLY, 0o600)", {"mode="}),
        ("run(x, start_new_session=True, preexec_fn=f)", {"start_new_session=", "preexec_fn="}),
        ("process.terminate()", {".terminate()"}),
        ("import os\nos.rename(a, b)", {"os.rename"}),
        ("import select\nselect.epoll()", {"select.epoll"}),
        ("import os\nos.getpid()\nos.cpu_count()", set()),
    ],
)
def test_the_scan_finds(source: str, found: set[str], tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text(source, encoding="utf-8")
    assert uses(path) == found


def test_the_stubs_tell_the_systems_apart() -> None:
    assert {"fork", "geteuid", "sched_getaffinity"} <= absent("os", "win32")
    assert "sched_getaffinity" in absent("os", "darwin") and "fork" not in absent("os", "darwin")


def test_files_are_replaced_in_one_place_only() -> None:
    """What waits for a reader of the old file on Windows is `systems.put_in_place`; a bare rename there fails now and then."""
    bare = []
    for path in SOURCES:
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner, name = ast.unparse(node.func.value), node.func.attr
                is_path = (
                    name in ("replace", "rename")
                    and len(node.args) == 1
                    and owner.endswith(("path", "partial", "file"))
                )
                if (owner, name) in (("os", "replace"), ("os", "rename")) or is_path:
                    bare.append(f"{path.relative_to(PACKAGE).as_posix()}: {ast.unparse(node)}")
    assert bare == ["systems.py: os.replace(partial, path)"]


def test_files_are_read_and_written_as_utf_8() -> None:
    """The default of Windows is another one."""
    without = []
    for path in SOURCES:
        for node in nodes_of(path):
            if not isinstance(node, ast.Call) or any(word.arg in ("encoding", None) for word in node.keywords):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            is_bare = (name, len(node.args)) in (("read_text", 0), ("write_text", 1))
            modes = [one.value for one in [*node.args[:2], *(w.value for w in node.keywords if w.arg == "mode")]
                     if isinstance(one, ast.Constant) and isinstance(one.value, str)]  # fmt: skip
            is_text = (
                name in ("open", "fdopen")
                and isinstance(node.func, ast.Name)
                and not any("b" in mode for mode in modes)
            )
            if is_bare or is_text:
                without.append(f"{path.relative_to(PACKAGE).as_posix()}:{node.lineno}: {ast.unparse(node)}")
    assert not without, "\n".join(without)


def test_the_workflow_runs_what_is_there_on_both_systems() -> None:
    made = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    (job,) = made["jobs"].values()
    assert set(job["strategy"]["matrix"]["os"]) == {"windows-latest", "macos-latest"}
    words = " ".join(step.get("run", "") for step in job["steps"]).split()
    paths = [word for word in words if word.startswith("tests/")]
    assert paths and all((ROOT / path).exists() for path in paths)
