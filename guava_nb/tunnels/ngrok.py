"""Tunnels of ngrok: a TCP address, or an HTTP address that carries WebSocket."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from typing import Any, ClassVar
from urllib.parse import urlsplit

from guava_nb.errors import ConfigError
from guava_nb.tunnels.agent import Agent, start_agent
from guava_nb.tunnels.ngrok_errors import TOKEN_CODES, blaming, code_in
from guava_nb.tunnels.tokens import VARIABLE, Found, find_token
from guava_nb.tunnels.tunnel import Address, Tunnel

__all__ = ["NgrokHttpTunnel", "NgrokTunnel"]

_SCHEMES = {"tcp": ("tcp", None), "https": ("wss", 443), "http": ("ws", 80)}


class NgrokTunnel(Tunnel):
    """A TCP address of ngrok, whose agent pyngrok runs (and fetches, the first time).

    Needs an account with a payment card on file, also on the free plan. The address changes with every start.

    Args:
        what: nothing; stands for the text behind the colon.
        authtoken: of an ngrok account; None looks where `find_token` does.
        ask: gives an authtoken where none is found; None where no person can be asked.
    """

    name = "ngrok"
    _proto: ClassVar[str] = "tcp"
    _options: ClassVar[dict[str, Any]] = {}

    def __init__(self, what: str = "", *, authtoken: str | None = None, ask: Callable[[], str] | None = None) -> None:
        if what:
            raise ConfigError(
                f'the tunnel "{self.name}" takes nothing after a colon; an authtoken goes into {VARIABLE}'
            )
        self._given, self._ask = authtoken, ask
        self._found: Found | None = None
        self._agent: Agent | None = None
        self._port = 0
        self._process = os.getpid()
        self._starting = threading.Lock()
        self._given_up = threading.Event()

    def __repr__(self) -> str:
        agent = self._agent
        return f"{type(self).__name__}({agent.url if agent is not None and agent.url else 'not started'})"

    def start(self, port: int) -> Address:
        """Open a tunnel to the loopback's port, in a new agent; started already for this port, say where it is."""
        with self._starting:
            at = self.address() if port == self._port else None
            if at is not None:
                return at
            self._end()
            if self._found is None:  # kept: a host's secrets may not be read in other threads
                asked_here = threading.current_thread() is threading.main_thread()  # no other one has the user's ear
                self._found = find_token(self._given, self._ask if asked_here else None)
            try:
                self._agent = start_agent(self._found.token, self._proto, port, self._given_up, **self._options)
            except ConfigError as problem:
                if code_in(str(problem)) not in TOKEN_CODES:
                    raise
                source, self._found = self._found.source, None  # the next one may be better
                raise ConfigError(blaming(str(problem), source)) from None
            self._port = port
            atexit.register(self.stop)
            try:
                return _address(self._agent.url)
            except ConfigError:
                self._end()
                raise

    def stop(self) -> None:
        """End the agent that was started, and only that one; a start under way in another thread gives up."""
        self._given_up.set()
        with self._starting:
            self._given_up.clear()
            self._end()

    def alive(self) -> bool:
        """Whether the agent runs and has its endpoint."""
        return self.address() is not None

    def address(self) -> Address | None:
        """Where the endpoint is now: an agent that had to connect again may have got another address."""
        agent = self._agent
        url = agent.look() if agent is not None else ""
        return _address(url) if url else None

    def _end(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None and os.getpid() == self._process:  # a forked child leaves its parent's agent alone
            atexit.unregister(self.stop)
            agent.end()


class NgrokHttpTunnel(NgrokTunnel):
    """An HTTPS address of ngrok, through which WebSocket passes: needs an account, and no card.

    ngrok ends its own TLS at its edge; ours runs inside.
    """

    name = "ngrok-http"
    _proto = "http"
    # One address, encrypted up to ngrok; its page for looking into requests would keep copies of what passes.
    _options: ClassVar[dict[str, Any]] = {"schemes": ["https"], "inspect": False}


def _address(url: str) -> Address:
    parts = urlsplit(url)
    scheme, usual = _SCHEMES.get(parts.scheme, ("", None))
    port = parts.port or usual
    if not scheme or not parts.hostname or port is None:
        raise ConfigError(f"ngrok gave {url!r}, which is no address of host and port; start again")
    return Address(parts.hostname, port, scheme)
