"""On Colab nothing that it ships is changed: what pip's own resolver would install, over a published list of its packages."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest

from guava_nb.install.cell import WORKER_NEEDS
from guava_nb.install.wheel import DISTRIBUTION, build_wheel, pack
from tests.support.bare_venv import site_packages
from tests.support.processes import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this Python has no pip")

LIST = ROOT / "tests" / "support" / "colab_packages.txt"
#: Of our dependencies those that Colab has not.
NEW = {"msgspec", "pyflakes", "pyngrok"}


def colab_packages() -> dict[str, str]:
    lines = (line for line in LIST.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#"))
    return {name: version for name, _, version in (line.partition("==") for line in lines)}


@pytest.fixture(scope="module")
def colab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has Colab's packages, as far as pip can tell: their names and versions."""
    folder = tmp_path_factory.mktemp("colab")
    venv.EnvBuilder(with_pip=False).create(folder)
    site = site_packages(folder)
    for name, version in colab_packages().items():
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def resolved(colab: Path, wheels: Path, *asked: str) -> dict[str, str]:
    """What pip would install there, without an index: only what lies in `wheels` can be had."""
    frozen = wheels / "frozen.txt"
    frozen.write_text("".join(f"{name}=={version}\n" for name, version in colab_packages().items()))
    python = next(colab.glob("bin/python")) if os.name != "nt" else colab / "Scripts" / "python.exe"
    report = wheels / "report.json"
    words = ["--dry-run", "--report", str(report), "--no-index", "--find-links", str(wheels), "-c", str(frozen)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *words, *asked],
        env={**environment, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    installs = json.loads(report.read_text())["install"]
    return {one["metadata"]["name"].lower(): one["metadata"]["version"] for one in installs}


def stub(folder: Path, name: str) -> None:
    """An empty wheel that says of itself what the real one says: its version and what it needs."""
    version = metadata.version(name)
    needs = "".join(f"Requires-Dist: {line}\n" for line in metadata.requires(name) or ())
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}".encode()
    wheel = pack(name, version, {f"{name}-{version}.dist-info/METADATA": head})
    (folder / wheel.name).write_bytes(wheel.content)


def test_the_whole_package_changes_no_version_that_colab_ships(colab: Path, tmp_path: Path) -> None:
    for name in NEW:
        stub(tmp_path, name)
    ours = build_wheel()
    (tmp_path / ours.name).write_bytes(ours.content)
    assert set(resolved(colab, tmp_path, str(tmp_path / ours.name))) == {DISTRIBUTION, *NEW}


def test_a_worker_there_lacks_only_two_small_packages(colab: Path, tmp_path: Path) -> None:
    here = {name.replace("_", "-").lower() for name in colab_packages()}
    assert {name for name in WORKER_NEEDS if name not in here} == NEW & set(WORKER_NEEDS) == {"msgspec", "pyflakes"}
