"""`guava status --web`: one page that shows the session live, outside of any cell, from what the session writes to its file.

The address has a token that only this command knows; without it nothing is answered. It listens on this machine alone unless
`--lan` asks for more. The page never has the join code: the file has none, and what is drawn is redacted.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Callable
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from guava_nb.cluster.session_status import ShownStatus
from guava_nb.errors import ConfigError
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


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, at: tuple[str, int], page: StatusPage) -> None:
        super().__init__(at, _Handler)
        self.page = page


class _Handler(BaseHTTPRequestHandler):
    timeout = 10  # seconds for which a request may come in
    server: _Server

    def do_GET(self) -> None:
        page, url = self.server.page, urlsplit(self.path)
        given = parse_qs(url.query).get("token", [""])[0]
        if not hmac.compare_digest(given.encode(), page.token.encode()):
            self._answer(403, "the address needs its token: open the one that guava status --web wrote\n", "text/plain")
        elif url.path == "/panel":
            self._answer(200, page.panel(), "text/html")
        elif url.path == "/":
            nonce = secrets.token_urlsafe(8)
            html = _PAGE.replace("NONCE", nonce).replace("PANEL", page.panel())
            self._answer(200, html, "text/html", nonce)
        else:
            self._answer(404, "there is one page here\n", "text/plain")

    def _answer(self, status: int, text: str, kind: str, nonce: str = "") -> None:
        body = text.encode()
        self.send_response(status)
        script = f" script-src 'nonce-{nonce}';" if nonce else ""
        policy = f"default-src 'none'; style-src 'unsafe-inline';{script} connect-src 'self'; frame-ancestors 'none'"
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body)), **_HEADERS}
        for name, value in {**headers, "Content-Security-Policy": policy}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

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
