"""`guava status --web`: one page that shows the session live, outside of any cell, from what the session writes to its file.

The address has a token that only this command knows; without it nothing of the session is answered. It listens on this machine
alone unless `--lan` asks for more. The page never has the join code: the file has none, and what is drawn is redacted. A stranger
may open connections and send nothing: so there are few at once, each has its time, and the longest one leaves for a newcomer.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from html import escape
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import parse_qs

from guava_nb.cluster.session_status import ShownStatus
from guava_nb.errors import ConfigError
from guava_nb.link.unauthenticated import Unauthenticated
from guava_nb.render import Charts, View, to_html

__all__ = ["StatusPage", "lan_address"]

#: Gives what the session wrote last, None once it is closed; and the view of it with a sentence on how old it is.
Read = Callable[[], ShownStatus | None]
Look = Callable[[ShownStatus], tuple[View, str]]

_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>guava_nb</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<style>body{font-family:system-ui,sans-serif;margin:12px;max-width:1200px}td,th{vertical-align:top}
#lost{display:none;color:#c0392b;font-weight:600}.gone #lost{display:block}.gone #panel{opacity:.5}</style></head>
<body><div id="lost"></div><div id="panel">PANEL</div><script nonce="NONCE">
let good = Date.now();
async function look() {
  try {
    const answer = await fetch('panel' + location.search, {cache: 'no-store', signal: AbortSignal.timeout(5000)});
    if (!answer.ok) throw new Error(answer.status);
    document.getElementById('panel').innerHTML = await answer.text();
    document.body.classList.remove('gone');
    good = Date.now();
  } catch (error) {
    document.getElementById('lost').textContent = 'as of ' + new Date(good).toLocaleTimeString('en-GB')
      + ': guava status --web does not answer. Is it still running?';
    document.body.classList.add('gone');
  }
  setTimeout(look, 1000);
}
setTimeout(look, 1000);
</script></body></html>"""
_HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}
_CLOSED = "The session was closed."
#: Connections at once, seconds in which a request must have come whole, and in which its answer must be taken.
_MOST_CONNECTIONS, _REQUEST_S = 16, 10.0
_MOST_REQUEST_BYTES = 64 << 10  # a browser sends 1 KiB or so
_SEAT_WAIT_S = 1.0


class StatusPage:
    """A small web server for one page; `close` ends it.

    Args:
        read: as `Read`.
        look: as `Look`.
        host: to listen on.
        port: 0 takes any free one.

    Attributes:
        port: where it listens.
        token: part of the address.

    Raises:
        ConfigError: it cannot be listened there.
    """

    def __init__(self, read: Read, look: Look, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen; nothing is answered before `serve`."""
        self._read, self._look = read, look
        self._last: ShownStatus | None = None
        self._charts, self._run_id = Charts(), ""
        self.token = secrets.token_urlsafe(16)
        try:
            self._server = _Server((host, port), self)
        except OSError as problem:
            raise ConfigError(
                f"the page cannot be served on {host}:{port} ({problem.strerror or problem}): choose another --port"
            ) from None
        self.port = int(self._server.server_address[1])

    def address(self, host: str) -> str:
        """Return the address of the page, as a browser takes it."""
        return f"http://{host}:{self.port}/?token={self.token}"

    def serve(self) -> None:
        """Answer until `close`."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()

    def panel(self) -> str:
        """Return the present state as HTML."""
        shown = self._read()
        if shown is None and self._last is None:
            return escape(_CLOSED)
        closed, shown = shown is None, shown or self._last
        assert shown is not None
        self._last = shown
        view, note = self._look(shown)
        run_id = shown.status.run.run_id if shown.status.run is not None else ""
        if run_id != self._run_id:  # scales are kept through one run
            self._charts, self._run_id = Charts(), run_id
        at = time.strftime("%H:%M:%S", time.localtime(shown.at))
        return to_html(view, (), f"as of {at}. {_CLOSED if closed else note}".rstrip(), self._charts)


class _Guest:
    """A connection that may be asked to leave."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def shutdown(self) -> None:
        with contextlib.suppress(OSError):  # it has left
            self._connection.shutdown(socket.SHUT_RDWR)


class _Server(HTTPServer):
    request_queue_size = 64

    def __init__(self, at: tuple[str, int], page: StatusPage) -> None:
        super().__init__(at, _Handler)
        self.page = page
        self._guests = Unauthenticated(_MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread of its own; the one that has been here longest leaves where there are too many."""
        seat = self._guests.sit(_SEAT_WAIT_S)
        if seat is None:
            self.shutdown_request(request)
            return
        self._guests.name(seat, _Guest(request))
        threading.Thread(target=self._answer, args=(request, client_address, seat), daemon=True).start()

    def _answer(self, request: Any, client_address: Any, seat: int) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception:
            self.handle_error(request, client_address)
        finally:
            self.shutdown_request(request)
            self._guests.leave(seat)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tell of a fault of ours; a connection that broke or was too slow is not one."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Until(io.RawIOBase):
    """What a connection receives until a time on the monotonic clock, however slowly its bytes come, and no more than a request.

    Raises:
        TimeoutError: of `readinto`: the time is over.
        ConnectionError: likewise: it sent too much.
    """

    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection, self._until, self._left_bytes = connection, until, _MOST_REQUEST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, view: Any) -> int:
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request did not come whole in time")
        if self._left_bytes <= 0:
            raise ConnectionError("the request is too long")
        self._connection.settimeout(left_s)
        count = self._connection.recv_into(view)
        self._left_bytes -= count
        return count


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_S  # of an answer
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Until(self.connection, time.monotonic() + _REQUEST_S))

    def do_GET(self) -> None:
        page, (path, _, query) = self.server.page, self.path.partition("?")  # urlsplit raises for what is no address
        given = parse_qs(query).get("token", [""])[0]
        if not hmac.compare_digest(given.encode(), page.token.encode()):
            self._answer(403, "the address needs its token: open the one that guava status --web wrote\n", "text/plain")
        elif path == "/panel":
            self._answer(200, page.panel(), "text/html")
        elif path == "/":
            nonce = secrets.token_urlsafe(8)
            html = _PAGE.replace("NONCE", nonce).replace("PANEL", page.panel())
            self._answer(200, html, "text/html", nonce)
        else:
            self._answer(404, "guava status --web serves one page: open the address that it wrote\n", "text/plain")

    def _answer(self, status: int, text: str, kind: str, nonce: str = "") -> None:
        body = text.encode()
        self.connection.settimeout(_REQUEST_S)
        self.send_response_only(status)  # without a header that names the version of Python
        script = f" script-src 'nonce-{nonce}';" if nonce else ""
        policy = f"default-src 'none'; style-src 'unsafe-inline';{script} connect-src 'self'; frame-ancestors 'none'"
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body)), **_HEADERS}
        for name, value in {**headers, "Content-Security-Policy": policy}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is no GET with an empty refusal: the standard library's page says what serves it."""
        self.request_version = self.protocol_version  # it may not have been understood
        self._answer(403, "", "text/plain")
        self.close_connection = True

    def log_message(self, *words: object) -> None:
        """Say nothing: the lines would have the token."""


def lan_address() -> str:
    """Return this machine's address in its network, without sending anything; "127.0.0.1" where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # of a range that is kept for documentation; UDP sends nothing here
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
