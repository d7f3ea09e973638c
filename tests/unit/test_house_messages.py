"""Messages name only what exists (magics, commands, packages, variables, calls, keywords, settings), in words without riddles."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import guava_nb
from guava_nb.cli.main import build_parser
from guava_nb.config import DistributedConfig
from guava_nb.notebook.commands import COMMANDS
from guava_nb.notebook.settings import Guava
from tests.support.messages import PACKAGE, Text, messages, texts

#: A reader must guess who or what is meant.
RIDDLES = re.compile(
    r"\b(nobody|somebody|anybody|whoever|whomever|whom|whichever|such ones|what is there|who is there|lets? us in|lets nobody|"
    r"holds all the same|is there no more)\b",
    re.I,
)
#: A reader of code and pages must guess it, too: a thread, a user, a worker, another program?
UNNAMED = re.compile(r"\b(?:no|some|any|every)body\b|\bwho(?:so|m)?ever\b", re.I)
PIP = re.compile(r"(?:pip install|guava_pip) ((?:-\S+ )*)\"?'?([A-Za-z][\w-]*)")
#: Packages that are no requirement of ours, and that a message tells to install where they are missed.
OTHER_PACKAGES = {"einops", "guava-nb", "huggingface_hub", "ipykernel", "pyngrok", "ray", "safetensors"}
#: Names of functions and keywords of others (torch, NumPy, pandas, transformers), and of a program that is written for the user.
OTHER_CALLS = {
    *("as_subclass", "cross_entropy", "full_tensor", "get_extra_state", "init_process_group", "load_state_dict", "manual_seed"),
    *("no_grad", "renorm_", "requires_grad_", "reset_index", "save_pretrained", "state_dict", "zero_grad"),
    *("build_data", "to_dense", "to_pydatetime", "guava_nb_cell"),
}  # fmt: skip
OTHER_KEYWORDS = {
    *("batch_first", "create_graph", "drop_last", "enable_nested_tensor", "max_norm", "memory_format", "num_return_sequences"),
    *("multiprocessing_context", "requires_grad", "return_inverse", "use_reentrant", "weights_only", "num_workers"),
    *("reduction", "sparse", "strict", "min"),
}  # fmt: skip


@cache
def public_names() -> tuple[frozenset[str], frozenset[str]]:
    """Names that users call, and the keywords that these take."""
    calls, keywords = set(), set(inspect.signature(DistributedConfig).parameters)
    for found in _public():
        calls.add(found.__name__)
        members = [member for name, member in inspect.getmembers(found, callable) if not name.startswith("__")]
        for one in (found, *(members if inspect.isclass(found) else ())):
            calls.add(getattr(one, "__name__", ""))
            try:
                keywords |= set(inspect.signature(one).parameters)
            except (TypeError, ValueError):
                continue
    return frozenset(calls), frozenset(keywords)


def _public() -> Iterator[type]:
    """Classes and functions of guava_nb, and of the rooms and modules from which users import more."""
    rooms = (
        guava_nb,
        *map(importlib.import_module, (f"guava_nb.{name}" for name in ("backend", "datasets", "telemetry"))),
    )
    folder = PACKAGE / "datasets"
    files = (importlib.import_module(f"guava_nb.datasets.{path.stem}") for path in folder.glob("*.py"))
    for module in (*rooms, *files):
        for name in getattr(module, "__all__", ()):
            found = getattr(module, name)
            if inspect.isclass(found) or inspect.isfunction(found):
                yield found


def named(pattern: str, where: list[Text] | None = None) -> dict[str, str]:
    """What texts name, with the last place of each."""
    return {found: place for text, place in where or texts() for found in re.findall(pattern, text)}


def is_code(text: str) -> bool:
    """Whether a text is no sentence: HTML, a regular expression, SQL, or a piece of Python for a cell or a program."""
    if re.search(r"[<\\]|PRAGMA", text):
        return True
    bare = text.strip().strip(",")
    for form in (bare, f"{bare}\n    pass", f"f({bare})", f"{bare})", f"f({bare}"):
        try:
            ast.parse(form)
        except SyntaxError:
            continue
        return True
    return False


def test_code_is_told_from_sentences() -> None:
    for text in (
        "name=X, size=X,",
        "def f(a: int) -> None:",
        ", group=mesh.get_group()",
        "<b>x</b>",
        "tree_map(f, batch)",
    ):
        assert is_code(text)
    assert not is_code("set pipeline_balance='time' (--balance time), or call run.stop()")


def test_messages_are_listed_from_all_rooms() -> None:
    rooms = {place.split("/")[1] for _, place in messages()}
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - rooms == {"outer_methods"}  # it says nothing
    assert len(messages()) > 2000
    assert all(place.startswith("guava_nb/hub/") for _, place in messages("hub"))


def test_no_message_speaks_in_riddles() -> None:
    assert [(place, found[0]) for text, place in messages() if (found := RIDDLES.search(text))] == []


def test_no_page_and_no_comment_leaves_open_who_is_meant() -> None:
    root = PACKAGE.parent
    files = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.md"), *(root / "notebooks").glob("*.md"), root / "README.md"]
    found = {path.relative_to(root).as_posix(): UNNAMED.findall(path.read_text(encoding="utf-8")) for path in files}
    assert len(files) > 500 and {path: words for path, words in found.items() if words} == {}


def test_riddles_are_found() -> None:
    for text in ("whoever runs it must allow it", "Nobody is here to end the step", "X lets us in and forbids it"):
        assert RIDDLES.search(text)
    assert not RIDDLES.search("No worker is here to end the step")


def test_magics_that_a_message_names_exist() -> None:
    assert set(named(r"%(guava_\w+)")) - {command.name for command in COMMANDS} == set()


def test_commands_that_a_message_names_exist() -> None:
    help_text = build_parser().format_help().partition("commands:")[2]
    assert set(named(r"(?<![%\w.])guava ([a-z]+)\b")) - set(re.findall(r"^ {4}(\w+)", help_text, re.M)) == set()


def test_packages_that_a_message_tells_to_install_are_ours_or_known() -> None:
    project = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    ours = {name.lower() for name in re.findall(r'^ *"([\w-]+)[>=~!]', project, re.M)}
    given = {package: place for text, place in texts() for _, package in PIP.findall(text)}
    words = {"X", "FOLDER", "packages", "installs", "needs"}  # a value, or a sentence that goes on
    unknown = {name for name in given if name not in words and name.lower() not in ours | OTHER_PACKAGES}
    assert unknown == set()


def test_variables_that_a_message_names_are_read() -> None:
    """Each is a setting's, or stands in the code by itself, where it is read."""
    fields = {f"GUAVA_{name.upper()}" for name in inspect.signature(DistributedConfig).parameters}
    alone = {text.rstrip("_") for text, _ in texts() if re.fullmatch(r"GUAVA_[A-Z_]+", text)}
    assert set(named(r"\bGUAVA_[A-Z_]*[A-Z]\b")) - fields - alone == set()


def test_settings_of_the_panel_that_a_message_names_exist() -> None:
    assert set(named(r"Guava\.(\w+)")) - set(Guava.class_trait_names()) == set()


@pytest.mark.parametrize("kind", ["call", "keyword"])
def test_calls_and_keywords_that_a_message_names_exist(kind: str) -> None:
    """Keys of launchers (NAME:WHAT,KEY=VALUE) are no arguments of calls; a wrong one is refused with the list of them."""
    calls, keywords = public_names()
    shown = [(text, place) for text, place in messages() if not is_code(text) and "/launchers/" not in place]
    if kind == "call":
        found, known = named(r"\b([a-z]+(?:_[a-z0-9]+)+_?)\(", shown), calls | OTHER_CALLS
    else:
        found, known = named(r"(?<![-\w.,:])([a-z]\w{2,})=(?![= ])", shown), keywords | OTHER_KEYWORDS
    assert {name: place for name, place in found.items() if name not in known} == {}


def test_files_that_a_message_names_exist_or_are_examples() -> None:
    examples = {"helpers.py", "train.py"}
    files = named(r"\b([\w/.-]+\.(?:py|md|ya?ml|toml|ipynb))\b", messages())
    assert [name for name in files if name not in examples and not any(Path(PACKAGE.parent).rglob(name))] == []
