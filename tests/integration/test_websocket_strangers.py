"""What strangers do to the WebSocket door of a listener: each is answered shortly and counted, and a good join works after."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from websockets.frames import Frame, Opcode

from guava_nb.errors import AuthenticationError, LinkBroken, RemoteProtocolError
from guava_nb.link.dialler import dial
from guava_nb.link.handshake import attach
from guava_nb.link.session_events import MessageArrived
from guava_nb.protocol.joincode import JoinCode
from guava_nb.protocol.messages import Attach
from tests.integration.test_link_attacks import besieged, refused, say
from tests.support.links import QUICK, World, eventually, exchange, nothing_left_behind, world

UPGRADE = (
    b"GET /guava HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def opened(made: World) -> socket.socket:
    """A WebSocket whose handshake is done, held by hand."""
    sock = socket.create_connection(("127.0.0.1", made.listener.port), timeout=20)
    sock.sendall(UPGRADE)
    heard = b""
    while b"\r\n\r\n" not in heard:
        heard += sock.recv(4096)
    assert heard.startswith(b"HTTP/1.1 101 ")
    return sock


@pytest.mark.parametrize("tls", [True, False], ids=["tls inside", "plain inside"])
def test_sessions_over_websocket_beside_others(tls: bool) -> None:
    with nothing_left_behind(), world(replace(QUICK, silence_s=30.0), tls) as made:
        code = made.listener.join_code()
        inside = dial(code.with_address("127.0.0.1", made.listener.port, "ws"), made.there, made.options)
        made.dialled.append(inside)
        theirs = next(s for s in made.listener.sessions if s.session_id == inside.session_id)
        exchange(made, inside, theirs, 6)
        beside, _ = made.dial()
        assert beside.state == inside.state == "open"
        eventually(lambda: made.listener.stats.accepted == 4)


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET / HTTP/1.1", b"404 Not Found"),
        (b"GET /favicon.ico HTTP/1.1", b"404 Not Found"),
        (b"GET /guava HTTP/1.1", b"426 Upgrade Required"),
        (b"HEAD /guava HTTP/1.1", b"40[05] "),  # the older ones of the library read nothing but GET and HTTP/1.1
        (b"POST / HTTP/1.1", b"40[04] "),
        (b"GET /guava HTTP/1.0", b"(400|505) "),
        (b"PUT nonsense", b"400 Bad Request"),
    ],
)
def test_a_browser_gets_a_short_answer(request_line: bytes, status: bytes) -> None:
    with besieged(tls=True) as made:
        heard = say(made, request_line + b"\r\nHost: x\r\nUser-Agent: Mozilla/5.0\r\n\r\n")
        assert re.match(b"HTTP/1.1 " + status, heard)
        assert heard.endswith(b"\r\n\r\nthis is no web page\n")
        assert len(heard) < 400
        assert b"websockets" not in heard.lower().split(b"upgrade")[0]
        refused(made, "not guava")


def test_headers_without_end() -> None:
    with besieged(tls=True) as made:
        with (
            socket.create_connection(("127.0.0.1", made.listener.port), timeout=20) as sock,
            contextlib.suppress(OSError),
        ):
            sock.sendall(b"GET /guava HTTP/1.1\r\n")
            for number in itertools.count():
                sock.sendall(b"X-%d: %s\r\n" % (number, b"y" * 1000))
        refused(made, "too large")


def test_headers_too_slow() -> None:
    with besieged(tls=True) as made:
        started = time.monotonic()
        with (
            socket.create_connection(("127.0.0.1", made.listener.port), timeout=20) as sock,
            contextlib.suppress(OSError),
        ):
            for byte in itertools.cycle(b"GET "):
                sock.sendall(bytes([byte]))
                time.sleep(0.02)  # a trickle
        assert time.monotonic() - started < 15
        refused(made, "too slow")


@pytest.mark.parametrize(
    "frame",
    [
        b"\x82\xff\x3f" + bytes(7) + bytes(4),
        Frame(Opcode.BINARY, b"GUAVA9\0\0" + bytes(32)).serialize(mask=False),
        Frame(Opcode.TEXT, b"GUAVA9\0\0" + bytes(32)).serialize(mask=True),
        Frame(Opcode.BINARY, os.urandom(60)).serialize(mask=True),
    ],
    ids=["huge", "unmasked", "text", "noise"],
)
def test_frames_that_break_the_rules(frame: bytes) -> None:
    with besieged(tls=True) as made:
        with opened(made) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(frame)
            while sock.recv(4096):
                pass
        refused(made, "not guava")


def test_silence_after_the_upgrade_is_ended() -> None:
    with besieged(tls=True) as made:
        with opened(made) as sock:
            assert sock.recv(4096) == b""
        refused(made, "too slow")


def test_a_flood_of_open_websockets_does_not_keep_a_worker_out() -> None:
    with besieged(tls=True, max_unauthenticated=8) as made:
        held = [opened(made) for _ in range(20)]
        code = made.listener.join_code().with_address("127.0.0.1", made.listener.port, "ws")
        made.dialled.append(dial(code, made.there, made.options))
        assert len(made.listener._guests) <= 8
        refused(made, "crowded", 1)
        for sock in held:
            sock.close()


def test_wrong_secret_and_wrong_fingerprint_over_websocket() -> None:
    record = Attach(session_id=bytes(16), identity=bytes(32), purpose="control", incarnation=0, received={})
    with besieged(tls=True) as made:
        code = made.listener.join_code().with_address("127.0.0.1", made.listener.port, "ws")
        with pytest.raises(AuthenticationError, match="newest join code"):
            attach(replace(code, secret=b"x" * 16), record, QUICK, 10)
        with pytest.raises(AuthenticationError, match="66666666"):
            attach(replace(code, fingerprint=b"f" * 16), record, QUICK, 10)
        assert made.here.of(MessageArrived) == []


def test_plain_inside_where_tls_must_be() -> None:
    record = Attach(session_id=bytes(16), identity=bytes(32), purpose="control", incarnation=0, received={})
    with besieged(tls=True) as made:
        code = replace(made.listener.join_code(), scheme="ws", fingerprint=b"")
        with pytest.raises((RemoteProtocolError, ConnectionError)):
            attach(code, record, QUICK, 10)
        refused(made, "not guava")


def test_what_ngrok_answers_reaches_the_dialler_as_a_sentence() -> None:
    page = b"<html>the endpoint is offline</html>"
    answer = (
        b"HTTP/1.1 404 Not Found\r\nngrok-error-code: ERR_NGROK_3200\r\nContent-Length: %d\r\n\r\n" % len(page) + page
    )
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def serve() -> bytes:
            peer, _ = server.accept()
            with peer:
                asked = peer.recv(4096)
                peer.sendall(answer)
                return asked

        asked = pool.submit(serve)
        code = JoinCode("127.0.0.1", server.getsockname()[1], b"f" * 16, b"s" * 16, "ws")
        with pytest.raises(LinkBroken, match=r"the endpoint is offline: its agent has ended .*\(ERR_NGROK_3200\)"):
            attach(
                code,
                Attach(session_id=bytes(16), identity=bytes(32), purpose="control", incarnation=0, received={}),
                QUICK,
                10,
            )
        assert b"ngrok-skip-browser-warning: 1\r\n" in asked.result()
