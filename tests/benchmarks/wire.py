"""One tensor from a dialled session to a listener in another process, against the bare socket in the same minutes.

    python tests/benchmarks/wire.py [--mib 64] [--rounds 9] [--patience 3]

Bare means the same Python primitives without us: `sendall` of a memoryview and `recv_into` a buffer that was there
before, over a TCP socket and over the standard library's `SSLSocket` (TLS 1.3). Every transfer is timed from the call
that sends to the receiver's one-byte answer (or its answering message). Bare and ours alternate, so that a noisy minute
hits both; the ratio is that of the medians. A round in which other programs took more than a tenth of a core is done
again, at most `--patience` times as many rounds in all: with fewer cores than busy programs one measures the scheduler.
Prints one JSON line with how many of the rounds were quiet. Reach: both ratios at least 0.9.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import socket
import ssl
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from guava_nb.link.dialler import dial
from guava_nb.link.listener import Listener
from guava_nb.link.session_events import MessageArrived, SessionClosed
from guava_nb.protocol.joincode import JoinCode
from guava_nb.protocol.messages import Channel, FlatTensor, Leave, SumBucket
from guava_nb.transport.certificate import self_signed_certificate

REACH = 0.9
WARM_UP = 3
PER_ROUND = 3
CLOCK_TICK_S = 0.02
ROUND_TRIPS = 300


def answer(event: object) -> None:
    """The receiving owner: answer each message, straight from the reader."""
    if isinstance(event, MessageArrived):
        event.done()
        event.session.send(Leave("got it"), Channel.CONTROL)


def serve(pipe, nbytes: int) -> None:
    """The receiving process: two listeners of ours and two bare sockets, until told to end."""
    certificate = self_signed_certificate()
    listeners = {"tls": Listener(None, answer, tls=True), "plain": Listener(None, answer, tls=False)}
    for listener in listeners.values():
        listener.start()
    bare = {name: socket.create_server(("127.0.0.1", 0)) for name in listeners}
    codes = {name: listener.join_code().encode() for name, listener in listeners.items()}
    pipe.send((codes, {name: sock.getsockname()[1] for name, sock in bare.items()}))
    taken = {name: bare[name].accept()[0] for name in ("plain", "tls")}
    taken["tls"] = certificate.server_context().wrap_socket(taken["tls"], server_side=True)
    view = memoryview(bytearray(nbytes))
    pipe.send("ready")
    while (name := pipe.recv()) is not None:
        receive_bare(taken[name], view)
    for listener in listeners.values():
        listener.close()


def receive_bare(sock: socket.socket, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += sock.recv_into(view[done:])
    sock.sendall(b"k")


def connect_bare(name: str, port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if name == "plain":
        return sock
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(sock)


class Ours:
    """A dialled session that sends and waits for the answer."""

    def __init__(self, code: str) -> None:
        self.answers: queue.SimpleQueue = queue.SimpleQueue()
        self.session = dial(JoinCode.decode(code), self._take)

    def _take(self, event: object) -> None:
        if isinstance(event, MessageArrived):
            event.done()
        if isinstance(event, (MessageArrived, SessionClosed)):
            self.answers.put(event)

    def move(self, tensor: memoryview) -> None:
        record = SumBucket(
            run_id="", generation=0, step=0, bucket=0, present=b"", tensor=FlatTensor("uint8", len(tensor))
        )
        self.session.send(record, Channel.GRADIENT, [tensor])
        assert isinstance(self.answers.get(timeout=60), MessageArrived)

    def round_trip(self) -> None:
        self.session.send(Leave("hello"), Channel.CONTROL)
        assert isinstance(self.answers.get(timeout=60), MessageArrived)


def timed(action: Callable[[], None], times: int = 1) -> float:
    """Seconds per call."""
    started = time.perf_counter()
    for _ in range(times):
        action()
    return (time.perf_counter() - started) / times


class Watch:
    """Tells whether anybody but the two of us used the processor."""

    def __init__(self, receiver: psutil.Process) -> None:
        self._ours = (psutil.Process(), receiver)
        self._started = time.perf_counter()
        self._before = self._others_s()

    def _others_s(self) -> float:
        everybody = psutil.cpu_times()
        busy_s = sum(everybody) - everybody.idle - getattr(everybody, "iowait", 0.0)
        return busy_s - sum(sum(process.cpu_times()[:2]) for process in self._ours)

    def was_quiet(self) -> bool:
        others_s = self._others_s() - self._before
        return others_s < 0.1 * (time.perf_counter() - self._started) + CLOCK_TICK_S


def measure(
    name: str,
    pipe,
    code: str,
    bare: socket.socket,
    tensor: memoryview,
    receiver: psutil.Process,
    rounds: int,
    patience: int,
) -> dict[str, float]:
    ours = Ours(code)

    def move_bare() -> None:
        pipe.send(name)
        bare.sendall(tensor)
        assert bare.recv(1) == b"k"

    actions = {"ours": lambda: ours.move(tensor), "bare": move_bare}
    for action in actions.values():
        timed(action, WARM_UP)
    quiet, disturbed = [], []
    while len(quiet) < rounds and len(quiet) + len(disturbed) < patience * rounds:
        watch = Watch(receiver)
        pair = {kind: timed(action, PER_ROUND) for kind, action in actions.items()}
        (quiet if watch.was_quiet() else disturbed).append(pair)
    kept = quiet + disturbed[: rounds - len(quiet)]
    trips = [timed(ours.round_trip) for _ in range(ROUND_TRIPS)]
    ours.session.close()
    bare.close()
    gigabytes = len(tensor) / 1e9
    ours_s, bare_s = (statistics.median(pair[kind] for pair in kept) for kind in ("ours", "bare"))
    return {
        f"{name}_ratio": round(bare_s / ours_s, 3),
        f"{name}_quiet_rounds": len(quiet),
        f"{name}_gb_per_s": round(gigabytes / ours_s, 3),
        f"bare_{name}_gb_per_s": round(gigabytes / bare_s, 3),
        f"{name}_round_trip_us": round(1e6 * statistics.median(trips), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--patience", type=int, default=3)
    arguments = parser.parse_args()
    nbytes = arguments.mib << 20
    pipe, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, nbytes), daemon=True)
    process.start()
    codes, ports = pipe.recv()
    receiver = psutil.Process(process.pid)
    tensor = memoryview(bytearray(nbytes))
    result: dict[str, object] = {"benchmark": "wire", "mib": arguments.mib, "rounds": arguments.rounds, "reach": REACH}
    bare = {name: connect_bare(name, ports[name]) for name in ("plain", "tls")}
    assert pipe.recv() == "ready"
    for name, sock in bare.items():
        measured = measure(name, pipe, codes[name], sock, tensor, receiver, arguments.rounds, arguments.patience)
        result.update(measured)
    pipe.send(None)
    process.join(30)
    result["reached"] = all(float(str(result[f"{name}_ratio"])) >= REACH for name in bare)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
