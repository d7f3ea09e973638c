"""`NAME[:WHAT]` becomes a tunnel: ours, or another package's; what is wrong with the text is one sentence."""

from __future__ import annotations

import socket
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.errors import ConfigError
from guava_nb.tunnels import DirectTunnel, LocalTunnel, NgrokHttpTunnel, NgrokTunnel, make_tunnel, tunnel_names
from guava_nb.tunnels.registry import split_host

NAMES = ["local", "direct", "ngrok", "ngrok-http", "cloudflared", "ssh"]

PLUGIN = """
from guava_nb.tunnels import LocalTunnel
from guava_nb.errors import ConfigError

class Carrier(LocalTunnel):
    name = "pigeon"

    def __init__(self, what):
        super().__init__()
        if what == "unwell":
            raise ConfigError("the pigeon is unwell; feed it")
        self.what = what

nothing = str
"""


def test_ours_by_name() -> None:
    assert tunnel_names()[: len(NAMES)] == NAMES
    assert isinstance(make_tunnel("local"), LocalTunnel)
    assert type(make_tunnel(" ngrok ")) is NgrokTunnel
    assert type(make_tunnel("ngrok-http")) is NgrokHttpTunnel
    assert make_tunnel("direct:lab.example").start(5) == ("lab.example", 5, "tcp")
    assert make_tunnel("direct:[2001:db8::7]:80").start(5) == ("2001:db8::7", 80, "tcp")
    assert isinstance(make_tunnel("direct"), DirectTunnel)


def test_a_name_that_is_not_known_here_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    tunnel = make_tunnel("direct:nosuch.invalid")

    def unknown(*_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    assert tunnel.note() == "" and tunnel.start(5) == ("nosuch.invalid", 5, "tcp")
    assert "the name nosuch.invalid is not known on this machine" in tunnel.note()
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: [])
    tunnel.start(5)
    assert tunnel.note() == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ngork", 'Did you mean "ngrok"\\? There are: local, direct, '),
        ("NGROK", 'Did you mean "ngrok"'),
        ("", "There are: local"),
        ("local:5", "nothing after the colon"),
        ("direct:fe80::1", r"write it in brackets, as in \[fe80::1\]"),
        ("direct:host:http", "'http' in 'host:http' is no port"),
        ("direct:host:", "is no port"),
        ("direct::80", "not of the form direct:HOST"),
        ("direct:[::1", "not of the form"),
        ("direct:[::1]80", "not of the form"),
        ("direct:host:65536", "from 1 to 65535"),
        ("direct:http://host", "write it without http://, as direct:HOST"),
    ],
)
def test_what_is_wrong_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as told:
        make_tunnel(text)
    assert "\n" not in str(told.value)


@given(st.from_regex(r"[a-z0-9.-]{1,20}", fullmatch=True), st.none() | st.integers(1, 65535), st.booleans())
def test_host_and_port_come_back(host: str, port: int | None, six: bool) -> None:
    host = f"2001:db8::{len(host)}" if six else host
    written = (f"[{host}]" if six else host) + ("" if port is None else f":{port}")
    assert split_host(written) == (host, port)


@given(st.text(max_size=30))
def test_any_text_gives_a_tunnel_or_a_sentence(text: str) -> None:
    try:
        host, port = split_host(text)
    except ConfigError as told:
        assert "\n" not in repr(str(told))
    else:
        assert host and (port is None or 1 <= port <= 65535)


def test_naming_a_tunnel_loads_nothing_of_another_one() -> None:
    code = (
        "import sys; from guava_nb.tunnels import make_tunnel; make_tunnel('direct:lab.example'); make_tunnel('ngrok'); "
        "print([name for name in ('pyngrok', 'torch', 'IPython') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A package that is installed, as far as importlib can tell, with good and bad entry points."""
    (tmp_path / "pigeonry.py").write_text(PLUGIN)
    info = tmp_path / "pigeon_post-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pigeon-post\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[guava_nb.tunnels]\npigeon = pigeonry:Carrier\nlost = pigeonry:Gone\nabsent = not_there_at_all:X\n"
        "other = pigeonry:nothing\nngrok = pigeonry:Carrier\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return ["absent", "lost", "other", "pigeon"]


def test_another_package_brings_a_tunnel(plugins: list[str]) -> None:
    assert tunnel_names() == NAMES + plugins
    pigeon: Any = make_tunnel("pigeon:white: one")
    assert pigeon.what == "white: one"
    assert pigeon.start(5) == ("127.0.0.1", 5, "tcp")
    with pytest.raises(ConfigError, match="^the pigeon is unwell; feed it$"):
        make_tunnel("pigeon:unwell")
    assert type(make_tunnel("ngrok")) is NgrokTunnel, "ours cannot be taken over"


@pytest.mark.parametrize(("name", "words"), [("lost", "Gone"), ("absent", "not_there_at_all"), ("other", "is a str")])
def test_a_broken_package_is_named(plugins: list[str], name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf'"{name}" of the package pigeon-post .*{words}.*uninstall pigeon-post'):
        make_tunnel(name)


def test_an_entry_point_without_a_package_is_named_by_its_module() -> None:
    from guava_nb.tunnels.registry import _load

    with pytest.raises(ConfigError, match="of the package not_there_at_all"):
        _load(EntryPoint("lost", "not_there_at_all:X", "guava_nb.tunnels"), "")


def test_an_ipv6_address_is_listened_for_on_both_families() -> None:
    assert make_tunnel("direct:[2001:db8::7]:7000").bind == "" and make_tunnel("direct:[::1]").bind == ""
    assert make_tunnel("direct:192.0.2.7").bind == "0.0.0.0" and make_tunnel("direct").bind == "0.0.0.0"
