"""A stand-in for the ngrok agent, run as a program of its own: log lines, local interface and relayed bytes as of the real one.

The folder in FAKE_NGROK holds `plan.json`, the switches; each agent that runs notes itself there as `agents/PID.json`.

    version        what `ngrok version` tells
    start          code with which the server refuses the session; the agent says so and ends
    create         code with which the server refuses an endpoint
    text           words of such a refusal, instead of usual ones
    silent         print nothing, ever
    slow_s         seconds until the session stands
    unreachable    no network: try again for ever
    killed         end by SIGKILL after the first lines
    web_taken      so many starts find the port of the local interface taken
    max_agents     agents that the account may run; one more gets 108
    ignores        names of signals that do nothing
    certificate    PEM file of certificate and key for HTTP endpoints

SIGUSR1 is a reconnection: open streams die and every endpoint gets another address. As the real one, it ends on SIGINT.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import ssl
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import yaml

USUAL = {
    105: "The authtoken you specified does not look like a proper ngrok tunnel authtoken.\\nYour authtoken: {token}",
    107: "The authtoken you specified is properly formed, but it is invalid.\\nYour authtoken: {token}",
    108: "Your account is limited to 1 simultaneous ngrok agent sessions.",
    8013: "You must add a credit or debit card before you can use TCP endpoints on a free account.",
}


def say(level: str, message: str, **more: str) -> None:
    words = "".join(f' {key}="{value}"' if " " in value else f" {key}={value}" for key, value in more.items())
    with contextlib.suppress(BrokenPipeError):  # whoever read it was killed
        print(f't={time.strftime("%Y-%m-%dT%H:%M:%S%z")} lvl={level} msg="{message}"{words}', flush=True)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class Endpoint:
    """One public address; bytes pass as they are, except for the operator's own TLS of HTTP."""

    def __init__(self, name: str, proto: str, upstream: str, certificate: str | None) -> None:
        self.name, self.proto, self.upstream = name, proto, upstream
        self.context: ssl.SSLContext | None = None
        if proto == "http" and certificate:
            self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.context.load_cert_chain(certificate)
        self.server: asyncio.Server | None = None
        self.streams: set[asyncio.StreamWriter] = set()
        self.port = self.count = 0

    async def open(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.context)
        self.port = self.server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self.server is not None
        self.server.close()
        for stream in list(self.streams):
            stream.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.streams.add(writer)
        self.count += 1
        host, port = self.upstream.removeprefix("http://").rsplit(":", 1)
        try:
            theirs_in, theirs_out = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        self.streams.add(theirs_out)
        await asyncio.gather(self._copy(reader, theirs_out), self._copy(theirs_in, writer))
        self.streams -= {writer, theirs_out}

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ssl.SSLError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        sink.close()

    def told(self) -> dict[str, Any]:
        scheme = {"tcp": "tcp", "http": "https"}[self.proto]
        return {
            "name": self.name,
            "ID": f"id-{self.name}",
            "uri": f"/api/tunnels/{self.name}",
            "public_url": f"{scheme}://127.0.0.1:{self.port}",
            "proto": scheme,
            "config": {"addr": self.upstream, "inspect": False},
            "metrics": {"conns": {"count": self.count}},
        }


class Agent:
    """The process: its session, its endpoints, its local interface."""

    def __init__(self, plan: dict[str, Any], folder: Path, config: dict[str, Any]) -> None:
        self.plan, self.folder, self.config = plan, folder, config
        self.endpoints: dict[str, Endpoint] = {}
        self.loop: asyncio.AbstractEventLoop | None = None
        self.in_session = False

    def refusal(self, code: int) -> str:
        text = self.plan.get("text") or USUAL.get(code, f"The server says no, reason {code}.")
        return text.replace("{token}", self.config.get("authtoken", "")) + f"\\r\\n\\r\\nERR_NGROK_{code}\\r\\n"

    def create(self, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if asked.get("proto") not in ("tcp", "http") or "addr" not in asked:
            return 400, {"error_code": 102, "status_code": 400, "msg": "invalid tunnel configuration", "details": {}}
        if not self.in_session:
            why = "a successful ngrok tunnel session has not yet been established"
            words = "ngrok is not yet ready to start tunnels"
            return 503, {"error_code": 104, "status_code": 503, "msg": words, "details": {"err": why}}
        code = self.plan.get("create") or (324 if len(self.endpoints) >= 3 else None)
        if code:
            error = self.refusal(code).replace("\\r", "\r").replace("\\n", "\n")
            say("warn", "failed to start tunnel", pg="/api/tunnels", err=self.refusal(code))
            return 502, {
                "error_code": 103,
                "status_code": 502,
                "msg": "failed to start tunnel",
                "details": {"err": error},
            }
        endpoint = Endpoint(asked["name"], asked["proto"], asked["addr"], self.plan.get("certificate"))
        self.ask_loop(endpoint.open())
        self.endpoints[endpoint.name] = endpoint
        say("info", "started tunnel", obj="tunnels", name=endpoint.name, url=endpoint.told()["public_url"])
        return 201, endpoint.told()

    def ask_loop(self, work: Any) -> None:
        assert self.loop is not None
        asyncio.run_coroutine_threadsafe(work, self.loop).result(10)

    async def reconnect(self) -> None:
        say("eror", "session closed, starting reconnect loop", obj="csess", err="session closed")
        for endpoint in self.endpoints.values():
            await endpoint.close()
            await endpoint.open()
        say("info", "client session established", obj="csess")

    async def run(self) -> None:
        self.loop = asyncio.get_running_loop()
        for name in ("SIGINT", "SIGTERM"):
            if name in self.plan.get("ignores", ()):
                signal.signal(getattr(signal, name), signal.SIG_IGN)
            else:
                self.loop.add_signal_handler(getattr(signal, name), self.leave)
        self.loop.add_signal_handler(signal.SIGUSR1, lambda: asyncio.ensure_future(self.reconnect()))
        say("info", "open config file", path="ngrok.yml", err="<nil>")
        server = self.listen()
        say("info", "starting web service", obj="web", addr=self.config["web_addr"], allow_hosts="[]")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        if self.plan.get("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        while self.plan.get("unreachable"):
            say("eror", "failed to reconnect session", obj="csess", err=UNREACHABLE)
            await asyncio.sleep(0.5)
        await asyncio.sleep(self.plan.get("slow_s", 0))
        if code := self.plan.get("start") or self.too_many():
            self.refuse(f"authentication failed: {self.refusal(code)}")
        self.in_session = True
        say("info", "client session established", obj="tunnels.session")
        say("info", "tunnel session started", obj="tunnels.session")
        await asyncio.Event().wait()

    def leave(self) -> None:
        say("info", "received stop request", obj="app")
        (self.folder / "agents" / f"{os.getpid()}.json").unlink(missing_ok=True)
        os._exit(0)

    def refuse(self, error: str) -> None:
        say("eror", "session closing", obj="tunnels.session", err=error)
        say("crit", "command failed", err=error)
        for line in error.replace("\\r", "").split("\\n"):
            print(f"ERROR:  {line}", file=sys.stderr, flush=True)
        os._exit(1)

    def too_many(self) -> int | None:
        running = [int(path.stem) for path in (self.folder / "agents").glob("*.json")]
        others = [pid for pid in running if pid != os.getpid() and runs(pid)]
        return 108 if len(others) >= self.plan.get("max_agents", 99) else None

    def listen(self) -> ThreadingHTTPServer:
        host, port = self.config["web_addr"].rsplit(":", 1)
        taken = self.folder / "taken"
        before = int(taken.read_text()) if taken.exists() else 0
        if before < self.plan.get("web_taken", 0):
            taken.write_text(str(before + 1))
            self.refuse(f"listen tcp {host}:{port}: bind: address already in use")
        try:
            return ThreadingHTTPServer((host, int(port)), interface(self))
        except OSError:
            self.refuse(f"listen tcp {host}:{port}: bind: address already in use")
            raise


UNREACHABLE = (
    "failed to dial ngrok server with address connect.ngrok-agent.com:443: "
    "dial tcp: lookup connect.ngrok-agent.com: no such host"
)


def interface(agent: Agent) -> type[BaseHTTPRequestHandler]:
    class Interface(BaseHTTPRequestHandler):
        def answer(self, status: int, body: dict[str, Any] | None = None) -> None:
            data = b"" if body is None else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path == "/api/tunnels":
                self.answer(200, {"tunnels": [e.told() for e in agent.endpoints.values()], "uri": "/api/tunnels"})
            else:
                self.answer(404)

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(*agent.create(asked))

        def do_DELETE(self) -> None:
            endpoint = agent.endpoints.pop(self.path.rsplit("/", 1)[1], None)
            if endpoint is not None:
                agent.ask_loop(endpoint.close())
            self.answer(204 if endpoint is not None else 404)

        def log_message(self, *_: object) -> None:
            """Its own lines are above."""

    return Interface


def main(words: list[str]) -> None:
    folder = Path(os.environ["FAKE_NGROK"])
    plan = json.loads((folder / "plan.json").read_text())
    if words[:1] == ["version"]:
        print(f"ngrok version {plan.get('version', '3.22.1')}")
        return
    assert words[:2] == ["start", "--none"], words
    config = yaml.safe_load(Path(words[words.index("--config") + 1]).read_text())
    (folder / "agents").mkdir(exist_ok=True)
    note = {"argv": sys.argv, "web": config["web_addr"], "group": os.getpgrp(), "authtoken": config["authtoken"]}
    partial = folder / f"{os.getpid()}.partial"
    partial.write_text(json.dumps(note))
    partial.rename(folder / "agents" / f"{os.getpid()}.json")
    if plan.get("silent"):
        while True:
            signal.pause()
    asyncio.run(Agent(plan, folder, config).run())


if __name__ == "__main__":
    main(sys.argv[1:])
