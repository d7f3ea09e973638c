"""A stand-in for cloudflared, run as a program of its own: log lines and relayed connections as of the real one.

FAKE_CLOUDFLARED names a file with switches as JSON; each start notes its process id and arguments in PID.json beside it.

    certificate   PEM file of certificate and key for its public side
    fail          how the start fails: "rate", "network", "fault", "proxy", "flags", "edge", "mute", "dies", "silent"
    slow_s        from the name to the first connection to the edge

SIGUSR1: the edge forgets the tunnel. SIGUSR2: a broken connection to the edge is mended. As the real one, it ends on SIGINT.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import ssl
import sys
import time
from pathlib import Path
from typing import Any

BAD_GATEWAY = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 15\r\nConnection: close\r\n\r\n502 Bad Gateway"
FAILURES = {
    "rate": (
        "ERR Error unmarshaling QuickTunnel response: error code: 1015 error=\"invalid character 'e' looking for "
        'beginning of value" status_code="429 Too Many Requests"',
        "failed to unmarshal quick Tunnel: invalid character 'e' looking for beginning of value",
    ),
    "network": (
        'failed to request quick Tunnel: Post "https://api.trycloudflare.com/tunnel": dial tcp: lookup '
        "api.trycloudflare.com on 127.0.0.11:53: no such host",
    ),
    "fault": (
        'ERR Error unmarshaling QuickTunnel response: error code: 1101 error="invalid character" status_code="500"',
        "failed to unmarshal quick Tunnel: invalid character 'e' looking for beginning of value",
    ),
    "proxy": (
        'failed to request quick Tunnel: Post "https://api.trycloudflare.com/tunnel": tls: failed to verify '
        "certificate: x509: certificate signed by unknown authority",
    ),
    "flags": ("Incorrect Usage: flag provided but not defined: -metrics",),
}


def say(text: str) -> None:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ ", time.gmtime()) if text[3:4] == " " else ""
    print(stamp + text, file=sys.stderr, flush=True)


class Relay:
    """The public side: the operator's TLS ends here, what is inside goes to the program behind."""

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            behind = await asyncio.open_connection("127.0.0.1", self.upstream)
        except OSError:
            say('ERR  error="Unable to reach the origin service. The service may be down: connection refused"')
            await reader.readuntil(b"\r\n\r\n")
            writer.write(BAD_GATEWAY)
            writer.close()
            return
        await asyncio.gather(pump(reader, behind[1]), pump(behind[0], writer))


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, ssl.SSLError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def forward(plan: dict[str, Any], upstream: int) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(plan["certificate"])
    server = await asyncio.start_server(Relay(upstream).serve, "127.0.0.1", 0, ssl=context)
    url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
    say("INF +" + "-" * 92 + "+")
    say("INF |  Your quick Tunnel has been created! Visit it at (it may take some time to be reachable):  |")
    say(f"INF |  {url:<88}  |")
    say("INF +" + "-" * 92 + "+")
    say("ERR Configuration file config.yml was empty")
    say("INF Version 2026.11.0")
    say("INF Starting metrics server on 127.0.0.1:20241/metrics")
    await asyncio.sleep(plan.get("slow_s", 0))
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, over.set)
    loop.add_signal_handler(
        signal.SIGUSR1,
        say,
        'ERR Register tunnel error from server side error="Unauthorized: Tunnel not found" connIndex=0',
    )
    loop.add_signal_handler(signal.SIGUSR2, mend)
    if plan.get("fail") == "edge":
        while not over.is_set():
            say('ERR Failed to dial a quic connection error="failed to dial to edge with quic: timeout" connIndex=0')
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(over.wait(), 0.2)
        return
    say(
        "INF Registered tunnel connection connIndex=0 connection=5c31 event=0 ip=198.41.200.113 location=fra03 protocol=quic"
    )
    await over.wait()
    say("INF Initiating graceful shutdown due to signal interrupt ...")


def mend() -> None:
    say('WRN Connection terminated error="timeout: no recent network activity" connIndex=0')
    say(
        "INF Registered tunnel connection connIndex=0 connection=9e91 event=0 ip=198.41.200.23 location=fra07 protocol=http2"
    )


def main() -> None:
    plan_file = Path(os.environ["FAKE_CLOUDFLARED"])
    plan = json.loads(plan_file.read_text())
    noted = {"arguments": sys.argv[1:], "tunnel_settings": [name for name in os.environ if name.startswith("TUNNEL_")]}
    (plan_file.parent / f"{os.getpid()}.json").write_text(json.dumps(noted))
    fail = plan.get("fail", "")
    if fail == "silent":
        signal.pause()
    if fail == "mute":
        sys.exit(3)
    say(
        "INF Thank you for trying Cloudflare Tunnel. Doing so, without a Cloudflare account, is a quick way to experiment."
    )
    say("INF Requesting new quick Tunnel on trycloudflare.com...")
    if fail == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if fail in FAILURES:
        for line in FAILURES[fail]:
            say(line)
        sys.exit(1)
    url = sys.argv[sys.argv.index("--url") + 1]
    asyncio.run(forward(plan, int(url.rpartition(":")[2])))


if __name__ == "__main__":
    main()
