"""Checks of tokens and programs of tunnels, on machines that are made up."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from guava_nb.doctor import tunnels

TOKEN = "2abcdefghijklmnopqrstuvwxyz_3ABCDEFGHIJKLMNOPQRSTU"


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No token, no program; gives a folder that is on PATH."""
    for name in ("NGROK_AUTHTOKEN", "NGROK_PATH", "PYNGROK_NGROK_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    return tmp_path


def program(folder: Path, name: str, says: str, to: str = "1") -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}' >&{to}\n")
    path.chmod(0o700)
    return path


def test_a_token_is_named_by_its_source_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyngrok.conf", None)  # another test's settings are no part of this
    assert "only `%guava_up --tunnel ngrok` needs one" in tunnels.check_ngrok_token().detail
    monkeypatch.setenv("NGROK_AUTHTOKEN", TOKEN)
    check = tunnels.check_ngrok_token()
    assert (check.status, check.detail) == (
        "ok",
        "there, from the environment variable NGROK_AUTHTOKEN; whether ngrok takes it shows at the start of a tunnel",
    )
    monkeypatch.setenv("NGROK_AUTHTOKEN", "your-token-here")
    check = tunnels.check_ngrok_token()
    assert check.status == "warning" and "placeholder" in check.detail and "your-token-here" not in repr(check)


@pytest.mark.parametrize(
    ("here", "status", "detail"),
    [
        ({"pyngrok": "9.1.0"}, "ok", "9.1.0"),
        ({"pyngrok": "9.1.0", "ngrok": "1.4"}, "ok", '9.1.0; the package "ngrok" 1.4 is another one, and not used'),
        ({"ngrok": "1.4"}, "warning", 'not installed (the package "ngrok" 1.4 is another one): no ngrok tunnels'),
        ({}, "warning", "not installed: no ngrok tunnels"),
    ],
)
def test_two_packages_with_nearly_one_name(
    here: dict[str, str], status: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in here:
            raise PackageNotFoundError(name)
        return here[name]

    monkeypatch.setattr("guava_nb.doctor.check.version", version)
    check = tunnels.check_pyngrok()
    assert (check.status, check.detail) == (status, detail)
    assert bool(check.fix) == (status == "warning")


def test_the_agent_of_ngrok(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = program(bare, "agent", "ngrok version 3.22.1")
    monkeypatch.setenv("NGROK_PATH", str(agent))
    assert tunnels.check_ngrok().detail == f"3.22.1 at {agent}"
    monkeypatch.setenv("NGROK_PATH", str(program(bare, "old", "ngrok version 2.3.40")))
    assert tunnels.check_ngrok().status == "warning" and "only 3 and newer" in tunnels.check_ngrok().detail
    monkeypatch.setenv("NGROK_PATH", str(bare / "gone"))
    assert "there is no such file" in tunnels.check_ngrok().detail


def test_programs_on_path(bare: Path) -> None:
    assert tunnels.check_cloudflared().status == tunnels.check_ssh().status == "-"
    assert "the first `%guava_up --tunnel cloudflared` fetches version" in tunnels.check_cloudflared().detail
    path = program(bare, "cloudflared", "cloudflared version 2026.11.0 (built 2026-11-05-1402 UTC)")
    assert tunnels.check_cloudflared().detail == f"2026.11.0 at {path}"
    path = program(bare, "ssh", "OpenSSH_9.2p1 Debian-2, OpenSSL 3.0.15", to="2")
    assert tunnels.check_ssh().detail == f"9.2p1 at {path}"
    path.write_text("#!/no/such/interpreter\n")
    assert tunnels.check_ssh().status == "warning" and "does not run" in tunnels.check_ssh().detail
