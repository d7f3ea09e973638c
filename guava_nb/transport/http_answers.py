"""What it means that an HTTP server or gateway answered where a WebSocket was asked for: one sentence, and what to do.

Knows status codes, and how the operators of tunnels mark their own pages; does no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from guava_nb.errors import GuavaError, LinkBroken, RemoteProtocolError

__all__ = ["ngrok_page", "refusal"]

_NEWEST = "ask for the newest join code"
_RUNNING = "is guava_nb still running there? Its session may have to be opened again"
#: ngrok's numbers that may pass by themselves: a tunnel that is away, a limit of the minute.
_NGROK_PASSING = frozenset({702, 734, 810, 3200, 8012})
_CLOUDFLARE = {
    "1033": (f"its tunnel is closed: cloudflared does not run there any more; {_NEWEST}", True),
    "1016": (f"its tunnel is gone: Cloudflare does not know where it leads; {_NEWEST}", True),
    "1015": ("Cloudflare allows no more requests from here for a while; wait some minutes", True),
}
_STATUS = {
    400: ("the gateway there does not pass on WebSockets: use another tunnel", False),
    401: (
        "a login is asked for before anything passes: the operator of that address must let WebSockets through",
        False,
    ),
    403: ("a proxy or a rule of the operator forbids it: use another network or another tunnel", False),
    404: (f"a web server answers there that knows no guava_nb: the address is another's by now; {_NEWEST}", False),
    407: ("an HTTP proxy on the way asks for a login: use a network without it, or another tunnel", False),
    429: ("it takes no more requests for a while; wait some minutes", True),
    502: (f"the tunnel stands, but nothing listens behind it: {_RUNNING}", True),
    503: (f"the tunnel stands, but what is behind it is not ready: {_RUNNING}", True),
    504: (f"the tunnel stands, but what is behind it does not answer: {_RUNNING}", True),
    530: (f"its tunnel is closed; {_NEWEST}", True),
}


def ngrok_page(code: int) -> str:
    """Where ngrok itself says what a code of its own means."""
    return f"see https://ngrok.com/docs/errors/err_ngrok_{code} (ERR_NGROK_{code})"


def refusal(
    where: str, status: int, headers: Mapping[str, str], body: bytes, ngrok: Callable[[int], str] = ngrok_page
) -> GuavaError:
    """Make the error for an answer that is not 101.

    Args:
        where: host and port that were asked.
        status: 200 to 599.
        headers: of the answer.
        body: of the answer, as far as it was read.
        ngrok: what a code of ngrok means.

    Returns:
        LinkBroken where it may pass by itself, RemoteProtocolError where it will not.
    """
    lowered = {key.lower(): value for key, value in headers.items()}
    sentence, passing, mark = _ngroks(lowered, body, ngrok) or _meaning(status, body)
    kind = LinkBroken if passing else RemoteProtocolError
    return kind(f"{where} answered {mark}: {sentence}")


def _ngroks(headers: Mapping[str, str], body: bytes, says: Callable[[int], str]) -> tuple[str, bool, str] | None:
    """The same as `_meaning`, of an answer of ngrok's own."""
    marked = "ERR_NGROK_" in headers.get("ngrok-error-code", "")
    found = re.search(r"ERR_NGROK_(\d{1,5})", headers["ngrok-error-code"] if marked else body.decode("latin-1"))
    return (says(int(found[1])), int(found[1]) in _NGROK_PASSING, "for ngrok") if found else None


def _meaning(status: int, body: bytes) -> tuple[str, bool, str]:
    """What is so, whether it may pass, and what was answered."""
    cloudflare = re.search(rb"error code:?\s*(1\d{3})", body, re.IGNORECASE)
    if cloudflare and (number := cloudflare[1].decode()) in _CLOUDFLARE:
        return *_CLOUDFLARE[number], f"{status}, Cloudflare's error {number}"
    if status in _STATUS:
        return *_STATUS[status], str(status)
    if status < 300:
        return (
            "a web page answers, no WebSocket: a login page of this network, or another's address",
            False,
            str(status),
        )
    if status < 400:
        return (
            f"it sends on to another page: a login page of this network, or another's address; {_NEWEST}",
            False,
            str(status),
        )
    return "the gateway there passes nothing on", status >= 500, str(status)
