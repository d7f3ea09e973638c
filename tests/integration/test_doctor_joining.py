"""The doctor on a join code: each way to fail against real sockets, in the order in which a person meets them."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from guava_nb.cli import doctor as command
from guava_nb.cli.main import main
from guava_nb.doctor import Check, check_join, exit_status
from guava_nb.doctor.joining import _measured
from guava_nb.errors import JoinRefused, RemoteProtocolError
from guava_nb.link import line_measurement as measure
from guava_nb.link.line_measurement import LineFigures, _Talk, measure_line
from guava_nb.link.options import LinkOptions
from guava_nb.link.session_events import SessionOpened
from guava_nb.protocol.joincode import JoinCode
from guava_nb.protocol.messages import Leave, Measure
from tests.support.links import World, eventually, nothing_left_behind, own_port, world
from tests.support.nginx import Nginx, why_not
from tests.support.processes import ROOT
from tests.support.relay import DOWN, Relay

IMPATIENT = LinkOptions(connect_timeout_s=0.7)


def table(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.status for check in checks}


def failed(checks: list[Check], name: str) -> Check:
    """The check that failed: all before it are in order, all after it were not tried."""
    at = next(index for index, check in enumerate(checks) if check.name == name)
    assert [check.status for check in checks[:at]] == ["ok"] * at, checks
    assert checks[at].status == "fail", checks
    assert [check.status for check in checks[at + 1 :]] == ["not tried"] * (len(checks) - at - 1), checks
    assert checks[at].fix and exit_status(checks) == 1
    return checks[at]


@contextlib.contextmanager
def somebody(greeting: bytes, hears_first: bool = False) -> Iterator[int]:
    """A server of another kind; gives its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = server.accept()
                    with peer, contextlib.suppress(OSError):
                        if hears_first:
                            peer.recv(4096)
                        peer.sendall(greeting)
                        peer.settimeout(5)
                        while peer.recv(4096):
                            pass

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(10)


def code_for(port: int, scheme: str = "tls", host: str = "127.0.0.1") -> str:
    fingerprint = b"f" * 16 if scheme != "tcp" else b""
    return JoinCode(host, port, fingerprint, b"s" * 16, scheme).encode()


# ----------------------------------------------------------------------------------------------------- nothing is wrong


@pytest.mark.parametrize(
    ("tls", "scheme", "steps"),
    [
        (True, None, ["tls", "fingerprint"]),
        (False, None, []),
        (True, "ws", ["websocket", "tls", "fingerprint"]),
        (False, "ws", ["websocket"]),
    ],
)
def test_all_is_well(tls: bool, scheme: str | None, steps: list[str]) -> None:
    with nothing_left_behind(), world(tls=tls) as made:
        code = made.listener.join_code().with_address("127.0.0.1", made.listener.port, scheme)
        checks = check_join(f">>> %guava_worker {code.encode()} # pasted")
        assert table(checks) == dict.fromkeys(["join code", "name", "tcp", *steps, "version", "secret", "line"], "ok")
        assert exit_status(checks) == 0
        assert "10 MB of batches come in" in checks[-1].detail and "round trip" in checks[-1].detail
        assert "nothing to look up" in checks[1].detail
        assert code.encode()[20:40] not in repr(checks)
        assert made.here.of(SessionOpened) == []  # it takes nobody's place
        eventually(lambda: made.listener.stats.accepted == 1)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_all_is_well_behind_a_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with world() as made, Nginx(tmp_path, made.listener.port) as nginx:
        monkeypatch.setenv("SSL_CERT_FILE", str(nginx.authority))
        code = made.listener.join_code().with_address("localhost", nginx.port, "wss").encode()
        checks = check_join(code)
        names = ["join code", "name", "tcp", "gateway", "websocket", "tls", "fingerprint", "version", "secret", "line"]
        assert table(checks) == dict.fromkeys(names, "ok")
        assert checks[1].detail.startswith("localhost is ")
        monkeypatch.delenv("SSL_CERT_FILE")
        assert "does not trust" in failed(check_join(code), "gateway").detail
        monkeypatch.setenv("SSL_CERT_FILE", str(nginx.authority))
        made.close()
        gone = failed(check_join(code), "websocket")
        assert "answered 502: the tunnel stands, but nothing listens behind it" in gone.detail


# ------------------------------------------------------------------------------------------------- what people meet


def test_a_code_that_was_cut_off_or_is_none() -> None:
    (cut,) = check_join(code_for(1)[:-5])
    assert (cut.status, cut.name) == ("fail", "join code") and "cut off" in cut.detail and "whole" in cut.fix
    (none,) = check_join("4Zk1 my token")
    assert none.status == "fail" and "no 'guava1:'" in none.detail


@pytest.mark.parametrize(
    ("number", "says", "fix"),
    [
        (socket.EAI_NONAME, "is not known here", "if the tunnel was opened in this minute"),
        (socket.EAI_AGAIN, "is this machine online", "check the network of this machine"),
    ],
)
def test_a_name_that_cannot_be_looked_up(number: int, says: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(*_: object, **__: object) -> None:
        raise socket.gaierror(number, "no")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    check = failed(check_join(code_for(443, "wss", "quiet-rivers.trycloudflare.com")), "name")
    assert says in check.detail and fix in check.fix


def test_nobody_listens_there() -> None:
    port = own_port()
    check = failed(check_join(code_for(port)), "tcp")
    assert "connection refused" in check.detail
    assert "127.0.0.1 is this machine itself" in check.fix and "--tunnel" in check.fix
    elsewhere = failed(check_join(code_for(port, host=socket.gethostname())), "tcp")
    assert "is the session still open" in elsewhere.fix or "this machine itself" in elsewhere.fix


def test_a_firewall_that_swallows() -> None:
    with socket.socket() as server, contextlib.ExitStack() as held:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        port = server.getsockname()[1]
        for _ in range(4):  # its queue is full from now on: what comes is dropped without a word
            knocking = held.enter_context(socket.socket())
            knocking.setblocking(False)
            knocking.connect_ex(("127.0.0.1", port))
        check = failed(check_join(code_for(port), IMPATIENT), "tcp")
        assert "did not answer within 0.7 s" in check.detail


@pytest.mark.parametrize(
    ("host", "fix"),
    [
        ("10.1.2.3", "good inside its own network or VPN only"),
        ("100.101.102.103", "its own network or VPN only"),
        ("93.184.216.34", "a firewall or VPN on the way swallows it"),
    ],
)
def test_a_firewall_has_another_fix_on_private_addresses(host: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(self: socket.socket, address: object) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket.socket, "connect", connect)
    check = failed(check_join(code_for(7000, host=host), IMPATIENT), "tcp")
    assert fix in check.fix and "--tunnel cloudflared" in check.fix


@pytest.mark.parametrize(
    ("greeting", "hears", "scheme", "name", "says"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", False, "tls", "tls", "an SSH server or client answers there"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", False, "tcp", "version", "an SSH greeting"),
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", True, "tls", "tls", "a web server answers there"),
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", True, "tcp", "version", "an HTTP answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", True, "ws", "websocket", "a web page answers"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", False, "wss", "gateway", "an SSH server or client answers there"),
        (b"GUAVA1\0\0", True, "tcp", "version", "install the same guava-nb on both"),
        (b"", True, "tls", "tls", "was not done within"),
        (b"", True, "tcp", "version", "did not finish the handshake within"),
    ],
)
def test_somebody_else_answers(greeting: bytes, hears: bool, scheme: str, name: str, says: str) -> None:
    with somebody(greeting, hears) as port:
        check = failed(check_join(code_for(port, scheme), IMPATIENT), name)
    assert says in check.detail
    assert "newest join code" in check.fix or "the same version of it" in check.fix


def test_the_code_of_yesterday() -> None:
    with world(port=own_port()) as yesterday, world(tls=False, port=own_port()) as plain_yesterday:
        codes = [yesterday.listener.join_code(), plain_yesterday.listener.join_code()]
    with world(port=codes[0].port) as today, world(tls=False, port=codes[1].port) as plain_today:
        check = failed(check_join(codes[0].encode()), "fingerprint")
        assert "closed and opened again" in check.detail and "newest join code" in check.fix
        check = failed(check_join(codes[1].encode()), "secret")
        assert "newest join code" in check.fix
        mixed = replace(today.listener.join_code(), secret=b"x" * 16)
        assert "refused the join code" in failed(check_join(mixed.encode()), "secret").detail
        assert plain_today.listener.stats.accepted == today.listener.stats.accepted == 0


# ----------------------------------------------------------------------------------------------------- the line itself


def test_a_slow_line_is_told_with_what_helps() -> None:
    with world() as made, Relay(made.listener.port, rate_bytes_s=500_000, round_trip_s=0.02) as relay:
        checks = check_join(made.listener.join_code(port=relay.port).encode())
    assert checks[-1].status == "warning" and exit_status(checks) == 0
    assert re.search(r"10 MB of batches come in (1[6-9]|2\d)(\.\d)? s", checks[-1].detail)  # 20 s, more or less
    assert "--cache memory" in checks[-1].fix


def test_a_far_line_is_told_too() -> None:
    assert _measured(LineFigures(0.05, 2e6, 5e6, 11_000_000)).status == "ok"
    far = _measured(LineFigures(0.4, 2e6, 5e6, 11_000_000))
    assert far.status == "warning" and "40 Mbit/s from there, 16 Mbit/s to there, round trip 400 ms" in far.detail


def test_a_line_that_breaks_or_is_busy_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with world() as made:
        code = made.listener.join_code()
        with Relay(made.listener.port) as relay:
            relay.plans.append({DOWN: 30_000})
            checks = check_join(code.with_address("127.0.0.1", relay.port).encode())
            assert checks[-1].status == "warning" and checks[-1].detail.startswith("not measured: ")
        eventually(lambda: made.listener.stats.accepted == 1, "that visit is over")
        with contextlib.ExitStack() as seats:
            for _ in range(measure._MAX_VISITORS):
                seats.enter_context(made.listener._measuring.seat())
            checks = check_join(code.encode())
            assert checks[-1].status == "warning" and "other workers are measuring their lines" in checks[-1].detail
            with pytest.raises(JoinRefused):
                measure_line(code)
        eventually(lambda: check_join(code.encode())[-1].status == "ok")


def test_a_line_that_swallows_ends_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_VISIT_S", 0.8)
    with nothing_left_behind(), world() as made, Relay(made.listener.port) as relay:
        relay.plans.append({})
        fill = _Talk.fill

        def stalling(self: _Talk, nbytes: int) -> None:
            relay.links[0].stall()
            fill(self, nbytes)

        monkeypatch.setattr(_Talk, "fill", stalling)
        checks = check_join(made.listener.join_code(port=relay.port).encode())
        assert checks[-1].status == "warning" and "did not finish measuring within 0.8 s" in checks[-1].detail
        relay.links[0].cut()


def greedy(made: World, *records: object) -> None:
    """A visitor that holds the code and asks for too much."""
    from guava_nb.link.handshake import Deadline, attach
    from guava_nb.protocol.messages import Attach

    visit = attach(
        made.listener.join_code(),
        Attach(session_id=bytes(16), identity=bytes(32), purpose="measure", incarnation=0, received={}),
        made.options,
        10,
    )
    with contextlib.closing(visit.stream):
        talk = _Talk(visit.stream, visit.decoder, Deadline(10, "answer", "it"), visit.early)
        for record in records:
            talk.say(record)  # type: ignore[arg-type]
        while True:
            talk.hear()


def test_a_visitor_cannot_ask_for_more_than_its_share() -> None:
    with nothing_left_behind(), world() as made:
        with pytest.raises((ConnectionError, RemoteProtocolError)):
            greedy(made, Measure(1 << 40))
        eventually(lambda: made.listener.stats.refused.get("too large") == 1)
        with pytest.raises((ConnectionError, RemoteProtocolError)):
            greedy(made, Measure(8 << 20), Measure(8 << 20), Measure(8 << 20), Measure(8 << 20), Measure(8 << 20))
        eventually(lambda: made.listener.stats.refused.get("too large") == 2)
        with pytest.raises((ConnectionError, RemoteProtocolError)):
            greedy(made, Leave("not what it came for"))
        eventually(lambda: made.listener.stats.refused.get("not guava") == 1)
        made.dial()


# ------------------------------------------------------------------------------------------------------- the command


def test_the_command_takes_the_code_from_the_environment_and_shows_it_nowhere() -> None:
    with world() as made:
        code = made.listener.join_code().encode()
        environ = {**os.environ, "GUAVA_JOIN_CODE": code, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "guava_nb", "doctor"],
            capture_output=True, text=True, timeout=50, env=environ, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The way that the join code names" in done.stdout and "Mbit/s from there" in done.stdout
    assert code[20:40] not in done.stdout + done.stderr


def test_the_command_tells_by_its_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "run_checks", list)
    monkeypatch.delenv("GUAVA_JOIN_CODE", raising=False)
    assert main(["doctor", code_for(own_port())]) == 1
    shown = capsys.readouterr().out
    assert "connection refused" in shown and "not tried" in shown
    assert main(["doctor"]) == 0
    assert main(["doctor", "--join"]) == 2  # nobody can be asked here
    assert "no terminal: set GUAVA_JOIN_CODE" in capsys.readouterr().err
    monkeypatch.setattr(command, "ask_for_code", lambda: code_for(own_port()))
    assert main(["doctor", "--join"]) == 1
    monkeypatch.setenv("GUAVA_JOIN_CODE", code_for(own_port()))
    assert main(["doctor"]) == 1 and "GUAVA_JOIN_CODE" not in os.environ
