"""From a text to a launcher: ours, other packages', and what is said where there is none."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import tomllib

from guava_nb.errors import ConfigError
from guava_nb.launchers import launcher_names, make_launcher, registry
from guava_nb.launchers.launcher import Launcher
from guava_nb.launchers.registry import launcher_class
from tests.unit.launchers.test_launches import Fake

ROOT = Path(__file__).resolve().parents[3]


def test_every_one_of_ours_is_made_from_its_own_example() -> None:
    for name in ("ssh", "slurm", "k8s", "ray", "docker"):
        kind = launcher_class(name)
        made = make_launcher(kind.example)
        assert made.name == name and made.mark != make_launcher(kind.example).mark
        assert made.count >= 1 and issubclass(kind, Launcher)


def test_the_package_names_the_same_as_entry_points() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][registry.GROUP]
    assert table == {name: f"guava_nb.launchers.{module}:{kind}" for name, (module, kind) in registry._OURS.items()}


def named(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> None:
    found = [EntryPoint(name, value, registry.GROUP) for name, value in entries]
    monkeypatch.setattr(registry, "entry_points", lambda group: found)


def test_another_package_adds_one_and_takes_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = f"{Fake.__module__}:Fake"
    named(monkeypatch, ("lsf", mine), ("ssh", mine))
    assert launcher_names() == ["ssh", "slurm", "k8s", "docker", "ray", "lsf"]
    assert type(make_launcher("lsf:4")).__name__ == "Fake" and make_launcher("lsf:4").what == "4"
    assert launcher_class("ssh").__module__ == "guava_nb.launchers.ssh"


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ("nowhere.at.all:X", "cannot be used: ModuleNotFoundError"),
        ("json:dumps", "no subclass of guava_nb.launchers.Launcher"),
    ],
)
def test_a_broken_one_is_told_with_its_package(monkeypatch: pytest.MonkeyPatch, entry: str, sentence: str) -> None:
    named(monkeypatch, ("lsf", entry))
    with pytest.raises(ConfigError, match=sentence):
        make_launcher("lsf:4")


def test_a_wrong_name_proposes_a_near_one() -> None:
    with pytest.raises(ConfigError, match='by the name "slum". Did you mean "slurm"'):
        make_launcher("slum:8")
    with pytest.raises(ConfigError, match="There are: ssh, slurm, k8s, docker, ray"):
        make_launcher("")
