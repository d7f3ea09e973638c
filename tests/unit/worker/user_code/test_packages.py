"""What is loaded stays: the constraints, and what pip does with them, without an index."""

from __future__ import annotations

import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from guava_nb.errors import ConfigError
from guava_nb.worker.user_code import packages
from guava_nb.worker.user_code.packages import constraints, install


def test_what_is_loaded_and_what_all_is_built_on_is_frozen() -> None:
    owners = {"PIL": ["Pillow"], "yaml": ["PyYAML"], "a_b": ["A.b", "a-c"]}
    versions = {
        "pillow": "11.0",
        "PyYAML": "6.0",
        "A.b": "1",
        "a-c": "2",
        "torch": "2.6.0+cu124",
        "numpy": "2.0",
        "other": "3",
    }
    found = constraints(["PIL.Image", "a_b", "sys"], owners, versions)
    assert found == ["a-b==1", "a-c==2", "numpy==2.0", "pillow==11.0", "torch==2.6.0+cu124"]


def test_what_torch_needs_is_frozen_though_nothing_imports_it() -> None:
    versions = {"torch": "2.11.0", "nvidia_cublas": "13.1", "triton": "3.6", "other": "1"}
    found = constraints([], {}, versions, ["nvidia-cublas", "triton", "not-here"])
    assert found == ["nvidia-cublas==13.1", "torch==2.11.0", "triton==3.6"]
    assert "sympy" in packages._needs_of_torch()


def wheel(folder: Path, name: str, needs: str = "") -> str:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n" + (f"Requires-Dist: {needs}\n" if needs else "")
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "A = 1\n")
        archive.writestr(f"{info}/METADATA", head)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return str(path)


def test_a_package_that_needs_another_torch_is_refused_and_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    before = metadata.version("torch")
    with pytest.raises(ConfigError, match=r"(?s)pip refused.*torch"):
        install([wheel(tmp_path, "guava_wants_old_torch", "torch==1.0")])
    assert metadata.version("torch") == before
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("guava_wants_old_torch")


def test_what_was_installed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_TARGET", str(target))
    monkeypatch.syspath_prepend(str(target))
    assert install([wheel(tmp_path, "guava_fresh_fruit")]) == "installed guava_fresh_fruit 1.0"
    import guava_fresh_fruit  # type: ignore[import-not-found]

    assert guava_fresh_fruit.A == 1


def test_a_python_without_pip_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho No module named pip\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(packages.sys, "executable", str(fake))
    with pytest.raises(ConfigError, match="this Python has no pip"):
        install(["einops"])


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            ["Looking in indexes: a", "ERROR: Could not find a version that satisfies x (from versions: none)",
             "ERROR: No matching distribution found for x"],
            "No matching distribution found for x. No package of this name and version is to be had there: look at its spelling",
        ),
        (
            ["ERROR: Cannot install torch==1.0 because these package versions have conflicting dependencies.", "",
             "    The user requested (constraint) torch==2.13.0", "ERROR: ResolutionImpossible: for help visit a page"],
            "Cannot install torch==1.0 because these package versions have conflicting dependencies. What is loaded there keeps "
            "its version: ask for a version that goes with it, or for none",
        ),
        (["a line", "another"], "a line\nanother"),
    ],
)  # fmt: skip
def test_the_reason_is_one_sentence_with_what_to_do(told: list[str], said: str) -> None:
    assert packages._reason(told) == said
