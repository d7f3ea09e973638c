"""A Hugging Face hub of one process: repositories with one commit, by the calls that huggingface_hub makes to fetch them."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """What was asked of it is in `asked`."""

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self._answer(send_body=False)

            def do_GET(self) -> None:
                self._answer(send_body=True)

            def _answer(self, send_body: bool) -> None:
                path = self.path.partition("?")[0].strip("/")
                hub.asked.append(f"{self.command} {path}")
                if path.startswith("api/models/"):
                    name, _, kind, revision = re.fullmatch(r"api/models/(.+?)(/(revision|tree)/(.+))?", path).groups()
                    files = repositories.get(name)
                    if files is None:
                        return self._refuse("RepoNotFound", send_body)
                    if revision not in (None, "main", COMMIT):
                        return self._refuse("RevisionNotFound", send_body)
                    if kind == "tree":
                        tree = [{"type": "file", "path": n, "size": len(b), "oid": "0"} for n, b in files.items()]
                        return self._send(json.dumps(tree).encode(), send_body, {"Content-Type": "application/json"})
                    found = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
                    return self._send(json.dumps(found).encode(), send_body, {"Content-Type": "application/json"})
                name, _, rest = path.partition("/resolve/")
                body = repositories.get(name, {}).get(rest.partition("/")[2])
                if body is None:
                    return self._refuse("EntryNotFound", send_body)
                marks = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(body).hexdigest()}"'}
                return self._send(body, send_body, marks)

            def _refuse(self, code: str, send_body: bool) -> None:
                self._send(b"{}", send_body, {"X-Error-Code": code}, 404)

            def _send(self, body: bytes, send_body: bool, marks: Mapping[str, str], status: int = 200) -> None:
                self.send_response(status)
                for name, value in {**marks, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if send_body:
                    self.wfile.write(body)

            def log_message(self, *words: object) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


@contextmanager
def hub_of(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    hub = Hub(repositories)
    try:
        yield hub
    finally:
        hub.close()
