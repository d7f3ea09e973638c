"""A quick tunnel of Cloudflare: no account, no card; the program `cloudflared`, and WebSocket only."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from urllib.parse import urlsplit

from guava_nb.errors import ConfigError
from guava_nb.systems import own_group
from guava_nb.tunnels.cloudflared_program import DOWNLOADS, required_cloudflared
from guava_nb.tunnels.records import GRACE_S, end_orphans, open_record
from guava_nb.tunnels.tunnel import LOOPBACK, Address, Tunnel

__all__ = ["CloudflaredTunnel"]

#: From the program's start until its first connection to Cloudflare's edge stands; asking for the tunnel may take 15 of it.
START_S = 35.0
_KEPT_LINES = 200
_URL = re.compile(r"\|\s+(https://\S+)\s+\|")  # in a box of its own
_STANDS = re.compile(r"Registered tunnel connection|Connection \S+ registered")
_GONE = "Unauthorized"  # the edge has forgotten this tunnel, as after a laptop's long sleep: it never comes back
#: What of the user's settings is kept: how this network lets cloudflared out.
_KEPT_SETTINGS = (
    "TUNNEL_TRANSPORT_PROTOCOL",
    "TUNNEL_EDGE_IP_VERSION",
    "TUNNEL_EDGE_BIND_ADDRESS",
    "TUNNEL_QUICK_SERVICE",
)
#: What a line of its log means, first match wins.
_MEANINGS = (
    (
        r"\b429\b|error code: 1015",
        "trycloudflare.com gives this network no more tunnels for a while (429); wait some minutes, or use another tunnel",
    ),
    (
        r"x509|certificate",
        "a proxy on the way opens encrypted traffic, which cloudflared does not trust; use another network or tunnel",
    ),
    (
        r"failed to request quick Tunnel",
        "api.trycloudflare.com is not reached: there is no network, or a VPN or firewall in between; mend that, or use "
        "another tunnel",
    ),
    (
        r"unmarshal|parse quick Tunnel|failed to read quick",
        "trycloudflare.com has a fault of its own; try again in some minutes, or use another tunnel",
    ),
    (r"not defined|Incorrect Usage|No help topic", f"this cloudflared is too old: update it from {DOWNLOADS}"),
    (
        r"7844|quic|edge|dial",
        "Cloudflare's port 7844 is not reached, by UDP nor by TCP: a firewall or VPN is in between; use another network "
        "or tunnel",
    ),
)


class CloudflaredTunnel(Tunnel):
    """A name under trycloudflare.com that leads to this machine until the program ends.

    Args:
        what: path of the program; "" looks for `cloudflared` on PATH, and fetches it where there is none.

    Attributes:
        settle_s: from the making of the name until it is given out. It must not be looked up too early: a resolver that hears
            "unknown" repeats that for half an hour.
    """

    name = "cloudflared"
    settle_s = 5.0

    def __init__(self, what: str = "") -> None:
        self._what = what
        self._starting = threading.Lock()
        self._agent: _Agent | None = None

    def __repr__(self) -> str:
        return f"CloudflaredTunnel({self.address() or 'not started'})"

    def start(self, port: int) -> Address:
        """Run the program and wait until its name leads here; see `Tunnel.start`."""
        with self._starting:
            agent = self._agent
            if agent is not None and agent.port == port and (at := self.address()) is not None:
                return at
            self.stop()
            end_orphans(self.name)
            agent = self._agent = _Agent(required_cloudflared(self._what), port)
            try:
                agent.wait_until_it_stands()
                agent.settle(self.settle_s)
            except BaseException:
                self.stop()
                raise
            atexit.register(self.stop)
            assert agent.at is not None
            return agent.at

    def stop(self) -> None:
        """End the program; a start that is under way in another thread gives up."""
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.end()
        atexit.unregister(self.stop)

    def alive(self) -> bool:
        """Whether the program runs and Cloudflare knows its tunnel. It mends broken connections to the edge by itself."""
        agent = self._agent
        return agent is not None and agent.forwards

    def address(self) -> Address | None:
        """Where others connect; the name is the same as long as the program runs."""
        agent = self._agent
        return agent.at if agent is not None and agent.forwards else None


class _Agent:
    """One running cloudflared, and what it says.

    Attributes:
        at: where others connect, once it told.
    """

    def __init__(self, program: str, port: int) -> None:
        self.port = port
        self.at: Address | None = None
        self._program = program
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._changed = threading.Condition()
        self._named_at = 0.0
        self._stands = self._gone = self._ended = self._stopped = False
        self._owner = os.getpid()
        self._record = open_record(CloudflaredTunnel.name)
        try:
            self._process = self._run()
        except OSError as problem:
            self._record.forget()
            raise ConfigError(
                f"{program} cannot be run: {problem.strerror or problem}; {DOWNLOADS} has others"
            ) from problem
        self._record.hold(self._process.pid)
        self._reader = threading.Thread(target=self._read, name="guava-cloudflared", daemon=True)
        self._reader.start()

    def _run(self) -> subprocess.Popen[str]:
        # The rules for other tunnels in the user's own file would apply to this one, so it gets an empty one.
        config = self._record.folder / "config.yml"
        config.touch()
        own = {
            key: value for key, value in os.environ.items() if not key.startswith("TUNNEL_") or key in _KEPT_SETTINGS
        }
        words = [self._program, "tunnel", "--config", str(config), "--no-autoupdate", "--metrics", f"{LOOPBACK}:0"]
        return subprocess.Popen(
            [*words, "--url", f"http://{LOOPBACK}:{self.port}"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, encoding="utf-8",
            errors="replace", env={**own, "TUNNEL_GRACE_PERIOD": "1s"}, **own_group(),
        )  # fmt: skip

    @property
    def forwards(self) -> bool:
        """Whether it runs, stood once, and is not forgotten."""
        return self._stands and not self._gone and not self._ended and self._process.poll() is None

    def wait_until_it_stands(self) -> None:
        """Wait for its name and its first connection to the edge.

        Raises:
            ConfigError: it ended, was stopped, or took too long; with the reason that it gave.
        """
        with self._changed:
            over = self._changed.wait_for(
                lambda: self._ended or self._gone or (self._stands and self.at is not None), START_S
            )
            if self._stopped:
                raise ConfigError("the cloudflared tunnel was stopped while it was started")
            if not over or self._ended or self._gone:
                raise ConfigError(f"cloudflared opened no tunnel: {self._why(over)}")

    def settle(self, settle_s: float) -> None:
        """Let the new name become known before it is asked for.

        Raises:
            ConfigError: it was stopped or ended meanwhile.
        """
        with self._changed:
            until = self._named_at + settle_s
            while (left_s := until - time.monotonic()) > 0 and not self._ended:
                self._changed.wait(left_s)
            if self._ended:
                raise ConfigError(f"cloudflared opened no tunnel: {self._why(True)}")

    def _why(self, over: bool) -> str:
        """Lock held: the reason, in a sentence."""
        for pattern, sentence in _MEANINGS:
            if any(re.search(pattern, line) for line in self._telling()):
                return sentence
        status = self._process.poll()
        if over and status is not None and status < 0 and os.name != "nt":
            memory = " (often by the system, for lack of memory)" if status == -9 else ""
            return f"it was ended by signal {-status}{memory}; start it again"
        if not self._lines:
            doing = f"ended with status {status} and" if over else f"ran for {START_S:g} s and"
            return f"{self._program} {doing} said nothing: is it the right program? {DOWNLOADS} has it"
        last = self._lines[-1][:200]
        if over:
            return f"it ended with status {status}; its last line: {last}"
        return f"it had no connection to Cloudflare after {START_S:g} s; its last line: {last}"

    def _telling(self) -> Sequence[str]:
        """Lines that may be about a failure: not what it always says."""
        return [line for line in self._lines if " INF " not in line]

    # -------------------------------------------------------------------------------------------------- its own thread

    def _read(self) -> None:
        """Read what it says until it ends: a full pipe would stop it."""
        assert self._process.stderr is not None
        with contextlib.suppress(ValueError, OSError):  # closed by `end`
            for line in self._process.stderr:
                self._hear(line.strip())
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _hear(self, line: str) -> None:
        if not line:
            return
        url = _URL.search(line)
        with self._changed:
            self._lines.append(line)
            if url and self.at is None:
                parts = urlsplit(url[1])
                self.at = Address(parts.hostname or "", parts.port or 443, "wss")
                self._named_at = time.monotonic()
            self._stands = self._stands or bool(_STANDS.search(line))
            self._gone = self._gone or (self._stands and _GONE in line)
            self._changed.notify_all()

    def end(self) -> None:
        """Ask it to end, and end it when it does not. Safe to call twice; a forked child leaves its parent's alone."""
        if os.getpid() != self._owner:
            return
        with self._changed:
            self._stopped = True
        with contextlib.suppress(OSError):
            self._process.terminate()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(GRACE_S)
        self._reader.join(GRACE_S)
        if self._process.stderr is not None:
            self._process.stderr.close()
        self._record.forget()
