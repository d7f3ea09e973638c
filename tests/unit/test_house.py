"""The house rules that a tool can check: layers, lint, types, sizes, imports, READMEs, packaging, the README's commands."""

from __future__ import annotations

import ast
import importlib
import json
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
MODULE_LINES = 500
CLASS_LINES = 400
FUNCTION_LINES = 40
FOLDER_MODULES = 20
PARAMETERS = 8


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


# --------------------------------------------------------------------------------------------------------------- sizes


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    return (found for found in ast.walk(tree) if isinstance(found, Function))


def body_lines(function: Function) -> int:
    """Lines of the statements: a long signature or docstring helps the reader."""
    start = function.body[1 if ast.get_docstring(function) and len(function.body) > 1 else 0].lineno
    return (function.end_lineno or start) - start + 1


def test_modules_classes_and_functions_stay_small() -> None:
    too_long = []
    for path in SOURCES:
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
        too_long += [f"{name}: the limits know no excuse"] * ("over budget" in text)
        sizes = [("module", 1, len(text.splitlines()), MODULE_LINES)]
        for found in ast.walk(ast.parse(text)):
            if isinstance(found, ast.ClassDef):
                sizes.append((found.name, found.lineno, (found.end_lineno or 0) - found.lineno + 1, CLASS_LINES))
            elif isinstance(found, Function):
                sizes.append((found.name, found.lineno, body_lines(found), FUNCTION_LINES))
        too_long += [f"{name}:{line} {what}: {lines} lines" for what, line, lines, most in sizes if lines > most]
    assert not too_long, "\n".join(too_long)


def test_no_folder_holds_too_many_modules() -> None:
    folders: dict[Path, int] = {}
    for path in SOURCES:
        folders[path.parent] = folders.get(path.parent, 0) + (path.name != "__init__.py")
    assert {folder.name: count for folder, count in folders.items() if count > FOLDER_MODULES} == {}


def exported(path: Path) -> set[str]:
    """The names in a module's `__all__`."""
    return {
        name.value
        for found in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(found, ast.Assign | ast.AugAssign)
        and "__all__" in {ast.unparse(target) for target in getattr(found, "targets", [getattr(found, "target", None)])}
        for name in ast.walk(found.value)
        if isinstance(name, ast.Constant)
    }


def called_by_users() -> set[str]:
    """Names that users import: from guava_nb, from a room that exports some, from the modules of data sets."""
    return {name for path in [*PACKAGE.glob("*/__init__.py"), PACKAGE / "__init__.py"] for name in exported(path)} | {
        name for path in (PACKAGE / "datasets").glob("*.py") for name in exported(path)
    }


def methods_and_functions(tree: ast.Module) -> Iterator[tuple[str, Function, int]]:
    """Each function with the name at the module's top that it belongs to, and its positional parameters without self."""
    in_class = {
        id(function): "staticmethod" not in map(ast.unparse, function.decorator_list)
        for found in ast.walk(tree)
        if isinstance(found, ast.ClassDef)
        for function in found.body
        if isinstance(function, Function)
    }
    for top in tree.body:
        for function in functions(top):
            given = len(function.args.posonlyargs) + len(function.args.args)
            yield getattr(top, "name", ""), function, given - in_class.get(id(function), False)


def test_functions_take_few_parameters_unless_users_name_them() -> None:
    """More than 8 only where users call the function, and those beyond the 8th by keyword only."""
    users, too_many = called_by_users(), []
    for path in SOURCES:
        for owner, function, positional in methods_and_functions(ast.parse(path.read_text(encoding="utf-8"))):
            public = owner in users and (function.name == "__init__" or not function.name.startswith("_"))
            count = positional if public else positional + len(function.args.kwonlyargs)
            if count > PARAMETERS:
                too_many.append(f"{path.relative_to(ROOT)}:{function.lineno} {function.name}: {count} parameters")
    assert not too_many, "\n".join(too_many)


# ------------------------------------------------------------------------------------------------------- import circles


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.Module, known: set[str]) -> set[str]:
    """Modules of ours that a module names in an import, wherever it stands: in a function or for types only."""
    found: set[str] = set()
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import):
            found |= {name.name for name in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            whole = {f"{statement.module}.{name.name}" for name in statement.names} & known
            found |= whole or {statement.module}
    return found & known


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules that reach each other."""
    reached: dict[str, set[str]] = {}
    for name in graph:
        reached[name], waiting = set(), [name]
        while waiting:
            for following in graph[waiting.pop()] - reached[name]:
                reached[name].add(following)
                waiting.append(following)
    rings = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted((set(ring) for ring in rings if len(ring) > 1), key=sorted)


def test_modules_do_not_import_each_other_in_circles() -> None:
    names = {module_name(path): path for path in SOURCES}
    graph = {
        name: imported(ast.parse(path.read_text(encoding="utf-8")), set(names)) - {name} for name, path in names.items()
    }
    found = circles(graph)
    assert not found, "\n".join(", ".join(sorted(ring)) for ring in found)


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]
    tree = ast.parse("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.a import B\nfrom p import c")
    assert imported(tree, {"p", "p.a", "p.c"}) == {"p.a", "p.c"}


# ------------------------------------------------------------------------------------------------------------ documents

ROOMS = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))
PAGES = sorted(PACKAGE.glob("*.md"))
#: Folders in a room that have a page of their own.
INNER = sorted(path.parent for path in PACKAGE.glob("*/*/README.md"))
READMES = [*PAGES, ROOT / "tests" / "README.md", *(room / "README.md" for room in (*ROOMS, *INNER))]


def table_files(readme: Path) -> list[str]:
    """Code words in the first column of the tables that are headed "file"."""
    words, inside = [], False
    for line in readme.read_text(encoding="utf-8").splitlines():
        first = line.split("|")[1].strip() if line.startswith("|") else ""
        inside = bool(first) and (inside or first == "file")
        words += re.findall(r"`([^`]+)`", first) if inside else []
    return words


def modules_of(room: Path) -> set[str]:
    """Modules of a room by their path inside it; a package in it counts, and so do its modules."""
    return {path.relative_to(room).as_posix() for path in room.rglob("*.py") if path.name != "__init__.py"}


#: The table of `parallel` has the files of its folders, too.
WITH_TABLES = [*ROOMS, *(folder for folder in INNER if folder.parent.name != "parallel")]


@pytest.mark.parametrize("room", WITH_TABLES, ids=lambda room: room.name)
def test_the_readme_of_a_room_names_its_files_and_no_others(room: Path) -> None:
    """With or without its ending; a folder that is named stands for all of its files."""
    named = {word.rstrip("/").removesuffix(".py") for word in table_files(room / "README.md")}
    folders = {word for word in named if (room / word).is_dir()}
    modules = {file.removesuffix(".py") for file in modules_of(room)}
    assert [word for word in sorted(named - folders - modules) if not (room / f"{word}.py").is_file()] == [], (
        "do not exist"
    )
    unnamed = {file for file in modules - named if not any(file.startswith(f"{one}/") for one in folders)}
    assert sorted(unnamed) == [], "files that the table leaves out"


@pytest.mark.parametrize("readme", READMES, ids=lambda readme: f"{readme.parent.name}/{readme.name}")
def test_paths_in_a_readme_lead_somewhere(readme: Path) -> None:
    paths = re.findall(r"`((?:\w+/)+(?:\w+(?:\.py|\.md)?)?|\w+\.py)`", readme.read_text(encoding="utf-8"))
    bases = (readme.parent, PACKAGE, ROOT)
    there = {path for path in paths for base in bases if (base / path).exists() or (base / f"{path}.py").exists()}
    assert sorted(set(paths) - there) == []


def test_methods_and_fields_named_on_the_pages_of_the_house_exist() -> None:
    methods, bases = {}, {}
    for path in SOURCES:
        for found in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(found, ast.ClassDef):
                fields = {ast.unparse(field.target) for field in found.body if isinstance(field, ast.AnnAssign)}
                methods[found.name] = {function.name for function in functions(found)} | fields
                bases[found.name] = [ast.unparse(base).partition("[")[0] for base in found.bases]

    def has(owner: str, method: str) -> bool:
        return method in methods.get(owner, ()) or any(has(base, method) for base in bases.get(owner, ()))

    named = [found for page in PAGES for found in re.findall(r"`([A-Z]\w+)\.(\w+)", page.read_text(encoding="utf-8"))]
    assert named
    assert [f"{owner}.{method}" for owner, method in named if not has(owner, method)] == []


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("__init__.py")), ids=lambda path: path.parent.name)
def test_every_folder_says_what_it_is(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert len(text) >= 20 and text.split("\n")[0].endswith("."), "one true sentence: what it knows and what not"


def test_unit_tests_mirror_the_package() -> None:
    """tests/unit/<room>/test_<module>.py, or test_<module>_<what>.py; tests/unit/support mirrors tests/support."""
    unit, lost = ROOT / "tests" / "unit", []
    for path in sorted(unit.rglob("test_*.py")):
        folder = path.parent.relative_to(unit)
        room = ROOT / "tests" / "support" if folder == Path("support") else PACKAGE / folder
        names = {child.stem for child in room.iterdir()} if room.is_dir() else set()
        names |= {"explorer"} if folder == Path("sync") else set()  # walks all of the room's machines together
        tested = path.stem.removeprefix("test_")
        if not any(f"{tested}_".startswith(f"{name}_") for name in names | ({"house"} if folder == Path() else set())):
            lost.append(str(path.relative_to(unit)))
    assert lost == []


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


def test_the_conda_recipe_has_every_dependency() -> None:
    """Under conda's names; jinja's lines are left out, which no YAML reads."""
    text = (ROOT / "binder" / "conda-recipe" / "meta.yaml").read_text(encoding="utf-8")
    names = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
    run = text.partition("  run:\n")[2].partition("\ntest:")[0]
    here = {line.strip().removeprefix("- ") for line in run.splitlines() if line.strip()}
    bounds = [re.match(r"([A-Za-z0-9_.-]+)(.+)", line) for line in project()["project"]["dependencies"]]  # type: ignore[attr-defined]
    wanted = {f"{names.get(found[1], found[1])} {found[2]}" for found in bounds if found}
    assert here == wanted | {f"python {project()['project']['requires-python']}"}  # type: ignore[index]


def test_the_dev_container_is_built_from_binders_own_list() -> None:
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    dockerfile = ROOT / ".devcontainer" / container["build"]["dockerfile"]
    assert "binder/environment.yml" in dockerfile.read_text(encoding="utf-8")
    assert not (ROOT / "binder" / "Dockerfile").exists(), "Binder would take it in the place of environment.yml"


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
