"""Checks of the loopback."""

from __future__ import annotations

import socket
import sys
import types
from typing import Any

import pytest

from guava_nb.doctor import network
from guava_nb.errors import LinkTimeout

# ------------------------------------------------------------------------------------------------------------- network


def test_port_that_may_not_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: Any) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(socket, "create_server", refuse)
    check = network.check_port()
    assert check.status == "fail"
    assert "cannot listen on 127.0.0.1: not here" in check.detail


def test_connection_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "connect_to_itself", lambda: None)
    assert network.check_connection().status == "ok"

    def time_out() -> None:
        raise LinkTimeout("nothing came from 127.0.0.1 for 10 s")

    monkeypatch.setattr(network, "connect_to_itself", time_out)
    check = network.check_connection()
    assert check.status == "fail"
    assert "nothing came from 127.0.0.1" in check.detail


def test_the_listener_is_closed_when_dialling_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Listener:
        def __init__(self, options: object, on_event: Any, host: str) -> None:
            on_event("opened")
            calls.append(host)

        def start(self) -> None:
            calls.append("start")

        def join_code(self) -> str:
            return "code"

        def close(self) -> None:
            calls.append("close")

    def dial(code: str, on_event: Any, options: object) -> None:
        raise LinkTimeout("no answer")

    for name, content in {
        "dialler": {"dial": dial},
        "listener": {"Listener": Listener},
        "options": {"LinkOptions": dict},
    }.items():
        module = types.ModuleType(f"guava_nb.link.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(LinkTimeout):
        network.connect_to_itself()
    assert calls == ["127.0.0.1", "start", "close"]
