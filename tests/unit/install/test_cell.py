"""The pasted cell: plain Python of the standard library with the code, the hash and what a worker needs; what it asks pip for."""

from __future__ import annotations

import ast
import io
import sys
from pathlib import Path
from typing import Any

import pytest

from guava_nb.install import bootstrap
from guava_nb.install.bootstrap import NotBrought, bring
from guava_nb.install.cell import WORKER_NEEDS, bootstrap_text, worker_cell, worker_requirements
from guava_nb.install.wheel import Wheel, pack
from guava_nb.protocol.joincode import JoinCode

CODE = JoinCode.new("10.0.0.7", 4242, b"f" * 16, b"secret of 16 b..")
WHEEL = pack(
    "guava_nb", "9.1", {"guava_nb-9.1.dist-info/METADATA": b"Metadata-Version: 2.1\nName: guava-nb\nVersion: 9.1\n"}
)


def test_its_text_is_the_standard_library_alone_and_leaves_one_name() -> None:
    text = bootstrap_text()
    tree = ast.parse(text)
    assert [one.name for one in tree.body if isinstance(one, ast.FunctionDef)] == ["guava_nb_cell"]
    assert len(tree.body) == 1
    imported = {
        (one.module if isinstance(one, ast.ImportFrom) else one.names[0].name).partition(".")[0]
        for one in ast.walk(tree)
        if isinstance(one, ast.Import | ast.ImportFrom)
    }
    assert imported <= sys.stdlib_module_names and "typing" not in imported
    assert '"""' not in text and "Any" not in text


def test_the_whole_cell_is_python_and_two_magics_and_says_what_it_does() -> None:
    cell = worker_cell(CODE, WHEEL)
    lines = cell.splitlines()
    assert lines[0].startswith("# Brings guava_nb 9.1") and "from the session itself" in lines[0]
    assert lines[-2:] == ["%load_ext guava_nb", f"%guava_worker {CODE.encode()}"]
    call = ast.parse("\n".join(lines[:-2])).body[-1]
    assert isinstance(call, ast.Expr) and isinstance(call.value, ast.Call)
    given = {word.arg: ast.unparse(word.value) for word in call.value.keywords}
    assert WHEEL.sha256 in given["sha256"] and given["size"] == str(len(WHEEL.content))


def test_what_a_worker_needs_is_of_our_own_dependencies_with_our_bounds() -> None:
    asked = worker_requirements()
    assert len(asked) == len(WORKER_NEEDS) and all(any(sign in text for sign in "<>=") for text in asked)
    assert not any(name in text for text in asked for name in ("pyngrok", "matplotlib", "pytest"))


class Pip:
    """What pip would be asked, in place of pip."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, here: dict[str, str], wheel: Wheel = WHEEL) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.frozen = ""
        self.content = wheel.content
        monkeypatch.setattr(bootstrap, "pip", self)
        monkeypatch.setattr(bootstrap, "fetch", lambda *words: self.content)
        monkeypatch.setattr(bootstrap, "is_here", lambda version, sha256: False)
        monkeypatch.setattr(bootstrap.metadata, "distributions", lambda: [Installed(*one) for one in here.items()])
        monkeypatch.delitem(sys.modules, "guava_nb")

    def __call__(self, doing: str, *words: str) -> None:
        self.asked.append(words)
        for word, following in zip(words, words[1:], strict=False):
            if word == "--constraint":
                self.frozen = Path(following).read_text(encoding="utf-8")

    def bring(self, wheel: Wheel = WHEEL, needs: tuple[str, ...] = ("torch>=2.11", "msgspec>=0.18.6")) -> None:
        bring(CODE.encode(), wheel.name, len(wheel.content), wheel.sha256, list(needs), b"", b"")


class Installed:
    def __init__(self, name: str, version: str) -> None:
        self.metadata, self.version = {"Name": name}, version


def test_only_what_is_missing_is_installed_and_all_that_is_here_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(monkeypatch, {"torch": "2.8.0+cu126", "NumPy": "2.0.2", "odd": "of the system", "guava-nb": "0.0.1"})
    pip.bring()
    missing, whole = pip.asked
    assert missing[0] == "--constraint" and missing[2:] == ("msgspec>=0.18.6",), "torch stays, though it is older"
    assert pip.frozen == "torch==2.8.0+cu126\nnumpy==2.0.2\n"
    assert whole[:2] == ("--no-deps", "--force-reinstall") and whole[2].endswith("guava_nb-9.1-py3-none-any.whl")


def test_nothing_missing_asks_pip_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(monkeypatch, {"torch": "2.13.0", "msgspec": "0.19"})
    pip.bring()
    assert len(pip.asked) == 1


@pytest.mark.parametrize("change", [lambda content: content[:-1], lambda content: content[:-1] + b"?", lambda _: b""])
def test_other_bytes_than_the_cell_expects_are_not_installed(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    pip = Pip(monkeypatch, {})
    pip.content = change(WHEEL.content)
    with pytest.raises(NotBrought, match=r"are not what this cell expects; run %guava_up again in the other notebook"):
        pip.bring()
    assert pip.asked == []


def test_a_kernel_that_has_another_version_loaded_is_told_to_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(monkeypatch, {})
    monkeypatch.setitem(sys.modules, "guava_nb", io)
    with pytest.raises(NotBrought, match="guava_nb 9.1 is installed, and this kernel has another one: restart it"):
        pip.bring()


@pytest.mark.parametrize(
    ("version", "noted", "is_here"),
    [
        ("9.1", '{"archive_info": {"hashes": {"sha256": "ab"}}}', True),
        ("9.1", '{"archive_info": {"hash": "sha256=ab"}}', True),
        ("9.1", '{"archive_info": {"hashes": {"sha256": "cd"}}}', False),
        ("9.1", '{"dir_info": {"editable": true}}', True),
        ("9.1", "", True),
        ("9.0", "", False),
    ],
)
def test_what_is_here_is_known_by_its_version_and_the_hash_that_pip_noted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], version: str, noted: str, is_here: bool
) -> None:
    class Found:
        def __init__(self) -> None:
            self.version = version

        def read_text(self, name: str) -> str | None:
            return noted or None

    monkeypatch.setattr(bootstrap.metadata, "distribution", lambda name: Found())
    assert bootstrap.is_here("9.1", "ab") is is_here
    unchecked = is_here and "sha256" not in noted
    told = "Using the guava_nb 9.1 that is installed here: it has no recorded hash to check.\n"
    assert capsys.readouterr().out == (told if unchecked else "")


def test_what_went_wrong_is_shown_without_a_traceback() -> None:
    assert NotBrought("a sentence")._render_traceback_() == ["a sentence"]
