"""The house rules that a tool can check: layers, lint, types, budgets, names, packaging, the README's commands."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import guava_nb

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "guava_nb"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MODULE_LINES = 400
FUNCTION_LINES = 40
#: A longer module or function says why in a comment that begins so.
EXCUSE = "# over budget:"


def run(*words: str, timeout_s: float = 110.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def project() -> dict[str, dict[str, object]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


# --------------------------------------------------------------------------------------------------------------- tools


def test_imports_only_point_down() -> None:
    pytest.importorskip("importlinter", reason="import-linter is part of the extra dev")
    code = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_lint_and_format() -> None:
    pytest.importorskip("ruff", reason="ruff is part of the extra dev")
    for words in (("ruff", "check", "--no-cache", "."), ("ruff", "format", "--no-cache", "--check", ".")):
        done = run(*words)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(300)
def test_types() -> None:
    pytest.importorskip("mypy", reason="mypy is part of the extra dev")
    done = run("mypy", timeout_s=290)
    assert done.returncode == 0, done.stdout + done.stderr


# ------------------------------------------------------------------------------------------------------------- imports


def test_importing_the_package_starts_and_loads_nothing() -> None:
    code = """
import sys, threading
import guava_nb
from guava_nb import errors
heavy = [name for name in ("torch", "numpy", "IPython", "ipywidgets", "ssl", "msgspec", "yaml") if name in sys.modules]
print(heavy, threading.active_count())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[] 1"


def modules() -> list[str]:
    found = [info.name for info in pkgutil.walk_packages([str(PACKAGE)], "guava_nb.")]
    return [name for name in found if not name.endswith("__main__")]


@pytest.mark.parametrize("name", ["guava_nb", *modules()])
def test_every_module_keeps_what_its_all_promises(name: str) -> None:
    module = importlib.import_module(name)
    public = getattr(module, "__all__", None)
    if public is None:
        assert not _defines_public_names(Path(str(module.__file__))), f"{name} has public names and no __all__"
        return
    assert len(set(public)) == len(public), f"{name}.__all__ repeats a name"
    assert [entry for entry in public if not hasattr(module, entry)] == []
    assert module.__doc__, f"{name} does not say what it knows"


def test_public_names_are_those_of_the_design() -> None:
    assert {"DistributedConfig", "JoinCode", "NetworkWorker", "Orchestrator", "Run", "GuavaError"} <= set(
        guava_nb.__all__
    )
    assert set(guava_nb.errors.__all__) <= set(guava_nb.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Orchestrater'"):
        guava_nb.Orchestrater  # noqa: B018


def _defines_public_names(path: Path) -> bool:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return any(
        isinstance(statement, ast.FunctionDef | ast.ClassDef) and not statement.name.startswith("_")
        for statement in body
    )


# ------------------------------------------------------------------------------------------------------------- budgets


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (found for found in ast.walk(tree) if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef))


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the statements; signature and docstring are what a reader is glad of."""
    start = function.body[1 if ast.get_docstring(function) and len(function.body) > 1 else 0].lineno
    return (function.end_lineno or start) - start + 1


def test_modules_and_functions_stay_small() -> None:
    too_long = []
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        if len(lines) > MODULE_LINES and EXCUSE not in "\n".join(lines[:40]):
            too_long.append(f"{path.relative_to(ROOT)}: {len(lines)} lines")
        for function in functions(ast.parse(text)):
            length, source = body_lines(function), "\n".join(lines[function.lineno - 1 : function.end_lineno])
            if length > FUNCTION_LINES and EXCUSE not in source:
                too_long.append(f"{path.relative_to(ROOT)}:{function.lineno} {function.name}: {length} lines")
    assert too_long == []


# --------------------------------------------------------------------------------------------------------- forbidden


def test_nothing_is_unpickled_stubbed_or_swallowed() -> None:
    found = []
    for path in SOURCES:
        for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            problem = _problem(statement)
            if problem:
                found.append(f"{path.relative_to(ROOT)}:{getattr(statement, 'lineno', 0)} {problem}")
    assert found == []


def _problem(statement: ast.AST) -> str:
    match statement:
        case ast.Import(names=names) if any(
            name.name in ("pickle", "cloudpickle", "dill", "marshal") for name in names
        ):
            return "imports a pickle"
        case ast.ImportFrom(module="pickle" | "cloudpickle" | "dill" | "marshal"):
            return "imports a pickle"
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords):
            return "" if _weights_only(keywords) else "torch.load without weights_only=True"
        case ast.Call(func=ast.Attribute(value=ast.Name(id="yaml"), attr="load" | "unsafe_load" | "full_load")):
            return "yaml that makes objects"
        case ast.ExceptHandler(body=[ast.Pass()]):
            return "swallows an exception"
        case ast.Raise(exc=ast.Name(id="NotImplementedError") | ast.Call(func=ast.Name(id="NotImplementedError"))):
            return "a stub"
    return ""


def _weights_only(keywords: list[ast.keyword]) -> bool:
    return any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in keywords)


@pytest.mark.parametrize(
    "snippet",
    [
        "import pickle",
        "from dill import loads",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "yaml.load(f)",
        "try:\n    f()\nexcept OSError:\n    pass",
        "raise NotImplementedError",
        "raise NotImplementedError('later')",
    ],
)
def test_the_search_finds_what_it_looks_for(snippet: str) -> None:
    assert any(_problem(statement) for statement in ast.walk(ast.parse(snippet)))
    assert not any(_problem(statement) for statement in ast.walk(ast.parse("torch.load(f, weights_only=True)")))


def test_no_unfinished_work_is_marked() -> None:
    marks = re.compile(r"#\s*(TODO|FIXME|XXX|HACK)\b")
    lines = [(path, line) for path in SOURCES for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(path.name, line) for path, line in lines if marks.search(line)] == []


# ----------------------------------------------------------------------------------------------------------- packaging


def block(name: str) -> str:
    found = re.search(
        rf"<!--\s*{name}\s*-->\s*```[a-z]*\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S
    )
    assert found, f"README.md has no fenced block after <!-- {name} -->"
    return found[1].strip()


def requirement_names(lines: list[str]) -> dict[str, str]:
    """Name of each requirement to its line; comments and pip options left out."""
    kept = [line.split("#")[0].strip() for line in lines]
    return {re.split(r"[^A-Za-z0-9_.-]", line)[0].lower(): line for line in kept if line and not line.startswith("-")}


def test_the_readme_has_both_commands_with_a_torch_that_was_tested() -> None:
    from guava_nb.doctor.software import TESTED_TORCH

    for name in ("run", "test"):
        pins = re.findall(r"torch==([0-9.]+)", block(name))
        assert pins, f"the {name} command does not pin torch"
        assert all(pin.startswith(TESTED_TORCH) for pin in pins)
    assert "guava demo --workers 2" in block("run")
    assert "python -m pytest" in block("test")


def test_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_room_says_why_it_is_so_and_the_package_is_typed() -> None:
    rooms = [path.parent for path in PACKAGE.glob("*/__init__.py")]
    assert [room.name for room in rooms if not (room / "README.md").is_file()] == []
    assert (PACKAGE / "py.typed").is_file()


def test_ci_runs_the_readme_and_nothing_else() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert script.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in script
    assert "pytest" not in script, "the command is the README's"
    done = subprocess.run(
        ["bash", "-n", str(ROOT / ".ci" / "run")], capture_output=True, text=True, timeout=10, check=False
    )
    assert done.returncode == 0, done.stderr


def test_dependencies_are_loose_lower_bounds() -> None:
    for line in project()["project"]["dependencies"]:  # type: ignore[attr-defined]
        assert re.match(r"[A-Za-z0-9_.-]+>=[0-9.]+(,!=[0-9.]+)*$", line), f"{line} could replace what a host ships"


def test_binder_has_every_dependency_and_the_cpu_build_of_torch() -> None:
    environment = yaml.safe_load((ROOT / "binder" / "environment.yml").read_text(encoding="utf-8"))
    conda = [line for line in environment["dependencies"] if isinstance(line, str)]
    (pip,) = [line["pip"] for line in environment["dependencies"] if isinstance(line, dict)]
    wanted = requirement_names(project()["project"]["dependencies"])  # type: ignore[arg-type]
    here = requirement_names(pip)
    assert set(wanted) - set(here) == {"torch"}
    assert [name for name, line in wanted.items() if name != "torch" and here[name] != line] == []
    assert any(re.fullmatch(r"pytorch-cpu>=[0-9.]+", line) for line in conda)


@pytest.mark.parametrize("name", ["postBuild", "start"])
def test_scripts_of_binder_run_and_speak_of_files_that_are_there(name: str) -> None:
    path = ROOT / "binder" / name
    text = path.read_text(encoding="utf-8")
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, timeout=10, check=False)
    assert text.startswith("#!/usr/bin/env bash\n") and done.returncode == 0, done.stderr
    assert os.access(path, os.X_OK)
    files = re.findall(r"\b\w+\.(?:yml|txt|toml)\b", text)
    assert [file for file in files if not (ROOT / "binder" / file).exists()] == []


def test_binder_installs_nothing_beside_its_list_and_starts_what_it_is_given() -> None:
    build, start = ((ROOT / "binder" / name).read_text(encoding="utf-8") for name in ("postBuild", "start"))
    assert [line for line in build.splitlines() if "install" in line and "--no-deps -e ." not in line] == []
    assert "OMP_NUM_THREADS=1" in start and start.rstrip().endswith('exec "$@"')
