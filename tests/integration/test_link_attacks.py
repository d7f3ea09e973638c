"""What strangers do to a listener: each is refused and counted, none hurts it, and a good join works afterwards."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from guava_nb.errors import AuthenticationError, FrameTooLarge, JoinRefused, LinkBroken, RemoteProtocolError
from guava_nb.link.dialler import dial
from guava_nb.link.handshake import Deadline, attach, prove, send_record
from guava_nb.link.options import LinkOptions
from guava_nb.link.session_events import MessageArrived, SessionClosed, SessionSuspect
from guava_nb.protocol.framing import HEADER_BYTES, MAGIC, WIRE_VERSION, OutgoingMessage
from guava_nb.protocol.handshake_proof import DiallerProof
from guava_nb.protocol.messages import KIND_OF, Attach, Channel, Goodbye, Leave, Ping, SumBucket
from guava_nb.transport.tcp import connect
from tests.support.links import QUICK, World, eventually, nothing_left_behind, numbered, rss_bytes, world
from tests.support.relay import Relay

IDENTITY = bytes(32)


@contextlib.contextmanager
def besieged(tls: bool = False, **changes: object) -> Iterator[World]:
    """A listener that must still let a good worker in at the end, with its memory bounded."""
    with nothing_left_behind(), world(replace(QUICK, auth_timeout_s=1.0, **changes), tls) as made:  # type: ignore[arg-type]
        before = rss_bytes()
        yield made
        ours, _ = made.dial()
        before_count = len(made.here.of(MessageArrived))
        ours.send(*numbered(7, Channel.GRADIENT, 100_000))
        made.here.wait_for(MessageArrived, before_count + 1)
        assert rss_bytes() - before < 64 << 20


def refused(made: World, reason: str, count: int = 1) -> None:
    eventually(lambda: made.listener.stats.refused.get(reason, 0) >= count, f"no {reason!r}: {made.listener.stats}")


def say(made: World, *pieces: bytes) -> bytes:
    """Connect plainly, say this, and read until the listener ends it."""
    with socket.create_connection(("127.0.0.1", made.listener.port), timeout=20) as sock:
        heard = b""
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                sock.sendall(piece)
            while data := sock.recv(4096):
                heard += data
        return heard


def proved(made: World):
    """A stream whose proof is done, from somebody who holds the code and means ill."""
    code = made.listener.join_code()
    stream = connect(code.host, code.port)
    prove(stream, DiallerProof(code.secret, code.fingerprint), Deadline(10, "prove", "it"))
    return stream


def until_end(stream) -> None:
    stream.set_deadline(20)
    with contextlib.suppress(LinkBroken):
        while stream.recv_into(memoryview(bytearray(4096))):
            pass
    stream.close()


def attached(made: World, session_id: bytes = b"s" * 16):
    """Both connections of a session, held by hand."""
    return [
        attach(
            made.listener.join_code(),
            Attach(session_id=session_id, identity=IDENTITY, purpose=purpose, incarnation=0, received={}),
            QUICK,
            10,
        )
        for purpose in ("control", "bulk")
    ]


def header(kind: int, record_bytes: int = 10, chunk: int = 0, payload: int = 0, channel: int = 4, sequence: int = 1):
    return struct.pack("<4sBBBBQIIQ", MAGIC, WIRE_VERSION, kind, channel, 0, sequence, record_bytes, chunk, payload)


@pytest.mark.parametrize("tls", [True, False], ids=["tls", "plain"])
def test_wrong_secret(tls: bool) -> None:
    with besieged(tls) as made:
        code = replace(made.listener.join_code(), secret=b"x" * 16)
        with pytest.raises(AuthenticationError, match="newest join code"):
            attach(
                code,
                Attach(session_id=bytes(16), identity=IDENTITY, purpose="control", incarnation=0, received={}),
                QUICK,
                10,
            )
        refused(made, "wrong code")


def test_wrong_fingerprint() -> None:
    with besieged(tls=True) as made:
        code = replace(made.listener.join_code(), fingerprint=b"f" * 16)
        with pytest.raises(AuthenticationError, match="66666666"):
            attach(
                code,
                Attach(session_id=bytes(16), identity=IDENTITY, purpose="control", incarnation=0, received={}),
                QUICK,
                10,
            )
        refused(made, "left")


@pytest.mark.parametrize("tls", [True, False], ids=["tls", "plain"])
def test_http_request(tls: bool, caplog: pytest.LogCaptureFixture) -> None:
    with besieged(tls) as made:
        heard = say(made, b"GET /api HTTP/1.1\r\nHost: example\r\nUser-Agent: scanner\r\n\r\n")
        assert b"GUAVA" not in heard
        refused(made, "not guava")
    lines = [record for record in caplog.records if "refused a connection" in record.message]
    assert len(lines) == 1
    assert "HTTP request" in lines[0].message


def test_tls_hello_on_a_plain_port(caplog: pytest.LogCaptureFixture) -> None:
    context = ssl.create_default_context()
    with besieged() as made:
        with (
            socket.create_connection(("127.0.0.1", made.listener.port)) as sock,
            pytest.raises((ssl.SSLError, OSError)),
        ):
            context.wrap_socket(sock, server_hostname="localhost")
        refused(made, "not guava")
    assert "TLS hello" in caplog.text


def test_codes_for_the_other_kind_of_port() -> None:
    with besieged(tls=False) as plain, besieged(tls=True) as encrypted:
        attach_record = Attach(session_id=bytes(16), identity=IDENTITY, purpose="control", incarnation=0, received={})
        tls_code = encrypted.listener.join_code(port=plain.listener.port)
        with pytest.raises((RemoteProtocolError, LinkBroken)):
            attach(tls_code, attach_record, QUICK, 10)
        plain_code = plain.listener.join_code(port=encrypted.listener.port)
        with pytest.raises((RemoteProtocolError, LinkBroken)):
            attach(plain_code, attach_record, QUICK, 10)


@pytest.mark.parametrize("tls", [True, False], ids=["tls", "plain"])
def test_silence_is_ended(tls: bool) -> None:
    with besieged(tls) as made:
        started = time.monotonic()
        assert say(made) == b""
        assert time.monotonic() - started < 10
        refused(made, "too slow")


def test_silence_after_the_proof_is_ended() -> None:
    with besieged() as made:
        until_end(proved(made))
        refused(made, "too slow")


def test_a_flood_of_silence_does_not_keep_a_worker_out() -> None:
    with besieged(max_unauthenticated=8) as made:
        held = [socket.create_connection(("127.0.0.1", made.listener.port)) for _ in range(40)]
        made.dial()
        assert len(made.listener._guests) <= 8
        assert sum("guest" in thread.name for thread in threading.enumerate()) <= 8
        refused(made, "crowded", 32)
        for sock in held:
            sock.close()


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_pickle_bombs(tmp_path: Path) -> None:
    mark = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(mark))
    with besieged() as made:
        say(made, bomb)
        say(made, struct.pack(">Q", len(bomb)) + bomb)
        stream = proved(made)
        stream.send_all([header(KIND_OF[Attach], len(bomb), sequence=0) + bomb])
        until_end(stream)
        refused(made, "not guava", 3)
        control, bulk = attached(made)
        control.stream.send_all([header(KIND_OF[Leave], len(bomb), channel=1) + bomb])
        until_end(control.stream)
        until_end(bulk.stream)
        assert isinstance(made.here.wait_for(SessionClosed)[0].cause, RemoteProtocolError)
        assert not mark.exists()


@pytest.mark.parametrize(
    "frame",
    [
        header(KIND_OF[Attach], (1 << 32) - 1, sequence=0),
        header(KIND_OF[Attach], 100, 0, 1 << 63, sequence=0),
        header(KIND_OF[Attach], 100, 1 << 31, (1 << 64) - 1, sequence=0),
    ],
    ids=["record", "payload", "chunk"],
)
def test_huge_lengths_before_the_join(frame: bytes) -> None:
    with besieged() as made:
        stream = proved(made)
        stream.send_all([frame])
        until_end(stream)
        refused(made, "too large")


def test_huge_lengths_in_a_session_end_it_alone() -> None:
    with besieged() as made:
        good, _ = made.dial()
        control, bulk = attached(made)
        bulk.stream.send_all([header(KIND_OF[SumBucket], 10, 1, 1 << 63)])
        closed = made.here.wait_for(SessionClosed)[0]
        assert isinstance(closed.cause, FrameTooLarge)
        until_end(control.stream)
        until_end(bulk.stream)
        assert good.state == "open"
        assert made.here.of(SessionSuspect) == []


@pytest.mark.parametrize("where", ["preamble", "proof", "header", "record"])
def test_truncated_at_every_stage(where: str) -> None:
    frame = b"".join(
        bytes(part)
        for part in next(
            OutgoingMessage(
                Attach(session_id=bytes(16), identity=IDENTITY, purpose="control", incarnation=0, received={}),
                Channel.CONTROL,
                0,
            ).frames()
        )
    )
    with besieged() as made:
        if where in ("preamble", "proof"):
            with socket.create_connection(("127.0.0.1", made.listener.port)) as sock:
                sock.sendall((b"GUAVA9\0\0" + bytes(32) + bytes(31))[: 5 if where == "preamble" else 71])
        else:
            stream = proved(made)
            stream.send_all([frame[: HEADER_BYTES - 1 if where == "header" else -1]])
            stream.close()
        refused(made, "left")


def test_a_truncated_message_makes_a_session_suspect() -> None:
    with besieged(grace_s=0.3) as made:
        control, bulk = attached(made)
        bulk.stream.send_all([header(KIND_OF[SumBucket], 100, 1000, 1000)])
        bulk.stream.close()
        assert "middle of a message" in str(made.here.wait_for(SessionSuspect)[0].cause)
        control.stream.close()
        made.here.wait_for(SessionClosed)


def test_a_replayed_proof_is_worth_nothing() -> None:
    with besieged() as made, Relay(made.listener.port) as relay:
        taped: list[bytes] = []
        code = made.listener.join_code(port=relay.port)
        stream = connect(code.host, code.port)
        genuine = stream.send_all
        stream.send_all = lambda buffers: (taped.extend(map(bytes, buffers)), genuine(buffers))[1]  # type: ignore[method-assign]
        prove(stream, DiallerProof(code.secret, code.fingerprint), Deadline(10, "prove", "it"))
        send_record(
            stream, Attach(session_id=bytes(16), identity=IDENTITY, purpose="control", incarnation=0, received={})
        )
        stream.close()
        assert len(taped) >= 3
        heard = say(made, *taped)
        assert heard.startswith(b"GUAVA9\0\0")
        assert heard[40:] == b"\x00\x01"  # refused: wrong proof
        refused(made, "wrong code")


def test_a_listener_that_only_repeats_is_noticed() -> None:
    with besieged() as made, socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def echo() -> None:
            peer, _ = server.accept()
            with peer:
                while data := peer.recv(4096):
                    peer.sendall(data)

        echoing = pool.submit(echo)
        code = made.listener.join_code(port=server.getsockname()[1])
        with pytest.raises(AuthenticationError, match="repeats"):
            attach(
                code,
                Attach(session_id=bytes(16), identity=IDENTITY, purpose="control", incarnation=0, received={}),
                QUICK,
                10,
            )
        echoing.result()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"identity": b"i" * 32}, "another identity"),
        ({"session_id": b"unknown-session!"}, "not known here"),
        ({"session_id": b"short"}, "wrong length"),
        ({"purpose": "shell"}, "not known"),
    ],
)
def test_attaching_to_what_is_not_ours(change: dict, why: str) -> None:
    with besieged() as made:
        good, _ = made.dial()
        record = Attach(session_id=good.session_id, identity=good.identity, purpose="bulk", incarnation=5, received={})
        fields = {name: getattr(record, name) for name in record.__struct_fields__}
        with pytest.raises(JoinRefused, match=why):
            attach(made.listener.join_code(), Attach(**{**fields, **change}), QUICK, 10)
        refused(made, "refused")
        assert good.state == "open"
        assert made.here.of(SessionSuspect) == []


@pytest.mark.parametrize("record", [Leave("first"), Ping(1), Goodbye("bye")], ids=lambda record: type(record).__name__)
def test_anything_but_attach_first(record) -> None:
    with besieged() as made:
        stream = proved(made)
        sequence = 1 if isinstance(record, Leave) else 0
        for frame in OutgoingMessage(record, Channel.CONTROL, sequence).frames():
            stream.send_all(frame)
        until_end(stream)
        refused(made, "not guava")


@pytest.mark.parametrize(
    "bad",
    [
        b"\xff" * 200,
        header(KIND_OF[Attach], 1, sequence=0) + b"\x90",
        header(200),
        header(KIND_OF[Leave], 1, channel=77) + b"\x90",
        header(KIND_OF[Leave], 11, channel=1, sequence=5) + b"\x91\xa9x12345678",
    ],
    ids=["noise", "attach", "kind", "channel", "gap"],
)
def test_a_session_that_breaks_the_rules_is_over(bad: bytes) -> None:
    with besieged() as made:
        control, bulk = attached(made)
        control.stream.send_all([bad])
        closed = made.here.wait_for(SessionClosed)[0]
        assert isinstance(closed.cause, RemoteProtocolError)
        until_end(control.stream)
        until_end(bulk.stream)


def test_a_peer_that_sends_on_without_credit_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    window = 1 << 16
    monkeypatch.setattr(LinkOptions, "window_bytes", window)  # the least that is let in; the peer's own stays 256 MiB
    options = replace(QUICK, window_bytes=window, payload_of=lambda session_id, message: window)
    with nothing_left_behind(), world(options, consume=False) as made:
        made.dialled.append(session := dial(made.listener.join_code(), made.there, QUICK))
        for number in range(3):
            session.send(*numbered(number, Channel.GRADIENT, window // 2 - 1000))
        assert "ignores its credit" in str(made.here.wait_for(SessionClosed)[0].cause)
        assert len(made.here.of(MessageArrived)) == 2


def test_a_lie_about_what_was_received_ends_the_session() -> None:
    with besieged() as made:
        control, bulk = attached(made)
        for one in (control, bulk):
            one.stream.close()
        record = Attach(session_id=b"s" * 16, identity=IDENTITY, purpose="control", incarnation=1, received={1: 999})
        again = attach(made.listener.join_code(), record, QUICK, 10)
        assert isinstance(made.here.wait_for(SessionClosed)[0].cause, RemoteProtocolError)
        until_end(again.stream)


def test_a_control_connection_without_bulk_is_forgotten() -> None:
    with besieged() as made:
        record = Attach(session_id=bytes(16), identity=IDENTITY, purpose="control", incarnation=0, received={})
        alone = attach(made.listener.join_code(), record, QUICK, 10)
        until_end(alone.stream)
        eventually(lambda: made.listener.sessions == [])
        assert made.here.events == []


def bad_code(port: int) -> None:
    """One connection with a wrong code, as fast as a socket allows."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # no TIME_WAIT by the thousand
        sock.sendall(b"GUAVA9\0\0" + hashlib.sha256(os.urandom(8)).digest() + bytes(32))
        heard = b""
        with contextlib.suppress(ConnectionError):
            while data := sock.recv(256):
                heard += data
        assert heard == b"" or heard[:8] == b"GUAVA9\0\0"
        assert b"\x01" not in heard[40:41]


@pytest.mark.timeout(180)
def test_ten_thousand_bad_codes(caplog: pytest.LogCaptureFixture) -> None:
    with besieged() as made:
        for _ in range(200):  # what grows once, has grown
            bad_code(made.listener.port)
        before = rss_bytes()
        deadline = time.monotonic() + 120
        done = 0

        def hammer() -> int:
            count = 0
            while count < 2500 and time.monotonic() < deadline:
                bad_code(made.listener.port)
                count += 1
            return count

        with ThreadPoolExecutor(4) as pool:
            done = sum(future.result() for future in [pool.submit(hammer) for _ in range(4)])
        assert done == 10_000
        assert sum(made.listener.stats.refused.values()) >= 10_000
        assert rss_bytes() - before < 32 << 20
        made.dial()
    assert sum("refused a connection" in record.message for record in caplog.records) < 200
