"""What it means that an HTTP server or gateway answered where a WebSocket was asked for: one sentence, and what to do.

Knows status codes, and how the operators of tunnels mark their own pages; does no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from guava_nb.errors import GuavaError, LinkBroken, RemoteProtocolError

__all__ = ["Answer", "ngrok_page", "read_answer", "refusal"]

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


class Answer(NamedTuple):
    """What was read of an HTTP answer.

    Attributes:
        status: 100 to 999.
        head: its header lines, in lower case.
        body: as far as it came, in whatever encoding for the transfer.
    """

    status: int
    head: str
    body: str


def read_answer(heard: bytes) -> Answer | None:
    """Take apart what came of an HTTP answer, whole or not; None when it is none."""
    head, _, body = heard.decode("latin-1").partition("\r\n\r\n")
    first, _, lines = head.partition("\r\n")
    status = re.match(r"HTTP/1\.[01] (\d{3})\b", first)
    return Answer(int(status[1]), lines.lower(), body) if status else None


def refusal(where: str, answer: Answer, ngrok: Callable[[int], str] = ngrok_page) -> GuavaError:
    """Make the error for an answer that is not 101.

    Args:
        where: host and port that were asked.
        answer: what came.
        ngrok: what a code of ngrok means.

    Returns:
        LinkBroken where it may pass by itself, RemoteProtocolError where it will not.
    """
    sentence, passing, mark = _ngroks(answer, ngrok) or _meaning(answer)
    kind = LinkBroken if passing else RemoteProtocolError
    return kind(f"{where} answered {mark}: {sentence}")


def _ngroks(answer: Answer, says: Callable[[int], str]) -> tuple[str, bool, str] | None:
    """The same as `_meaning`, of an answer of ngrok's own: a header tells its code, or the page."""
    found = re.search(r"^ngrok-error-code: *err_ngrok_(\d{1,5})", answer.head, re.MULTILINE)
    found = found or re.search(r"ERR_NGROK_(\d{1,5})", answer.body)
    return (says(int(found[1])), int(found[1]) in _NGROK_PASSING, "for ngrok") if found else None


def _meaning(answer: Answer) -> tuple[str, bool, str]:
    """What is so, whether it may pass, and what was answered."""
    status = answer.status
    cloudflare = re.search(r"error code:?\s*(1\d{3})", answer.body, re.IGNORECASE)
    if cloudflare and cloudflare[1] in _CLOUDFLARE:
        return *_CLOUDFLARE[cloudflare[1]], f"{status}, Cloudflare's error {cloudflare[1]}"
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
