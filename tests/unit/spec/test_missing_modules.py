"""A package is named only where this machine knows it; a file of the user's never is."""

from __future__ import annotations

import importlib
import json
import sys
from importlib import metadata
from pathlib import Path

import pytest

from guava_nb.spec.missing_modules import absent_part, missing_advice, missing_package


def install(folder: Path, distribution: str, module: str, url: str | None) -> None:
    """As pip does: a module and the record of its distribution."""
    (folder / f"{module}.py").write_text("VALUE = 1\n")
    record = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (record / "top_level.txt").write_text(f"{module}\n")
    (record / "RECORD").write_text(f"{module}.py,,\n")
    if url is not None:
        (record / "direct_url.json").write_text(json.dumps({"url": url, "dir_info": {"editable": True}}))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_an_installed_package_is_named_as_it_is_called_here(folder: Path) -> None:
    install(folder, "guava-fruit-salad", "guavafruit", None)
    assert missing_advice("guavafruit.seeds").startswith("run  %pip install guava-fruit-salad  there")


@pytest.mark.parametrize("url", ["file:///home/me/fruit", "file:///home/me/fruit.whl"])
def test_one_from_a_folder_of_the_user_s_is_in_no_index(folder: Path, url: str) -> None:
    install(folder, "guava-mine", "guavamine", url)
    said = missing_advice("guavamine")
    assert "pip" not in said and "no package index" in said and "%%guava_share" in said


def test_a_file_beside_the_notebook_is_to_be_shared(folder: Path) -> None:
    (folder / "mymodels_of_guava.py").write_text("VALUE = 1\n")
    (folder / "guava_parts").mkdir()
    (folder / "guava_parts" / "__init__.py").write_text("")
    for module, place in (("mymodels_of_guava", "mymodels_of_guava.py"), ("guava_parts.heads", "guava_parts")):
        said = missing_advice(module)
        assert f"%guava_files {folder / place} sends it" in said
        assert f"{folder / place} here" in said and "%%guava_share" in said and "%pip" not in said


def test_nothing_is_guessed_of_a_module_that_is_unknown_here() -> None:
    said = missing_advice("guava_nowhere")
    assert said.startswith("nothing here tells which package has 'guava_nowhere'") and "pip" not in said


def test_a_known_package_of_this_machine() -> None:
    assert "numpy" in metadata.packages_distributions()
    assert missing_advice("numpy.linalg").startswith("run  %pip install numpy  there")


@pytest.mark.parametrize(
    ("name", "missing", "said"),
    [
        ("guava_nowhere.part", "guava_nowhere", ""),
        (
            "guava_nb.notebok",
            "",
            "'guava_nb' is installed on this machine and has no module 'notebok' in it; did you mean 'guava_nb",
        ),
        (
            "guava_nb.spec.qqq.deeper",
            "",
            "'guava_nb.spec' is installed on this machine and has no module 'qqq' in it; another vers",
        ),
        (
            "json.part",
            "",
            "'json' is installed on this machine and has no module 'part' in it; another version of it may",
        ),
        ("abc.part", "", "'abc' is installed on this machine and has no module 'part' in it"),
        ("guava_parts_apart.one", "guava_parts_apart", ""),  # parts of such a folder may come in packages of their own
    ],
)
def test_a_part_that_a_package_does_not_have_is_no_missing_package(
    folder: Path, name: str, missing: str, said: str
) -> None:
    (folder / "guava_parts_apart").mkdir()
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module(name)
    sys.modules.pop("guava_parts_apart", None)
    importlib.invalidate_caches()
    assert missing_package(raised.value) == missing
    assert absent_part(raised.value).startswith(said) and bool(absent_part(raised.value)) == bool(said)


def test_other_errors_tell_of_no_module() -> None:
    for error in (None, ValueError("guava_nb.x"), ImportError("cannot import name", name="guava_nb")):
        assert (missing_package(error), absent_part(error)) == ("", "")
