"""One suite over every stream: memory, TCP over IPv4 and IPv6, TLS and WebSocket over either, TLS inside WebSocket."""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from guava_nb.errors import LinkBroken, LinkClosed, LinkError, LinkTimeout
from guava_nb.transport.certificate import self_signed_certificate
from guava_nb.transport.memory import memory_pair
from guava_nb.transport.stream import Stream
from guava_nb.transport.tcp import TcpStream, connect, listen
from guava_nb.transport.tls import TlsStream
from guava_nb.transport.websocket import WebSocketStream

Pair = tuple[Stream, Stream]


def tcp_pair(host: str) -> Pair:
    try:
        listeners = listen(host)
    except Exception as problem:  # a machine without IPv6
        pytest.skip(f"cannot listen on {host}: {problem}")
    dialled = connect(host, listeners[0].getsockname()[1])
    accepted, _ = listeners[0].accept()
    for listener in listeners:
        listener.close()
    return dialled, TcpStream(accepted)


def encrypted(pair: Pair) -> Pair:
    certificate = self_signed_certificate()
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(TlsStream.over_server, pair[1], certificate.server_context())
        client = TlsStream.over_client(pair[0], certificate.fingerprint16)
        return client, server.result()


def in_websocket(pair: Pair) -> Pair:
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(WebSocketStream.over_server, pair[1])
        client = WebSocketStream.over_client(pair[0], "127.0.0.1", 80, secure=False)
        return client, server.result()


MAKERS: dict[str, Callable[[], Pair]] = {
    "memory": memory_pair,
    "tcp4": lambda: tcp_pair("127.0.0.1"),
    "tcp6": lambda: tcp_pair("::1"),
    "tls-tcp": lambda: encrypted(tcp_pair("127.0.0.1")),
    "tls-memory": lambda: encrypted(memory_pair()),
    "ws-tcp": lambda: in_websocket(tcp_pair("127.0.0.1")),
    "ws-memory": lambda: in_websocket(memory_pair()),
    "tls-ws-tcp": lambda: encrypted(in_websocket(tcp_pair("127.0.0.1"))),
    "tls-ws-tls-tcp": lambda: encrypted(in_websocket(encrypted(tcp_pair("127.0.0.1")))),
}


@pytest.fixture(params=sorted(MAKERS))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = MAKERS[request.param]()
    yield made
    for stream in made:
        stream.close()


def read_exactly(stream: Stream, count: int, most: int = 1 << 20) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    done = 0
    while done < count:
        got = stream.recv_into(view[done : done + most])
        if not got:
            raise EOFError(done)
        done += got
    return bytes(data)


def noise(count: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(count)


def test_bytes_arrive_in_order_however_they_are_cut(pair: Pair) -> None:
    rng = random.Random(1)
    data = noise(3_000_000)
    cuts = sorted(rng.randrange(len(data)) for _ in range(300))
    parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(lambda: [pair[0].send_all(parts[i : i + 7]) for i in range(0, len(parts), 7)])
        got = b""
        while len(got) < len(data):
            got += read_exactly(pair[1], min(rng.randrange(1, 100_000), len(data) - len(got)))
        sent.result()
    assert got == data


def test_single_bytes_and_empty_buffers(pair: Pair) -> None:
    pair[1].send_all([b"", b"a", bytearray(), memoryview(b"bc"), b""])
    assert read_exactly(pair[0], 3, most=1) == b"abc"
    pair[1].send_all([])
    pair[1].send_all([b"d"])
    assert read_exactly(pair[0], 1) == b"d"


def test_views_of_any_item_type(pair: Pair) -> None:
    pair[0].send_all([memoryview(bytes(range(16))).cast("I", (2, 2))])
    assert read_exactly(pair[1], 16) == bytes(range(16))


def test_more_buffers_than_one_system_call_takes(pair: Pair) -> None:
    pair[0].send_all([bytes([i % 251]) for i in range(5000)])
    assert read_exactly(pair[1], 5000) == bytes(i % 251 for i in range(5000))


def test_both_directions_at_once_with_several_writers(pair: Pair) -> None:
    size, rounds = 200_000, 40
    locks = [threading.Lock(), threading.Lock()]

    def write(side: int, writer: int) -> None:
        for index in range(rounds // 2):
            with locks[side]:
                pair[side].send_all([noise(size, writer * 1000 + index)])

    def digest(side: int) -> list[str]:
        return sorted(hashlib.sha256(read_exactly(pair[side], size)).hexdigest() for _ in range(rounds))

    expected = sorted(hashlib.sha256(noise(size, w * 1000 + i)).hexdigest() for w in (0, 1) for i in range(rounds // 2))
    with ThreadPoolExecutor(6) as pool:
        writers = [pool.submit(write, side, writer) for side in (0, 1) for writer in (0, 1)]
        readers = [pool.submit(digest, side) for side in (0, 1)]
        assert [reader.result() for reader in readers] == [expected, expected]
        for writer in writers:
            writer.result()


def test_deadline(pair: Pair) -> None:
    pair[0].set_deadline(0.05)
    started = time.monotonic()
    with pytest.raises(LinkTimeout, match="nothing came from"):
        pair[0].recv_into(memoryview(bytearray(8)))
    assert 0.03 <= time.monotonic() - started < 10
    pair[1].send_all([b"later"])
    assert read_exactly(pair[0], 5) == b"later"
    pair[0].set_deadline(None)
    timer = threading.Timer(0.1, pair[1].send_all, [[b"late"]])
    timer.start()
    assert read_exactly(pair[0], 4) == b"late"
    timer.join()


def test_peer_closes(pair: Pair) -> None:
    pair[0].send_all([b"last"])
    pair[0].close()
    assert read_exactly(pair[1], 4) == b"last"
    assert pair[1].recv_into(memoryview(bytearray(8))) == 0
    with pytest.raises(LinkBroken):
        for _ in range(100):
            pair[1].send_all([noise(100_000)])


def test_own_close(pair: Pair) -> None:
    pair[0].close()
    pair[0].close()
    pair[0].shutdown()
    with pytest.raises(LinkClosed):
        pair[0].recv_into(memoryview(bytearray(8)))
    with pytest.raises(LinkClosed):
        pair[0].send_all([b"x"])
    assert pair[0].can_send_now()


def test_shutdown_wakes_a_waiting_reader(pair: Pair) -> None:
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(pair[0].recv_into, memoryview(bytearray(8)))
        with contextlib.suppress(TimeoutError):
            reader.result(timeout=0.1)
        pair[0].shutdown()
        with pytest.raises(LinkClosed):
            reader.result(timeout=10)


def test_shutdown_wakes_a_waiting_writer(pair: Pair) -> None:
    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(pair[0].send_all, [bytes(64 << 20)])
        assert_eventually(lambda: not pair[0].can_send_now())
        pair[0].shutdown()
        with pytest.raises(LinkError):
            writer.result(timeout=10)


def test_can_send_now_until_the_peer_stops_reading(pair: Pair) -> None:
    assert pair[0].can_send_now()
    sent = 0
    while pair[0].can_send_now():
        pair[0].send_all([bytes(8000)])
        sent += 8000
        assert sent < 64 << 20
    assert read_exactly(pair[1], sent) == bytes(sent)
    assert_eventually(pair[0].can_send_now)


def test_names(pair: Pair) -> None:
    assert pair[0].local == pair[1].peer
    assert pair[0].peer == pair[1].local


def assert_eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_cut_connection_is_broken_or_ended_never_a_strange_error() -> None:
    dialled, accepted = tcp_pair("127.0.0.1")
    client, server = encrypted((dialled, accepted))
    accepted._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    accepted._sock.close()
    with pytest.raises(LinkBroken):
        client.recv_into(memoryview(bytearray(8)))
    client.close()
    server.close()
