"""What WebSocketStream makes of a peer that keeps the rules in another way, and of one that does not."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode

from guava_nb.errors import FrameTooLarge, LinkBroken, LinkClosed, LinkTimeout, RemoteProtocolError
from guava_nb.transport.http_answers import Answer, read_answer, refusal
from guava_nb.transport.memory import MemoryStream, memory_pair
from guava_nb.transport.websocket import WebSocketStream, _pieces, begins_http
from guava_nb.tunnels.ngrok_errors import sentence

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def ends() -> Iterator[tuple[WebSocketStream, MemoryStream]]:
    """A server's stream, and the raw bytes of a client that has shaken hands."""
    ours, raw = memory_pair()
    with ThreadPoolExecutor(1) as pool:
        client = pool.submit(WebSocketStream.over_client, raw, "example.org", 80, False)
        server = WebSocketStream.over_server(ours)
        client.result()
    yield server, raw
    raw.close()
    ours.close()


def frame(opcode: Opcode, data: bytes, fin: bool = True, mask: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=mask)


def read(stream: WebSocketStream | MemoryStream, count: int) -> bytes:
    stream.set_deadline(10)
    data = b""
    while len(data) < count:
        view = memoryview(bytearray(count - len(data)))
        got = stream.recv_into(view)
        assert got, data
        data += view[:got]
    return data


def test_fragments_are_bytes_like_any_other(ends) -> None:
    server, raw = ends
    raw.send_all(
        [frame(Opcode.BINARY, b"ab", fin=False), frame(Opcode.PING, b"now"), frame(Opcode.CONT, b"", fin=False)]
    )
    raw.send_all([frame(Opcode.CONT, b"cd"), frame(Opcode.BINARY, b""), frame(Opcode.BINARY, b"e")])
    assert read(server, 5) == b"abcde"
    assert read(raw, 5) == frame(Opcode.PONG, b"now", mask=False)


def test_a_ping_is_answered_while_a_sender_holds_the_stream(ends) -> None:
    server, raw = ends
    with server._sending:
        raw.send_all([frame(Opcode.PING, b"1"), frame(Opcode.BINARY, b"x")])
        assert read(server, 1) == b"x"
    server.send_all([b"y"])
    assert read(raw, 6) == frame(Opcode.PONG, b"1", mask=False) + frame(Opcode.BINARY, b"y", mask=False)


def test_a_close_ends_the_stream_and_is_answered(ends) -> None:
    server, raw = ends
    raw.send_all([frame(Opcode.BINARY, b"last"), frame(Opcode.CLOSE, b"\x03\xe8")])
    assert read(server, 4) == b"last"
    assert server.recv_into(memoryview(bytearray(4))) == 0
    assert server.recv_into(memoryview(bytearray(4))) == 0
    assert read(raw, 4) == frame(Opcode.CLOSE, b"\x03\xe8", mask=False)
    with pytest.raises(LinkBroken, match="closed the WebSocket"):
        server.send_all([b"late"])


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (frame(Opcode.BINARY, b"bare", mask=False), "incorrect masking"),
        (frame(Opcode.TEXT, b"hello"), "sent text"),
        (b"\x82\xff" + b"\x7f" + bytes(7) + bytes(4), "rules of WebSocket"),
        (b"\x83\x80" + bytes(4), "invalid opcode"),
        (b"\xc2\x80" + bytes(4), "reserved bits"),
        (frame(Opcode.CONT, b"of nothing"), "unexpected continuation"),
    ],
    ids=["unmasked", "text", "huge", "opcode", "reserved", "continuation"],
)
def test_a_broken_rule_is_named_and_ends_it(ends, sent: bytes, why: str) -> None:
    server, raw = ends
    raw.send_all([sent])
    with pytest.raises(RemoteProtocolError, match=why):
        server.recv_into(memoryview(bytearray(8)))
    assert server.recv_into(memoryview(bytearray(8))) == 0


def test_fragments_without_end_take_no_memory_without_end(ends) -> None:
    server, raw = ends
    raw.send_all([frame(Opcode.BINARY if not n else Opcode.CONT, bytes(1000), fin=False) for n in range(300)])
    with pytest.raises(RemoteProtocolError, match="limit"):
        while True:
            server.recv_into(memoryview(bytearray(1000)))


def test_pings_and_empty_frames_are_no_sign_of_life(ends) -> None:
    """Anybody on the way sends them: a deadline that they could move would never come."""
    server, raw = ends
    stop = threading.Event()

    def nag() -> None:
        with contextlib.suppress(LinkClosed, LinkBroken):
            while not stop.wait(0.02):
                raw.send_all([frame(Opcode.PING, b""), frame(Opcode.BINARY, b"")])
                raw.set_deadline(1)
                raw.recv_into(memoryview(bytearray(64)))

    with ThreadPoolExecutor(1) as pool:
        nagging = pool.submit(nag)
        server.set_deadline(0.3)
        with pytest.raises(LinkTimeout):
            server.recv_into(memoryview(bytearray(8)))
        stop.set()
        nagging.result(10)
    raw.send_all([frame(Opcode.BINARY, b"x")])
    assert read(server, 1) == b"x"


@pytest.mark.parametrize("capacity_bytes", [64 << 10, 1 << 20])
def test_pings_whose_answers_nobody_reads_end_it(capacity_bytes: int) -> None:
    """Also where more answers are owed at once than there is room for: the reader does not wait for that."""
    ours, raw = memory_pair(capacity_bytes=capacity_bytes)
    with ThreadPoolExecutor(1) as pool:
        client = pool.submit(WebSocketStream.over_client, raw, "example.org", 80, False)
        server = WebSocketStream.over_server(ours)
        client.result()
        pinging = pool.submit(lambda: [raw.send_all([frame(Opcode.PING, bytes(125)) * 100]) for _ in range(100)])
        try:
            with pytest.raises(RemoteProtocolError, match="does not read the answers"):
                server.recv_into(memoryview(bytearray(8)))
        finally:
            server.close()  # or the pool would wait for the one that pings, whatever came out
        with pytest.raises(LinkBroken):
            pinging.result()


def dialled_to(answer: bytes) -> WebSocketStream:
    here, there = memory_pair(4 << 20)
    there.send_all([answer])
    try:
        return WebSocketStream.over_client(here, "relay.example.org", 443, True)
    finally:
        there.close()
        here.close()


def test_the_request_is_no_browsers_and_names_the_host() -> None:
    here, there = memory_pair()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(WebSocketStream.over_client, here, "2001:db8::7", 8080, False)
        view = memoryview(bytearray(4096))
        request = bytes(view[: there.recv_into(view)]).decode()
        there.close()
        with pytest.raises(LinkBroken, match="closed the connection during the WebSocket handshake"):
            asking.result()
    assert request.startswith("GET /guava HTTP/1.1\r\n")
    assert "Host: [2001:db8::7]:8080\r\n" in request
    assert "ngrok-skip-browser-warning: 1\r\n" in request
    assert "User-Agent: guava-nb/" in request


@pytest.mark.parametrize(
    ("answer", "kind", "why"),
    [
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n", LinkBroken, "nothing listens behind"),
        (b"SSH-2.0-OpenSSH_9.2\r\n" + bytes(20), RemoteProtocolError, "does not speak WebSocket"),
        (b"HTTP/1.0 502 Bad Gateway\r\n\r\nsorry", LinkBroken, "nothing listens behind"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", RemoteProtocolError, "web page"),
        (b"HTTP/1.1 101 Yes\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n", RemoteProtocolError, "(?i)accept"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200_000, RemoteProtocolError, "a web page answers"),
        (b"HTTP/1.1 101 Yes\r\n" + b"A: b\r\n" * 200_000, RemoteProtocolError, "headers"),
        (b"HTTP/1.1 200 OK\r\nA: " + b"x" * (2 << 20), RemoteProtocolError, "a web page answers"),
    ],
    ids=["gateway", "ssh", "old gateway", "page", "unproved", "many headers", "headers", "long header"],
)
def test_an_answer_that_is_not_101(answer: bytes, kind: type[Exception], why: str) -> None:
    with pytest.raises(kind, match=why):
        dialled_to(answer)


def test_no_answer_ends_by_the_deadline() -> None:
    here, there = memory_pair()
    there.send_all([b"HTTP/1.1 503 Busy\r\nContent-Length: 9\r\n\r\nwai"])
    with pytest.raises(LinkBroken, match="503"):
        WebSocketStream.over_client(here, "relay.example.org", 443, True, 0.05)
    with pytest.raises(LinkTimeout, match=r"relay\.example\.org:443 was not done within 0\.05 s"):
        here, _there = memory_pair()
        WebSocketStream.over_client(here, "relay.example.org", 443, True, 0.05)


def test_a_request_without_end_is_cut_off() -> None:
    here, there = memory_pair(64 << 10)
    there.send_all([b"GET /guava HTTP/1.1\r\n" + b"A: b\r\n" * 5000])
    with pytest.raises((FrameTooLarge, RemoteProtocolError)):
        WebSocketStream.over_server(here)


def answered(status: int, head: str, body: str, version: str = "1.1") -> Answer:
    answer = read_answer(
        f"HTTP/{version} {status} Whatever\r\nDate: now\r\n{head}\r\n\r\n{body}".encode("latin-1", "replace")
    )
    assert answer is not None and answer.status == status
    return answer


@pytest.mark.parametrize(
    ("status", "head", "body", "kind", "why"),
    [
        (404, "Ngrok-Error-Code: ERR_NGROK_3200", "<html>", LinkBroken, "err_ngrok_3200 (ERR_NGROK_3200)"),
        (502, "", "<pre>ERR_NGROK_8012</pre>", LinkBroken, "err_ngrok_8012"),
        (402, "ngrok-error-code:ERR_NGROK_727", "ERR_NGROK_1", RemoteProtocolError, "err_ngrok_727"),
        (530, "Server: cloudflare", "error code: 1033", LinkBroken, "1033: its tunnel is closed"),
        (429, "", "error code: 1015", LinkBroken, "1015: Cloudflare allows no more"),
        (530, "", "error code: 1999", LinkBroken, "530: its tunnel is closed"),
        (401, "", "", RemoteProtocolError, "login"),
        (403, "", "", RemoteProtocolError, "forbids"),
        (407, "", "", RemoteProtocolError, "HTTP proxy"),
        (302, "Location: https://login.hotel.example", "", RemoteProtocolError, "login page"),
        (404, "", "", RemoteProtocolError, "no guava_nb"),
        (418, "", "", RemoteProtocolError, "418"),
        (599, "", "", LinkBroken, "599"),
    ],
)
def test_each_answer_has_its_sentence(status: int, head: str, body: str, kind: type[Exception], why: str) -> None:
    error = refusal("a.example:443", answered(status, head, body))
    assert type(error) is kind
    assert why in str(error)
    assert str(error).startswith("a.example:443 answered ")


def test_a_code_of_ngrok_is_told_by_who_knows_it() -> None:
    error = refusal("a.example:443", answered(404, "ngrok-error-code: ERR_NGROK_3200", ""), sentence)
    assert "the endpoint is offline" in str(error) and "(ERR_NGROK_3200)" in str(error)


@given(st.integers(200, 599), st.text(max_size=80), st.text(max_size=200))
def test_any_answer_has_one_line(status: int, head: str, body: str) -> None:
    text = str(refusal("a.example:443", answered(status, head, body)))
    assert "\n" not in text
    assert len(text) < 300


@given(st.binary(max_size=200))
def test_anything_may_be_heard(heard: bytes) -> None:
    answer = read_answer(heard)
    assert answer is None or heard.startswith(b"HTTP/1.")


@given(st.lists(st.integers(0, 400_000), max_size=8))
def test_pieces_keep_every_byte_and_none_is_large(sizes: list[int]) -> None:
    views = [memoryview(bytes([n % 251]) * size) for n, size in enumerate(sizes) if size]
    pieces = list(_pieces(views))
    assert b"".join(pieces) == b"".join(views)
    assert all(0 < len(piece) <= 128 << 10 for piece in pieces)
    assert len(pieces) <= sum(map(len, views)) // (64 << 10) + 1


def test_the_first_bytes_tell_http_from_ours_and_tls() -> None:
    assert begins_http(b"GET ")
    assert begins_http(b"POST")
    assert not begins_http(b"GUAV")
    assert not begins_http(b"\x16\x03\x01\x02")
