"""Which ngrok agent is taken, and what is said when there is none or none that works."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from urllib.error import URLError

import pytest

from guava_nb.errors import ConfigError
from guava_nb.tunnels import agent_program
from guava_nb.tunnels.agent_program import agent_version, find_agent, load_pyngrok, required_agent


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No agent anywhere; returns where pyngrok would put one."""
    conf = pytest.importorskip("pyngrok.conf")
    for variable in ("NGROK_PATH", "PYNGROK_NGROK_PATH"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(conf, "DEFAULT_NGROK_PATH", str(tmp_path / "own" / "ngrok"))
    return tmp_path / "own" / "ngrok"


def program(path: Path, says: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{says}\n")
    path.chmod(0o755)
    return str(path)


def test_the_named_one_comes_first_then_the_path_then_the_fetched_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bare: Path
) -> None:
    assert find_agent() is None
    fetched = program(bare, "echo ngrok version 3.1.0")
    assert find_agent() == fetched
    installed = program(tmp_path / "bin" / "ngrok", "echo ngrok version 3.2.0")
    assert find_agent() == installed
    named = program(tmp_path / "mine", "echo ngrok version 3.30.1-msix")
    monkeypatch.setenv("NGROK_PATH", named)
    assert required_agent() == named
    assert agent_version(named) == "3.30.1"
    monkeypatch.setenv("NGROK_PATH", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="NGROK_PATH is .*gone, and there is no such file"):
        find_agent()


def test_pyngrok_s_own_command_is_no_agent(tmp_path: Path) -> None:
    (tmp_path / "bin" / "ngrok").write_text(f"#!{sys.executable}\nfrom pyngrok.ngrok import main\nmain()\n")
    (tmp_path / "bin" / "ngrok").chmod(0o755)
    assert find_agent() is None


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ("echo ngrok version 2.3.41", "has version 2.3.41, and only 3 and newer work"),
        ("echo hello", "is no ngrok agent"),
        ("exec sleep 60", "did not tell its version"),
    ],
)
def test_an_agent_that_does_not_do_is_told_with_its_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: str, words: str
) -> None:
    monkeypatch.setattr(agent_program, "VERSION_S", 5.0 if "echo" in says else 0.2)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "bin"), "/usr/bin", "/bin"]))
    path = program(tmp_path / "bin" / "ngrok", says)
    with pytest.raises(ConfigError, match=words) as told:
        required_agent()
    assert path in str(told.value)


def test_an_agent_for_another_machine_is_told(tmp_path: Path) -> None:
    path = tmp_path / "bin" / "ngrok"
    path.write_bytes(b"\x7fELF" + bytes(1 << 20))
    path.chmod(0o755)
    with pytest.raises(ConfigError, match="cannot be run"):
        required_agent()


def test_without_a_network_none_is_fetched(monkeypatch: pytest.MonkeyPatch, bare: Path) -> None:
    from urllib.error import URLError

    def unreachable(*_: object, **__: object) -> None:
        raise URLError("[Errno -3] Temporary failure in name resolution")

    monkeypatch.setattr("pyngrok.installer.urlopen", unreachable)
    with pytest.raises(ConfigError, match="could not be fetched .*name resolution.*: is there a network") as told:
        required_agent()
    assert "NGROK_PATH" in str(told.value) and "\n" not in str(told.value)
    assert not bare.exists()


def test_the_other_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pyngrok", None)
    with pytest.raises(ConfigError, match=r"pyngrok cannot be imported: run %pip install pyngrok"):
        load_pyngrok()
    (tmp_path / "ngrok.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r'"ngrok", which is installed, is another one'):
        load_pyngrok()


def test_without_a_network_one_sentence_is_said_and_nothing_else(
    bare: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    installer = pytest.importorskip("pyngrok.installer")

    def no_network(*_: object, **__: object) -> None:
        raise URLError(OSError(-3, "Temporary failure in name resolution"))

    monkeypatch.setattr(installer, "urlopen", no_network)
    with pytest.raises(ConfigError) as refused:
        required_agent()
    assert "Temporary failure in name resolution): is there a network?" in str(refused.value)
    assert "urlopen" not in str(refused.value) and "Errno" not in str(refused.value)
    said = capfd.readouterr()
    assert said.out == said.err == "" and not bare.exists()
