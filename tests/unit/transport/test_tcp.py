"""Connecting, listening, socket options, and what forked children keep. Real loopback sockets, no waiting."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator

import pytest

from guava_nb.errors import ConfigError, LinkBroken, LinkTimeout
from guava_nb.transport import tcp
from guava_nb.transport.options import SocketOptions
from guava_nb.transport.tcp import TcpStream, connect, listen, name_of
from tests.support.links import own_port

pytestmark = pytest.mark.timeout(30)


@contextlib.contextmanager
def listening(host: str = "127.0.0.1", port: int = 0, options: SocketOptions | None = None) -> Iterator[list]:
    sockets = listen(host, port, options)
    try:
        yield sockets
    finally:
        for sock in sockets:
            sock.close()


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as sock:
        sock.bind(("::1", 0))
        return True
    return False


def test_localhost_is_both_families_on_one_port() -> None:
    with listening("localhost") as sockets:
        port = sockets[0].getsockname()[1]
        assert {sock.getsockname()[1] for sock in sockets} == {port}
        assert len(sockets) == (2 if has_ipv6() else 1)
        for host in ["127.0.0.1", "localhost", *(["::1"] if has_ipv6() else [])]:
            stream = connect(host, port, timeout_s=5)
            assert stream.peer.endswith(f":{port}")
            stream.close()


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_a_port_taken_on_ipv6_only_is_not_chosen() -> None:
    with listening("localhost") as sockets, pytest.raises(ConfigError, match="taken"):
        listen("::1", sockets[0].getsockname()[1])


def test_loopback_only_unless_told_otherwise() -> None:
    with listening() as sockets:
        assert [sock.getsockname()[0] for sock in sockets] == ["127.0.0.1"]
    with listening("") as sockets:
        assert "0.0.0.0" in [sock.getsockname()[0] for sock in sockets]


def test_a_taken_port_names_its_owner() -> None:
    with listening() as sockets:
        port = sockets[0].getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127.0.0.1 is taken.*process {os.getpid()}"):
            listen("127.0.0.1", port)


def test_the_port_of_a_closed_listener_is_free_at_once() -> None:
    port = own_port()
    with listening(port=port) as sockets:
        stream = connect("127.0.0.1", port)
        accepted, _ = sockets[0].accept()
        accepted.close()  # the listener's side closes first and stays in TIME_WAIT
        stream.close()
    with listening(port=port):
        pass


def test_listen_refuses_foreign_addresses() -> None:
    with pytest.raises(ConfigError, match="cannot listen on 203.0.113.7:0"):
        listen("203.0.113.7")
    with pytest.raises(ConfigError, match="no such name"):
        listen("no-such-host.invalid")


def test_connect_refused_names_the_address() -> None:
    with listening() as sockets:
        port = sockets[0].getsockname()[1]
    with pytest.raises(LinkBroken, match=rf"127.0.0.1:{port}: connection refused"):
        connect("127.0.0.1", port)
    with pytest.raises(LinkBroken, match="not known here"):
        connect("no-such-host.invalid", 1)


def test_connect_times_out() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # a queue of one: whoever comes later waits
        waiting = []
        try:
            with pytest.raises(LinkTimeout, match=r"did not answer within 0\.2 s"):
                for _ in range(8):
                    waiting.append(connect("127.0.0.1", full.getsockname()[1], timeout_s=0.2))
        finally:
            for stream in waiting:
                stream.close()


def test_dialling_oneself_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    class Bound(socket.socket):
        def connect(self, address: tuple[str, int]) -> None:
            self.bind(address)
            super().connect(address)

    monkeypatch.setattr("guava_nb.transport.tcp.socket.socket", Bound)
    with pytest.raises(LinkBroken, match="refused"):
        connect("127.0.0.1", port, timeout_s=2)


def test_options_reach_the_socket() -> None:
    options = SocketOptions(buffer_bytes=256 << 10, unsent_bytes=64 << 10)
    with listening(options=options) as sockets:
        stream = connect("127.0.0.1", sockets[0].getsockname()[1], options=options)
        sock = stream._sock
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) >= 128 << 10
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 64 << 10
        stream.close()


def test_a_buffer_beyond_the_systems_cap_is_no_error() -> None:
    options = SocketOptions(buffer_bytes=1 << 30)
    with listening(options=options) as sockets:
        connect("127.0.0.1", sockets[0].getsockname()[1], options=options).close()


def test_names() -> None:
    assert name_of(("10.0.0.1", 80)) == "10.0.0.1:80"
    assert name_of(("::1", 80, 0, 0)) == "[::1]:80"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forked_children_do_not_hold_sockets_open() -> None:
    with listening() as sockets:
        ours = connect("127.0.0.1", sockets[0].getsockname()[1])
        theirs = TcpStream(sockets[0].accept()[0])
        hold, release = os.pipe()
        report, tell = os.pipe()
        child = os.fork()
        if child == 0:  # the child lives until it is released, like a DataLoader worker
            os.write(tell, b"closed" if ours._sock.fileno() == theirs._sock.fileno() == -1 else b"open  ")
            os.close(release)
            os.read(hold, 1)
            os._exit(0)
        try:
            assert os.read(report, 6) == b"closed"
            theirs.send_all([b"still open in the parent"])
            assert ours.recv_into(memoryview(bytearray(64))) > 0
            ours.close()
            assert theirs.recv_into(memoryview(bytearray(64))) == 0
            port = sockets[0].getsockname()[1]
            for sock in sockets:
                sock.close()
            with pytest.raises(LinkBroken, match="refused"):
                connect("127.0.0.1", port)
        finally:
            os.close(release)
            os.waitpid(child, 0)
            for fd in (hold, report, tell):
                os.close(fd)
            theirs.close()


@pytest.mark.parametrize(
    ("host", "number", "words"),
    [
        ("127.0.0.1", errno.ECONNREFUSED, "this machine itself, .*guava_up --tunnel"),
        ("192.0.2.1", errno.ECONNREFUSED, "no session listens at this port any more"),
        ("192.0.2.1", errno.EHOSTUNREACH, "no way leads there from this machine: is it online"),
        ("192.0.2.1", errno.ENETUNREACH, "no way leads there"),
    ],
)
def test_what_is_in_the_way_is_told_by_what_the_system_says(
    monkeypatch: pytest.MonkeyPatch, host: str, number: int, words: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tcp, "_connect_one", fail)
    with pytest.raises(LinkBroken, match=words):
        connect(host, 9)


def test_the_kernel_is_asked_once_for_a_few_short_sends_and_again_after_much(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    writable = tcp._writable
    monkeypatch.setattr(tcp, "_writable", lambda sock: asked.append(writable(sock)) or asked[-1])  # type: ignore[func-returns-value]
    with listening() as sockets:
        stream = connect("127.0.0.1", sockets[0].getsockname()[1], timeout_s=5)
        peer = sockets[0].accept()[0]
        for _ in range(8):
            assert stream.can_send_now()
            stream.send_all([b"short"])
        assert asked == [True]  # a short send counts as half a kilobyte of the four
        assert stream.can_send_now() and asked == [True, True]
        stream.send_all([bytes(5000)])
        assert stream.can_send_now() and asked == [True] * 3
        assert stream.can_send_now() and asked == [True] * 3  # nothing was sent since
        stream.close()
        peer.close()
