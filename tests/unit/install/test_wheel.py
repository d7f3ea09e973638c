"""A wheel of the installed package: whole, the same each time, and one that pip takes."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import guava_nb
from guava_nb.errors import ConfigError
from guava_nb.install.wheel import build_wheel, pack

PACKAGE = Path(guava_nb.__file__).parent


def test_it_holds_every_file_of_the_package_and_no_leftovers() -> None:
    wheel = build_wheel()
    with zipfile.ZipFile(io.BytesIO(wheel.content)) as archive:
        names = set(archive.namelist())
        assert archive.read("guava_nb/install/wheel.py") == (PACKAGE / "install" / "wheel.py").read_bytes()
    there = {f"guava_nb/{p.relative_to(PACKAGE).as_posix()}" for p in PACKAGE.rglob("*") if p.is_file()}
    assert {name for name in there if "__pycache__" not in name} == {n for n in names if n.startswith("guava_nb/")}
    assert "guava_nb/assets/digits.npz" in names and "guava_nb/py.typed" in names
    assert wheel.name == f"guava_nb-{metadata.version('guava-nb')}-py3-none-any.whl"
    assert build_wheel() == wheel, "the same files give the same bytes"


def test_its_record_names_each_file_with_size_and_hash() -> None:
    wheel = pack("fruit", "1.0", {"fruit/__init__.py": b"", "fruit-1.0.dist-info/METADATA": b"Name: fruit\n"})
    with zipfile.ZipFile(io.BytesIO(wheel.content)) as archive:
        rows = archive.read("fruit-1.0.dist-info/RECORD").decode().splitlines()
        for row in rows[:-1]:
            path, digest, size = row.split(",")
            content = archive.read(path)
            told = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            assert (digest, int(size)) == (f"sha256={told}", len(content))
        assert rows[-1] == "fruit-1.0.dist-info/RECORD,," and len(rows) == len(archive.namelist())


def test_a_folder_that_was_never_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", nowhere)
    with pytest.raises(
        ConfigError, match="was never installed, so no wheel can be made of it: python -m pip install -e"
    ):
        build_wheel()
