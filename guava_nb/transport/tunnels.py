"""Ways to make a listening port reachable from outside: each gives the address that a join code then carries.

What passes is TLS between the two ends, so whoever runs a tunnel sees no more than who talks and how much.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any, Protocol
from urllib.parse import urlsplit

from guava_nb.errors import ConfigError

__all__ = ["Address", "DirectTunnel", "LocalTunnel", "NgrokTunnel", "Tunnel"]

Address = tuple[str, int]

#: What ngrok's refusals mean, by the number in its message.
_NGROK_ADVICE = {
    "ERR_NGROK_105": "the authtoken is not one of ngrok's: copy it again from https://dashboard.ngrok.com/get-started/your-authtoken",
    "ERR_NGROK_107": "the authtoken was revoked or mistyped: copy it again from https://dashboard.ngrok.com/get-started/your-authtoken",
    "ERR_NGROK_108": "the account runs its one free agent elsewhere already: end that one at https://dashboard.ngrok.com/agents",
    "ERR_NGROK_302": "the account needs a verified e-mail address: https://dashboard.ngrok.com/user/settings",
    "ERR_NGROK_8013": "TCP tunnels need a payment card on file, also on the free plan: https://dashboard.ngrok.com/settings#id-verification",
}


class Tunnel(Protocol):
    """Something that forwards connections from an address others can reach to a port of this machine."""

    def start(self, port: int) -> Address:
        """Forward to a port of the loopback; returns host and port for others.

        Raises:
            ConfigError: it cannot; the message says what to do.
        """
        ...

    def stop(self) -> None:
        """Forward no more. Safe to call twice."""
        ...


class LocalTunnel:
    """No tunnel: both sides run on this machine."""

    def start(self, port: int) -> Address:
        """Return the loopback's address."""
        return "127.0.0.1", port

    def stop(self) -> None:
        """Nothing runs."""


class DirectTunnel:
    """No tunnel: others reach this machine by itself, as in one network or behind a forwarded port.

    Args:
        host: name or address by which they do; None takes this machine's name.
        port: where they knock, when a router forwards another number; None is the port that is listened on.
    """

    def __init__(self, host: str | None = None, port: int | None = None) -> None:
        self._host, self._port = host or socket.gethostname(), port

    def start(self, port: int) -> Address:
        """Return that address; the listener must be bound beyond the loopback (`host="0.0.0.0"`)."""
        return self._host, self._port or port

    def stop(self) -> None:
        """Nothing runs."""


class NgrokTunnel:
    """A TCP tunnel of ngrok, whose agent pyngrok runs (and fetches, the first time).

    Args:
        authtoken: of an ngrok account; None takes NGROK_AUTHTOKEN or what `ngrok config add-authtoken` stored.
        region: where the tunnel ends; None lets ngrok choose.
    """

    def __init__(self, authtoken: str | None = None, region: str | None = None) -> None:
        self._authtoken, self._region = authtoken, region
        self._url = ""

    def __repr__(self) -> str:
        return f"NgrokTunnel({self._url or 'not started'})"

    def start(self, port: int) -> Address:
        """Open a tunnel to the loopback's port."""
        from pyngrok import conf, ngrok
        from pyngrok.exception import PyngrokError

        settings = conf.PyngrokConfig(auth_token=self._token(conf), region=self._region)
        try:
            self._url = str(ngrok.connect(f"127.0.0.1:{port}", "tcp", pyngrok_config=settings).public_url)
        except (PyngrokError, OSError) as problem:
            raise ConfigError(_advice(str(problem))) from problem
        parts = urlsplit(self._url)
        if not parts.hostname or not parts.port:
            raise ConfigError(f"ngrok gave {self._url!r}, which is no address of host and port")
        return parts.hostname, parts.port

    def _token(self, conf: Any) -> str:
        token = self._authtoken or os.environ.get("NGROK_AUTHTOKEN", "") or conf.get_default().auth_token or ""
        if not token and not _stored_token(conf):
            raise ConfigError(
                "ngrok needs an authtoken: get one at https://dashboard.ngrok.com/get-started/your-authtoken and set "
                'NGROK_AUTHTOKEN (in Colab: os.environ["NGROK_AUTHTOKEN"] = userdata.get("NGROK_AUTHTOKEN")), or give another '
                "tunnel=, or let the other side listen"
            )
        return str(token)

    def stop(self) -> None:
        """Close the tunnel; the agent stays for others that pyngrok runs."""
        url, self._url = self._url, ""
        if url:
            from pyngrok import ngrok
            from pyngrok.exception import PyngrokError

            with contextlib.suppress(PyngrokError, OSError):  # it is gone already
                ngrok.disconnect(url)


def _stored_token(conf: Any) -> bool:
    path = conf.get_default().config_path or conf.DEFAULT_NGROK_CONFIG_PATH
    try:
        with open(path, encoding="utf-8") as file:
            return "authtoken" in file.read()
    except OSError:
        return False


def _advice(problem: str) -> str:
    line = " ".join(problem.split())[:300]
    for number, sentence in _NGROK_ADVICE.items():
        if number in problem and not problem.split(number, 1)[1][:1].isdigit():
            return f"ngrok opened no tunnel: {sentence} ({number})"
    return f"ngrok opened no tunnel: {line}"
