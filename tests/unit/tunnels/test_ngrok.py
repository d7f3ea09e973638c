"""What a refusal of ngrok means, and what to do; no network is used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from guava_nb.errors import ConfigError
from guava_nb.tunnels import DirectTunnel, LocalTunnel, NgrokTunnel

pyngrok = pytest.importorskip("pyngrok")


def refusing(number: str) -> Any:
    from pyngrok.exception import PyngrokNgrokError

    def connect(*_: Any, **__: Any) -> None:
        raise PyngrokNgrokError(
            f"The ngrok process errored on start:\n authentication failed: words.\r\n\r\n{number}\r\n."
        )

    return connect


@pytest.mark.parametrize(
    ("number", "words"),
    [
        ("ERR_NGROK_8013", "payment card"),
        ("ERR_NGROK_107", "copy it again"),
        ("ERR_NGROK_108", "elsewhere"),
        ("ERR_NGROK_9999", "authentication failed"),
    ],
)
def test_a_refusal_is_one_sentence(monkeypatch: pytest.MonkeyPatch, number: str, words: str) -> None:
    monkeypatch.setattr("pyngrok.ngrok.connect", refusing(number))
    with pytest.raises(ConfigError, match=words) as told:
        NgrokTunnel(authtoken="token-of-mine").start(4242)
    assert "\n" not in str(told.value) and "token-of-mine" not in str(told.value)


def test_the_address_comes_out_of_the_url_and_the_tunnel_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def connect(address: str, proto: str, pyngrok_config: Any) -> Any:
        asked.append((address, proto, pyngrok_config.auth_token))
        return SimpleNamespace(public_url="tcp://0.tcp.eu.ngrok.io:12345")

    monkeypatch.setattr("pyngrok.ngrok.connect", connect)
    monkeypatch.setattr("pyngrok.ngrok.disconnect", asked.append)
    monkeypatch.setenv("NGROK_AUTHTOKEN", "from-the-environment")
    tunnel = NgrokTunnel()
    assert tunnel.start(4242) == ("0.tcp.eu.ngrok.io", 12345, "tcp")
    tunnel.stop()
    tunnel.stop()
    assert asked == [("127.0.0.1:4242", "tcp", "from-the-environment"), "tcp://0.tcp.eu.ngrok.io:12345"]
    assert "environment" not in repr(tunnel)


def test_no_tunnel() -> None:
    assert LocalTunnel().start(5) == ("127.0.0.1", 5, "tcp")
    assert DirectTunnel("lab.example", 80).start(5) == ("lab.example", 80, "tcp")
    assert DirectTunnel().start(5)[1] == 5
