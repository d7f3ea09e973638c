"""Whether one machine can reach another: a listener that answers only those who hold its secret, and the dialling.

Nothing is kept: a connection is proved from both sides and closed.
"""

from __future__ import annotations

import contextlib
import ipaddress
import selectors
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil

from guava_nb.errors import ConfigError, GuavaError, LinkTimeout, ProtocolError
from guava_nb.link.handshake import Deadline, prove
from guava_nb.link.unauthenticated import Unauthenticated
from guava_nb.protocol.handshake_proof import DiallerProof, ListenerProof
from guava_nb.protocol.messages import ProbeAddress, ProbeAnswer, ProbeTarget
from guava_nb.transport.stream import Stream
from guava_nb.transport.tcp import TcpStream, connect, listen

__all__ = ["ReachListener", "dial_all", "interface_addresses"]

#: Who has connected and proved nothing yet; more than that are strangers.
SEATS = 64
#: For the proof of one connection.
PROVE_S = 1.0
#: Threads that dial; each address has one as long as there are no more.
DIALLERS = 128


def interface_addresses(loopback: bool) -> list[tuple[str, str]]:
    """Return (interface, address) for every interface that is up.

    One address each, the first IPv4 one if there is any: gloo and NCCL are told an interface, and this is the address that
    they take of it. IPv6 addresses that are good on their link only need a scope, which cannot be passed on.
    """
    states, found = psutil.net_if_stats(), []
    for name, entries in psutil.net_if_addrs().items():
        if name not in states or not states[name].isup:
            continue
        usable = [entry.address for entry in entries if _usable(entry.family, entry.address)]
        if usable and (loopback or not ipaddress.ip_address(usable[0]).is_loopback):
            found.append((name, usable[0]))
    return found


def _usable(family: int, address: str) -> bool:
    if family == socket.AF_INET:
        return True
    return family == socket.AF_INET6 and "%" not in address and not ipaddress.ip_address(address).is_link_local


class ReachListener:
    """Listens on this machine's addresses until it is closed, on threads of its own.

    Args:
        secret: who dials must prove to hold it.
        loopback: on the loopback too.

    Attributes:
        addresses: where it listens.

    Raises:
        ConfigError: not one address can be listened on.
    """

    def __init__(self, secret: bytes, loopback: bool) -> None:
        self._secret, self._guests = secret, Unauthenticated(SEATS)
        self._sockets: list[socket.socket] = []
        self.addresses: tuple[ProbeAddress, ...] = ()
        for interface, address in interface_addresses(loopback):
            with contextlib.suppress(ConfigError):  # an address that is not ready yet: it cannot be dialled
                sock = listen(address)[0]
                self._sockets.append(sock)
                self.addresses += (ProbeAddress(interface, address, sock.getsockname()[1]),)
        if not self._sockets:
            raise ConfigError("no network interface of this machine has an address that other machines could dial")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="guava-reach", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; may be called again."""
        self._ended.set()
        self._thread.join(5.0)

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            for sock in self._sockets:
                sock.setblocking(False)
                selector.register(sock, selectors.EVENT_READ)
            while not self._ended.is_set():
                for key, _ in selector.select(0.1):
                    self._take(key.fileobj)
        for sock in self._sockets:
            sock.close()

    def _take(self, sock: object) -> None:
        assert isinstance(sock, socket.socket)
        seat = self._guests.sit(0.0)
        try:
            connection, _ = sock.accept()
        except OSError:  # gone again
            connection = None
        if seat is None or connection is None:
            if connection is not None:
                connection.close()
            self._guests.leave(-1 if seat is None else seat)
            return
        stream = TcpStream(connection)
        self._guests.name(seat, stream)
        threading.Thread(target=self._answer, args=(seat, stream), name="guava-reach-proof", daemon=True).start()

    def _answer(self, seat: int, stream: Stream) -> None:
        with contextlib.suppress(GuavaError):  # a stranger: it learns nothing
            prove(stream, ListenerProof(self._secret, b""), Deadline(PROVE_S, "prove itself", "a dialler"))
        self._guests.leave(seat)
        stream.close()


def dial_all(targets: Sequence[ProbeTarget], timeout_s: float) -> tuple[ProbeAnswer, ...]:
    """Try to reach members at all of their addresses at once; takes little longer than `timeout_s` seconds."""
    pairs = [(target, address) for target in targets for address in target.addresses]
    if not pairs:
        return ()
    with ThreadPoolExecutor(min(len(pairs), DIALLERS), "guava-dial") as pool:
        problems = pool.map(lambda pair: _dial(pair[0].secret, pair[1], timeout_s), pairs)
        return tuple(
            ProbeAnswer(target.member, address.address, problem)
            for (target, address), problem in zip(pairs, problems, strict=True)
        )


def _dial(secret: bytes, where: ProbeAddress, timeout_s: float) -> str:
    """Return "" if the listener there holds the secret, else what was in the way."""
    try:
        ipaddress.ip_address(where.address)  # a name would be looked up, in its own time
        stream = connect(where.address, where.port, timeout_s)
        try:
            prove(stream, DiallerProof(secret, b""), Deadline(timeout_s, "prove itself", "the listener"))
        finally:
            stream.close()
    except LinkTimeout:
        return "timed out"
    except ProtocolError:  # the same address means another machine there
        return "another program answers there"
    except GuavaError as error:
        cause = error.__cause__
        return (cause.strerror or str(error)).lower() if isinstance(cause, OSError) else str(error)
    except ValueError:
        return "that is no address"
    return ""
