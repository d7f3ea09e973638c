"""A tunnel of ngrok, whose agent pyngrok runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from guava_nb.errors import ConfigError
from guava_nb.tunnels.tunnel import Address, Tunnel

__all__ = ["NgrokHttpTunnel", "NgrokTunnel"]

#: What ngrok's refusals mean, by the number in its message.
_NGROK_ADVICE = {
    "ERR_NGROK_105": "the authtoken is not one of ngrok's: copy it again from https://dashboard.ngrok.com/get-started/your-authtoken",
    "ERR_NGROK_107": "the authtoken was revoked or mistyped: copy it again from https://dashboard.ngrok.com/get-started/your-authtoken",
    "ERR_NGROK_108": "the account runs its one free agent elsewhere already: end that one at https://dashboard.ngrok.com/agents",
    "ERR_NGROK_302": "the account needs a verified e-mail address: https://dashboard.ngrok.com/user/settings",
    "ERR_NGROK_8013": "TCP tunnels need a payment card on file, also on the free plan: https://dashboard.ngrok.com/settings#id-verification",
}


class NgrokTunnel(Tunnel):
    """A TCP tunnel of ngrok, whose agent pyngrok runs (and fetches, the first time).

    Args:
        authtoken: of an ngrok account; None takes NGROK_AUTHTOKEN or what `ngrok config add-authtoken` stored.
    """

    name = "ngrok"

    def __init__(self, what: str = "", *, authtoken: str | None = None, ask: Callable[[], str] | None = None) -> None:
        self._authtoken, self._ask = authtoken, ask
        self._url = ""

    def __repr__(self) -> str:
        return f"NgrokTunnel({self._url or 'not started'})"

    def start(self, port: int) -> Address:
        """Open a tunnel to the loopback's port."""
        from pyngrok import conf, ngrok
        from pyngrok.exception import PyngrokError

        settings = conf.PyngrokConfig(auth_token=self._token(conf))
        try:
            self._url = str(ngrok.connect(f"127.0.0.1:{port}", "tcp", pyngrok_config=settings).public_url)
        except (PyngrokError, OSError) as problem:
            raise ConfigError(_advice(str(problem))) from problem
        parts = urlsplit(self._url)
        if not parts.hostname or not parts.port:
            raise ConfigError(f"ngrok gave {self._url!r}, which is no address of host and port")
        return Address(parts.hostname, parts.port)

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


class NgrokHttpTunnel(NgrokTunnel):
    """An HTTP endpoint of ngrok, through which WebSocket passes."""

    name = "ngrok-http"


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
