"""Files that came: placed, changed, loaded anew; what leads out of the folder or would hide a package is refused."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from guava_nb.errors import ConfigError
from guava_nb.protocol.messages import UserFile
from guava_nb.worker.user_code.user_files import FileFolder


def file(path: str, text: str) -> UserFile:
    return UserFile(path, hashlib.sha256(text.encode()).hexdigest(), text)


@pytest.fixture
def folder() -> Iterator[FileFolder]:
    made = FileFolder()
    yield made
    made.close()
    for name in [name for name in sys.modules if name.startswith("guava_test_mine")]:
        del sys.modules[name]


def test_modules_are_placed_and_loaded_anew_when_one_of_them_changed(folder: FileFolder) -> None:
    base, top = file("guava_test_mine/base.py", "A = 1\n"), file("guava_test_mine/top.py", "from .base import A\n")
    init = file("guava_test_mine/__init__.py", "")
    assert folder.place([init, base, top]) == "3 new files"
    module = importlib.import_module("guava_test_mine.top")
    assert module.A == 1
    assert folder.place([init, base, top]) == "all files are here already"
    said = folder.place([file("guava_test_mine/base.py", "A = 2  # longer\n")])
    assert said.startswith("changed: guava_test_mine/base.py; loaded anew: ") and module.A == 2


@pytest.mark.parametrize("path", ["/etc/x.py", "../x.py", "a/../../x.py", "C:/x.py", "a\\x.py", "", "a\0.py"])
def test_a_path_that_leads_out_is_refused_and_nothing_is_written(folder: FileFolder, path: str) -> None:
    with pytest.raises(ConfigError, match="does not lie below"):
        folder.place([file("guava_test_mine.py", ""), file(path, "")])
    assert folder._folder is None


def test_a_false_hash_and_a_hidden_package_are_refused(folder: FileFolder) -> None:
    with pytest.raises(ConfigError, match="another hash"):
        folder.place([UserFile("guava_test_mine.py", "00", "A = 1")])
    for path in ("json.py", "numpy/__init__.py"):
        with pytest.raises(ConfigError, match="would hide the package"):
            folder.place([file(path, "")])


def test_the_folder_goes_with_its_end(folder: FileFolder) -> None:
    folder.place([file("guava_test_mine.py", "A = 1")])
    assert folder._folder is not None
    root = Path(folder._folder.name)
    assert str(root) in sys.path and root.is_dir()
    folder.close()
    assert str(root) not in sys.path and not root.exists()


def test_the_packages_here_are_looked_up_once_for_any_number_of_files(
    folder: FileFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def packages() -> dict[str, list[str]]:
        asked.append(1)
        return {}

    monkeypatch.setattr("guava_nb.worker.user_code.user_files.metadata.packages_distributions", packages)
    assert folder.place([file(f"guava_test_mine/f{k}.py", "") for k in range(50)]) == "50 new files" and len(asked) == 1
