"""Checks of a join code: the way to its listener, step by step, by the very calls that a worker's join makes.

Stops at the first step that fails: its line says why and what to do, and the lines after it say that they were not tried.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable

from guava_nb.config.units import show_time
from guava_nb.doctor.check import Check
from guava_nb.errors import (
    AuthenticationError,
    GuavaError,
    JoinCodeError,
    JoinRefused,
    LinkTimeout,
    RemoteProtocolError,
    VersionMismatch,
)
from guava_nb.link.line_measurement import LineFigures, measure_line
from guava_nb.link.options import LinkOptions
from guava_nb.protocol.joincode import JoinCode
from guava_nb.transport.tcp import look_up

__all__ = ["check_join"]

_WAYS = {"tcp": "TCP, not encrypted", "tls": "TCP with TLS", "ws": "WebSocket", "wss": "WebSocket over HTTPS"}
_BATCH_BYTES = 10_000_000
_SLOW_BYTES_S = 1_000_000
_FAR_S = 0.3
_NEWEST = "ask for the newest join code: a session that was opened again, or a tunnel that was, has another one"
_SAME = "install guava_nb on both sides from the same place, and the same version of it"
_OTHER_WAY = "%guava_up --tunnel cloudflared or ngrok-http over there goes through port 443 instead"
_THRIFTY = "%guava_train --cache memory sends each sample once, and --dry-run says what else sends less"


def check_join(text: str, options: LinkOptions | None = None) -> list[Check]:
    """Try the way to a listener up to its proof, and measure the line.

    Args:
        text: a join code as people paste it; no check repeats anything secret of it.
        options: patience.
    """
    try:
        code = JoinCode.decode(text)
    except JoinCodeError as problem:
        return [Check("join code", "fail", str(problem), "paste the line again, whole; %guava_up shows it once more")]
    return [Check("join code", "ok", f"for {code.address} over {_WAYS[code.scheme]}"), *_try(code, options)]


def _try(code: JoinCode, options: LinkOptions | None) -> list[Check]:
    steps, lines = _Steps(), _lines(code)
    addresses: list[str] = []
    try:
        steps.begin("name")
        addresses = [str(address[0]) for _, address in look_up(code.host, code.port)]
        figures = measure_line(code, options, steps.begin)
    except GuavaError as problem:
        failed = lines.index(_line_of(steps.last, problem))
        passed = [_passed(name, code, steps, addresses) for name in lines[:failed]]
        untried = [Check(name, "not tried", "") for name in lines[failed + 1 :]]
        return [*passed, _failed(lines[failed], problem, code), *untried]
    return [*(_passed(name, code, steps, addresses) for name in lines[:-1]), _measured(figures)]


class _Steps:
    """When each step began."""

    def __init__(self) -> None:
        self.last = ""
        self._began: list[tuple[str, float]] = []

    def begin(self, name: str) -> None:
        self.last = name
        self._began.append((name, time.monotonic()))

    def took_s(self, name: str) -> float:
        at = next(index for index, (step, _) in enumerate(self._began) if step == name)
        over = self._began[at + 1][1] if at + 1 < len(self._began) else time.monotonic()
        return over - self._began[at][1]


def _lines(code: JoinCode) -> list[str]:
    """The lines of this code's report, in order."""
    gateway = ["gateway"] if code.scheme == "wss" else []
    websocket = ["websocket"] if code.scheme in ("ws", "wss") else []
    tls = ["tls", "fingerprint"] if code.fingerprint else []
    return ["name", "tcp", *gateway, *websocket, *tls, "version", "secret", "line"]


def _line_of(step: str, problem: GuavaError) -> str:
    """The line on which a failure belongs: two steps prove two things each."""
    if step == "tls" and isinstance(problem, AuthenticationError):
        return "fingerprint"
    if step == "secret" and not isinstance(problem, AuthenticationError):
        return "version"
    if step == "attach":
        return "version" if isinstance(problem, VersionMismatch) else "line"
    return step


# ----------------------------------------------------------------------------------------------------- what went well


def _passed(name: str, code: JoinCode, steps: _Steps, addresses: list[str]) -> Check:
    found = ", ".join(dict.fromkeys(addresses))
    says: dict[str, Callable[[], str]] = {
        "name": lambda: "an address, nothing to look up" if found == code.host else f"{code.host} is {found}",
        "tcp": lambda: f"{code.address} accepts connections, after {steps.took_s('tcp') * 1e3:.0f} ms",
        "gateway": lambda: f"{code.host} has a certificate that is trusted here",
        "websocket": lambda: f"passes, after {steps.took_s('websocket') * 1e3:.0f} ms",
        "tls": lambda: f"TLS 1.3 from end to end, after {steps.took_s('tls') * 1e3:.0f} ms",
        "fingerprint": lambda: "the certificate is the one that the join code names",
        "version": lambda: "both sides speak the same",
        "secret": lambda: "both sides proved that they hold it",
    }
    return Check(name, "ok", says[name]())


def _measured(figures: LineFigures) -> Check:
    """What the line is good for."""
    down, up = figures.down_bytes_s, figures.up_bytes_s
    detail = (
        f"{_mbit(down)} from there, {_mbit(up)} to there, round trip {show_time(figures.round_trip_s)}: "
        f"{_BATCH_BYTES // 10**6} MB of batches come in {show_time(_BATCH_BYTES / down)}, as much of gradients goes in "
        f"{show_time(_BATCH_BYTES / up)} (measuring took {figures.used_bytes / 1e6:.1f} MB)"
    )
    if min(down, up) < _SLOW_BYTES_S:
        return Check("line", "warning", detail, f"this line is slow: {_THRIFTY}")
    if figures.round_trip_s > _FAR_S:
        return Check("line", "warning", detail, f"every step waits for a long round trip: {_THRIFTY}")
    return Check("line", "ok", detail)


def _mbit(bytes_s: float) -> str:
    mbit_s = bytes_s * 8 / 1e6
    return f"{mbit_s:.3g} Mbit/s" if mbit_s < 999.5 else f"{mbit_s:,.0f} Mbit/s"


# ------------------------------------------------------------------------------------------------ what went otherwise


def _failed(name: str, problem: GuavaError, code: JoinCode) -> Check:
    detail = " ".join(str(problem).split())
    if name == "line":
        again = (
            "try again in a minute"
            if isinstance(problem, JoinRefused)
            else "the connection broke while it was measured: run this again, and if it breaks each time, try another network"
        )
        return Check("line", "warning", f"not measured: {detail}", again)
    return Check(name, "fail", detail, _fix(name, problem, code))


def _fix(name: str, problem: GuavaError, code: JoinCode) -> str:
    if name == "name":
        return _fix_name(code, problem)
    if name == "tcp":
        return _fix_tcp(code, problem)
    if name == "gateway" and isinstance(problem, AuthenticationError):
        return f"compare the clock here with another one; {_NEWEST}"
    if name in ("tls", "version") and isinstance(problem, VersionMismatch):
        return _SAME
    if name in ("tls", "version") and isinstance(problem, RemoteProtocolError):
        return f"another program has that address now: {_NEWEST}"
    if name in ("tls", "version"):
        return f"something accepts connections there and is no session of guava_nb: {_NEWEST}"
    return _NEWEST


def _fix_name(code: JoinCode, problem: GuavaError) -> str:
    if "name server" in str(problem):
        return "check the network of this machine: no name can be looked up"
    if code.scheme in ("ws", "wss"):
        return (
            "if the tunnel was opened in this minute, this network may deny its name for half an hour: open it again; "
            f"else it is closed: {_NEWEST}"
        )
    return _NEWEST


def _fix_tcp(code: JoinCode, problem: GuavaError) -> str:
    address = _address(code.host)
    if address is not None and address.is_loopback:
        return (
            f"{code.host} is this machine itself, and no session listens here; for workers elsewhere open it with "
            "%guava_up --tunnel (or --host) over there"
        )
    if isinstance(problem, LinkTimeout) and address is not None and not address.is_global:
        return f"{code.host} is good inside its own network or VPN only: join that, or else {_OTHER_WAY}"
    if isinstance(problem, LinkTimeout):
        return f"a firewall or VPN on the way swallows it, or the machine is off: {_OTHER_WAY}"
    return f"nothing listens there: is the session still open? Else {_NEWEST}"


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return None
