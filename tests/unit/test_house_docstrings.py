"""What users call says of each argument what it is: public functions of three or more parameters have Args for each."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from guava_nb.spec.training_options import option_infos
from tests.unit.test_house import PACKAGE, ROOT, SOURCES, Function, exported

#: Rooms whose every public function is named by users, or by those who add one of a kind.
ROOMS = ("launchers", "outer_methods", "split", "tunnels", "wire_formats")
FEW = 3


#: `@takes_options()` puts them in the place of the mark.
OPTIONS = {"{options}": {one.name for one in option_infos()} | {"options"}}


def documented(docstring: str) -> set[str]:
    """The names of a docstring's Args and Attributes; several may share a line: `host, port: where it listens.`"""
    found: set[str] = set().union(*(names for mark, names in OPTIONS.items() if mark in docstring))
    is_inside = False
    for line in docstring.splitlines():
        if re.fullmatch(r"\w[\w ()]*:", line.strip()):
            is_inside = line.strip() in ("Args:", "Attributes:")
        elif is_inside and (names := re.match(r"\s*((?:\*{0,2}\w+(?: \(.*?\))?, )*\*{0,2}\w+)(?: \(.*?\))?:", line)):
            found |= {name.strip(" *") for name in re.sub(r"\(.*?\)", "", names[1]).split(",")}
    return found


def parameters(function: Function) -> list[str]:
    given = function.args
    names = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    return [name.arg for name in names if name.arg not in ("self", "cls")]


@cache
def modules() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


@cache
def bases() -> dict[str, list[str]]:
    return {
        found.name: [ast.unparse(base).partition("[")[0] for base in found.bases]
        for module in modules().values()
        for found in module.body
        if isinstance(found, ast.ClassDef)
    }


def of_users() -> set[str]:
    """Classes and functions that users import from guava_nb or a room, with the classes that those are made of."""
    inits = [PACKAGE / "__init__.py", *PACKAGE.glob("*/__init__.py"), *(PACKAGE / "datasets").glob("*.py")]
    names, known = {name for path in inits for name in exported(path)}, bases()
    waiting = list(names)
    while waiting:
        above = set(known.get(waiting.pop(), ())) - names
        names |= above
        waiting += above
    return names


def public_functions() -> Iterator[tuple[str, Function, str]]:
    """Where it stands, the function, and its docstring; that of a constructor may stand at its class."""
    users = of_users()
    for path, module in modules().items():
        is_open = path.relative_to(PACKAGE).parts[0] in ROOMS
        for top in module.body:
            name = getattr(top, "name", "_")
            if name.startswith("_") or not (is_open or name in users):
                continue
            about = (ast.get_docstring(top) or "") if isinstance(top, ast.ClassDef | Function) else ""
            inside = [one for one in top.body if isinstance(one, Function)] if isinstance(top, ast.ClassDef) else [top]
            for function in inside:
                if isinstance(function, Function) and (function.name == "__init__" or function.name[0] != "_"):
                    own = ast.get_docstring(function) or ""
                    told = f"{about}\n{own}" if function.name == "__init__" else own
                    yield f"{path.relative_to(ROOT)}:{function.lineno} {function.name}", function, told


def test_what_users_call_says_what_each_argument_is() -> None:
    found = [(where, parameters(function), docs) for where, function, docs in public_functions()]
    assert len(found) > 300
    lacking = [
        f"{where}: {', '.join(missing)}"
        for where, names, docs in found
        if len(names) >= FEW and (missing := [name for name in names if name not in documented(docs)])
    ]
    assert not lacking, "\n".join(lacking)


def named(docstring: str, title: str) -> set[str]:
    """Names that one section explains, those at its own indentation only."""
    found, depth = set[str](), None
    for line in docstring.partition(f"{title}:\n")[2].splitlines():
        indent = len(line) - len(line.lstrip())
        depth = indent if depth is None else depth
        if line.strip() and indent < depth:
            break
        if indent == depth and (names := re.match(r"\s*((?:\*{0,2}\w+, )*\*{0,2}\w+)(?: \(.*?\))?:", line)):
            found |= {name.strip(" *") for name in names[1].split(",")}
    return found


@cache
def attributes() -> dict[str, set[str]]:
    """By name of a class, what it assigns, declares or defines, wherever in its code; those of one name together."""
    found: dict[str, set[str]] = {}
    for made in (node for module in modules().values() for node in module.body if isinstance(node, ast.ClassDef)):
        own = found.setdefault(made.name, set())
        for node in ast.walk(made):
            if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.attr if isinstance(node, ast.Attribute) else node.id)
            elif isinstance(node, Function):
                own.add(node.name)
    return found


def all_attributes(name: str) -> set[str]:
    return attributes().get(name, set()).union(*(all_attributes(base) for base in bases().get(name, ())))


def test_a_docstring_names_no_argument_and_no_attribute_that_is_not_there() -> None:
    """In all rooms, private functions too: it is what a rename leaves behind."""
    wrong = []
    for path, top in ((path, top) for path, module in modules().items() for top in module.body):
        where = path.relative_to(ROOT)
        if isinstance(top, ast.ClassDef):
            docs = ast.get_docstring(top) or ""
            if "Attributes:" in docs and (gone := named(docs, "Attributes") - all_attributes(top.name)):
                wrong.append(f"{where}:{top.lineno} {top.name}: {', '.join(sorted(gone))}")
        for function in top.body if isinstance(top, ast.ClassDef) else [top]:
            if not isinstance(function, Function) or function.args.kwarg is not None:  # else they may be another's
                continue
            docs = ast.get_docstring(top if function.name == "__init__" else function) or ""
            if "Args:" in docs and (gone := named(docs, "Args") - set(parameters(function))):
                wrong.append(f"{where}:{function.lineno} {function.name}: {', '.join(sorted(gone))}")
    assert not wrong, "\n".join(wrong)


def test_names_of_one_section_are_read_at_its_own_indentation() -> None:
    text = "Do.\n\nArgs:\n    one, *two: both,\n        and more: of these\n\nRaises:\n    ValueError: no."
    assert named(text, "Args") == {"one", "two"}


def test_arguments_are_read_from_a_docstring() -> None:
    text = (
        "Do.\n\nArgs:\n    one, *two: both.\n        more: of these\n    three (int): third.\n\nReturns:\n    four: no."
    )
    assert documented(text) >= {"one", "two", "three"} and "four" not in documented(text)


#: Classes of others that only docstrings name.
FOREIGN = {"BatchEncoding", "Unpack"}
REFERENCE = re.compile(r"`([A-Z][a-z]\w*)(?:\.(\w+))?(?:\(\))?`")


def test_classes_and_methods_that_docstrings_and_comments_name_exist() -> None:
    """What else a rename leaves behind, in private code too."""
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    known = FOREIGN.union(*(re.findall(r"(?<![`\w])[A-Z][a-z]\w*", text) for text in texts.values()))
    wrong = []
    for path, text in texts.items():
        for owner, name in REFERENCE.findall(text):
            is_ours = bool(name) and owner in bases() and bases()[owner] == []
            if owner not in known or (is_ours and name not in attributes()[owner]):
                wrong.append(f"{path.relative_to(ROOT)}: {owner}{'.' if name else ''}{name}")
    assert not wrong, "\n".join(sorted(set(wrong)))


#: What tells a tensor's shape: a legend such as `[B, S, H]`, or a word for one that needs none.
SHAPE = re.compile(r"\[[^\]\n]*\]|scalar|one element|(any|full|local) shape|flat")


def tensor_functions() -> Iterator[tuple[str, str]]:
    """Public functions and methods of all rooms that take or return a tensor, with the docstrings that may tell its shape."""
    for path, module in modules().items():
        where = path.relative_to(ROOT)
        for top in module.body:
            above = [
                ast.get_docstring(module) or "",
                ast.get_docstring(top) or "" if isinstance(top, ast.ClassDef) else "",
            ]
            for one in top.body if isinstance(top, ast.ClassDef) else [top]:
                if not isinstance(one, Function) or one.name.startswith("_") or getattr(top, "name", "_")[0] == "_":
                    continue
                given = one.args
                notes = [arg.annotation for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)] + [one.returns]
                texts = [ast.unparse(note) for note in notes if note is not None]
                if any(re.fullmatch(r"(torch\.)?Tensor( \| None)?", text) for text in texts):
                    yield f"{where}:{one.lineno} {one.name}", "\n".join([*above, ast.get_docstring(one) or ""])


def test_functions_of_tensors_tell_their_shapes() -> None:
    """At the function, at its class, or in a legend at the module's top."""
    found = list(tensor_functions())
    assert len(found) > 100
    assert [where for where, text in found if not SHAPE.search(text)] == []
