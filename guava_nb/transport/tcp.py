"""Streams over TCP, IPv4 and IPv6: connect, listen, and the stream itself.

Sockets stay blocking: `recv_into` and `sendmsg` release the GIL and copy nothing. The receive deadline is the kernel's
own (SO_RCVTIMEO), because Python's `settimeout` would govern sending too and cost a poll for every call.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from guava_nb.errors import ConfigError, LinkBroken, LinkClosed, LinkTimeout
from guava_nb.transport.forks import close_in_children
from guava_nb.transport.options import SocketOptions
from guava_nb.transport.stream import Buffer, Stream, flatten

__all__ = ["TcpStream", "connect", "is_loopback", "listen", "look_up", "name_of"]

_MAX_BUFFERS_PER_CALL = 512  # below IOV_MAX of every system we know (1024)
#: For how many bytes a "yes" of the kernel holds that it takes more, and as how many a shorter send counts: each takes some room
#: there. To ask gives the interpreter's lock away, which costs a small message more than its bytes do.
_BYTES_PER_ANSWER, _LEAST_BYTES = 4 << 10, 512
_BACKLOG = 256
_PORT_TRIES = 16
_ON_WINDOWS = os.name == "nt"
_Address = tuple[socket.AddressFamily, tuple[Any, ...]]  # its form differs between families


class TcpStream(Stream):
    """A connected TCP socket as a stream.

    Args:
        sock: connected; the stream owns it from now on.
        options: tuning that is set at once.
    """

    def __init__(self, sock: socket.socket, options: SocketOptions | None = None) -> None:
        close_in_children(sock)
        sock.settimeout(None)
        (options or SocketOptions()).apply(sock)
        self._sock = sock
        self._closed = False
        self._recv_s: float | None = None
        self._room_bytes, self._is_sending = 0, False  # what the kernel takes without being asked again
        self.local = name_of(sock.getsockname())
        try:
            self.peer = name_of(sock.getpeername())
        except OSError:
            self.peer = "a peer that left at once"

    def send_all(self, buffers: Sequence[Buffer]) -> None:
        """Send the bytes from where they lie."""
        only = buffers[0] if len(buffers) == 1 else None
        views = [memoryview(only)] if type(only) is bytes else flatten(buffers)
        self._room_bytes -= max(_LEAST_BYTES, sum(map(len, views)))
        self._is_sending = True
        try:
            if len(views) == 1:
                self._sock.sendall(views[0])
            elif hasattr(self._sock, "sendmsg"):
                _send_gathered(self._sock, views)
            else:
                for view in views:
                    self._sock.sendall(view)
        except OSError as problem:
            raise self._error("sending to", problem) from problem
        finally:
            self._is_sending = False

    def recv_into(self, view: memoryview) -> int:
        """Receive straight into `view`."""
        try:
            count = self._sock.recv_into(view)
        except OSError as problem:
            if _is_deadline(problem) and not self._closed:
                raise LinkTimeout(f"nothing came from {self.peer} for {self._recv_s:g} s") from None
            raise self._error("receiving from", problem) from problem
        if count == 0 and self._closed:
            raise LinkClosed(f"the connection to {self.peer} was closed here")
        return count

    def can_send_now(self) -> bool:
        """Ask the kernel; with TCP_NOTSENT_LOWAT it says yes only while little waits unsent. A yes holds for a few sends."""
        if self._room_bytes > 0:
            return True
        try:
            if not _writable(self._sock):
                return False
        except (OSError, ValueError):
            return True
        if not self._is_sending:  # else what goes out takes that room
            self._room_bytes = _BYTES_PER_ANSWER
        return True

    def set_deadline(self, recv_s: float | None) -> None:
        """Set the kernel's receive deadline; a wait that has begun keeps the old one."""
        self._recv_s = recv_s
        with contextlib.suppress(OSError):  # a closed socket: the next call says so
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(recv_s))

    def shutdown(self) -> None:
        """Tell peer and waiting threads that it is over."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End both directions first: with a copy open in a forked child, closing alone would end nothing."""
        self.shutdown()
        self._sock.close()

    def _error(self, doing: str, problem: OSError) -> LinkBroken | LinkClosed:
        if self._closed:
            return LinkClosed(f"the connection to {self.peer} was closed here")
        return LinkBroken(f"the connection to {self.peer} broke while {doing} it: {_reason(problem)}")


def _send_gathered(sock: socket.socket, views: list[memoryview]) -> None:
    """Send all views with as few calls as the kernel needs."""
    while views:
        sent = sock.sendmsg(views[:_MAX_BUFFERS_PER_CALL])
        done = 0
        while done < len(views) and sent >= views[done].nbytes:
            sent -= views[done].nbytes
            done += 1
        views = views[done:]
        if sent:
            views[0] = views[0][sent:]


def _writable(sock: socket.socket) -> bool:
    if _ON_WINDOWS:
        return bool(select.select([], [sock], [], 0)[1])
    # A poll object of its own for each call: sharing one between threads raises.
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    return bool(poll.poll(0))


def _timeval(seconds: float | None) -> bytes:
    micros = 0 if seconds is None else max(1000, round(seconds * 1e6))  # 0 means no deadline
    return struct.pack("I", micros // 1000) if _ON_WINDOWS else struct.pack("ll", *divmod(micros, 1_000_000))


def _is_deadline(problem: OSError) -> bool:
    # POSIX: EAGAIN. ETIMEDOUT there is a peer that stopped answering keep-alive probes: broken, not silent.
    return isinstance(problem, TimeoutError if _ON_WINDOWS else BlockingIOError)


def _reason(problem: OSError) -> str:
    return (problem.strerror or str(problem) or type(problem).__name__).lower()


def name_of(address: tuple[Any, ...]) -> str:
    """Write a socket address as "host:port", IPv6 in brackets."""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def connect(host: str, port: int, timeout_s: float = 10.0, options: SocketOptions | None = None) -> TcpStream:
    """Connect to a host name or address, over IPv6 or IPv4, whichever answers.

    Args:
        host: name or address; "localhost" tries both families.
        port: TCP port.
        timeout_s: seconds for all attempts together; looking up the name is the system's own time.
        options: socket tuning.

    Raises:
        LinkTimeout: no answer in time.
        LinkBroken: refused, unreachable, or the name is unknown.
    """
    options = options or SocketOptions()
    deadline = time.monotonic() + timeout_s
    addresses = look_up(host, port)
    problem: OSError = TimeoutError("no time left")
    for index, (family, address) in enumerate(addresses):
        share_s = (deadline - time.monotonic()) / (len(addresses) - index)
        if share_s <= 0:
            break
        try:
            return TcpStream(_connect_one(family, address, share_s, options), options)
        except OSError as error:
            problem = error
    where = name_of((host, port))
    if isinstance(problem, TimeoutError):
        raise LinkTimeout(
            f"{where} did not answer within {timeout_s:.3g} s: it is closed there, or a firewall or VPN is in between"
        ) from problem
    raise LinkBroken(f"cannot connect to {where}: {_reason(problem)}; {_what_then(host, problem)}") from problem


def _what_then(host: str, problem: OSError) -> str:
    if problem.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL):
        return "no way leads there from this machine: is it online, and in the same network or VPN?"
    if problem.errno != errno.ECONNREFUSED:
        return "the other side may be closed"
    if is_loopback(host):
        return (
            "that is this machine itself, and no session listens here: the session of this code was closed, or it is on another "
            "machine and has to be opened with %guava_up --tunnel there (where that is ssh: run the ssh command that it shows "
            "here first)"
        )
    return "that machine is there, and no session listens at this port any more: the session of this code was closed"


def is_loopback(host: str) -> bool:
    """Whether a host is the machine itself, as far as its text tells."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def look_up(host: str, port: int) -> list[_Address]:
    """Return the addresses of a host name, as socket families with what `socket.connect` takes.

    Raises:
        LinkBroken: the name is unknown, or no name server answers.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as problem:
        if isinstance(problem, socket.gaierror) and problem.errno == socket.EAI_AGAIN:
            raise LinkBroken(f"no name server answers when asked for {host!r}: is this machine online?") from problem
        raise LinkBroken(
            f"the host name {host!r} is not known here: is this machine online, and is the tunnel still open?"
        ) from problem
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _connect_one(
    family: socket.AddressFamily, address: tuple[Any, ...], timeout_s: float, options: SocketOptions
) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        options.apply_before_connect(sock)
        sock.settimeout(timeout_s)
        sock.connect(address)
        # Dialling a free local port again and again can meet itself: both ends are then one socket.
        if sock.getsockname() == sock.getpeername():
            raise ConnectionRefusedError(errno.ECONNREFUSED, "connection refused")
    except BaseException:
        sock.close()
        raise
    return sock


def listen(host: str = "127.0.0.1", port: int = 0, options: SocketOptions | None = None) -> list[socket.socket]:
    """Listen on every address of `host`, all with one port number.

    Args:
        host: "localhost" listens on IPv4 and IPv6 loopback, "" on every interface, a name or address on its own.
        port: TCP port; 0 lets the system choose one.
        options: socket tuning that accepted connections inherit.

    Raises:
        ConfigError: the port is taken (the message says by whom where that can be seen) or the address is not ours.
    """
    options = options or SocketOptions()
    for _ in range(_PORT_TRIES):
        sockets = _listen_all(host, port, options)
        if sockets:
            return sockets
    raise ConfigError(f"found no port that is free on every address of {host!r} in {_PORT_TRIES} tries; name one")


def _listen_all(host: str, port: int, options: SocketOptions) -> list[socket.socket]:
    """Listen on all addresses, or on none when the number the system chose is taken on a later address."""
    sockets: list[socket.socket] = []
    chosen = port
    for family, address in _passive_addresses(host, port):
        sock = socket.socket(family, socket.SOCK_STREAM)
        sockets.append(sock)
        try:
            _bind(sock, (address[0], chosen, *address[2:]), options)
            chosen = sock.getsockname()[1]
        except OSError as problem:
            sockets.pop().close()
            if problem.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) and sockets:
                continue  # a name with an IPv6 address on a machine without IPv6
            for opened in sockets:
                opened.close()
            if problem.errno == errno.EADDRINUSE and port == 0:
                return []
            raise ConfigError(_why_not(host, chosen, problem)) from problem
    return sockets


def _bind(sock: socket.socket, address: tuple[Any, ...], options: SocketOptions) -> None:
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    # POSIX: do not wait for connections of the last run to fade. On Windows that flag would let others take the port.
    exclusive = getattr(socket, "SO_EXCLUSIVEADDRUSE", None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR if exclusive is None else exclusive, 1)
    options.apply_before_connect(sock)
    sock.bind(address)
    sock.listen(_BACKLOG)
    close_in_children(sock)


def _passive_addresses(host: str, port: int) -> list[_Address]:
    if host == "localhost":  # some systems list only one family for it
        both = [(socket.AF_INET, ("127.0.0.1", port))]
        return [*both, (socket.AF_INET6, ("::1", port, 0, 0))] if socket.has_ipv6 else [*both]
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as problem:
        raise ConfigError(f"cannot listen on {host!r}: no such name or address on this machine") from problem
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _why_not(host: str, port: int, problem: OSError) -> str:
    where = name_of((host, port))
    if problem.errno != errno.EADDRINUSE:
        return f"cannot listen on {where}: {_reason(problem)}"
    return f"port {port} on {host or 'this machine'} is taken{_owner(port)}; choose another, or 0 for any free one"


def _owner(port: int) -> str:
    """Name the process that listens on `port`, as far as this user may see it."""
    import psutil  # only in this error path

    with contextlib.suppress(psutil.Error, OSError):
        for link in psutil.net_connections("tcp"):
            if link.status == psutil.CONN_LISTEN and link.pid and link.laddr and link.laddr.port == port:
                return f" by {psutil.Process(link.pid).name()} (process {link.pid})"
    return ""
