"""all_reduce between two workers through a hub, against bare sockets, gloo and hivemind in the same minutes.

    python tests/benchmarks/all_reduce.py [--megabytes 100] [--rounds 7] [--base PATH] [--links] [--hivemind PYTHON]

Three processes as in a real run: the hub and two workers, over loopback, once in plain TCP and once in TLS. Every round
times, one after the other, the group `guava`, a `gloo` group of the same two processes, and a bare socket (`sendall` of a
memoryview, `recv_into` a buffer that was there before; in the TLS run the standard library's `SSLSocket`) between the same
two processes that moves as many bytes as the star does: the tensor four times, two up, two down. Ratios are of medians.
For small messages: all_reduce of 4 bytes and barrier, against gloo and against a bare echo of 4 bytes over the hub's process
(up and down, a thread of `recv` and `sendall` for each worker, both workers at once).
`--base` does the same with another checkout in turn with this one, `--repeats` times each. `--links` adds a run over emulated
links of 200 Mbit/s and 50 ms round trip between each worker and the hub; its reference is bytes / bandwidth, upload and
download at the same time. `--hivemind` names a Python that has hivemind 1.1.12; two of its peers average the same tensor.

Prints one JSON line. Reach: 100 MB over TLS <= 1.2 x bare TLS, and <= 1.5 x plain on 8 cores and more; 4 bytes and barrier
over TLS <= 2 x the echo; plain <= 1.1 x bare and <= 2 x gloo; TLS <= 0.5 x hivemind; links <= 1.15 x bytes / bandwidth.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import socket
import ssl
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, os.environ.get("GUAVA_BENCHMARK_TREE") or str(Path(__file__).resolve().parents[2]))

RANKS = 2
WARM_UP = 2
SMALL_WARM_UP = 100
SMALL_CALLS, SMALL_ROUNDS = 200, 9
LINK_MBIT, LINK_ROUND_TRIP_S = 200, 0.05


def serve(pipe: Any) -> None:
    """The hub's process: a plain and a TLS listener with a relay each, until told to end."""
    from guava_nb.backend.embedded_hub import EmbeddedHub
    from guava_nb.link.listener import Listener
    from guava_nb.protocol.joincode import JoinCode

    class Hub(EmbeddedHub):
        def __init__(self, tls: bool) -> None:
            from guava_nb.hub.relay import Relay

            self.relay = Relay()
            self._listener = Listener(None, self._on_event, tls=tls)
            self._listener.start()
            self.code: JoinCode = self._listener.join_code()

    hubs = {"plain": Hub(tls=False), "tls": Hub(tls=True)}
    echoes = {name: echo_server(name == "tls") for name in hubs}
    pipe.send({name: (hub.code.encode(), echoes[name]) for name, hub in hubs.items()})
    pipe.recv()
    for hub in hubs.values():
        hub.close()


def echo_server(tls: bool) -> int:
    """Send back what comes, in a thread for each connection; returns the port."""
    server, context = socket.create_server(("127.0.0.1", 0)), server_context() if tls else None

    def answer(sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = sock if context is None else context.wrap_socket(sock, server_side=True)
        while data := stream.recv(64):
            stream.sendall(data)

    def accept() -> None:
        while True:
            threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return server.getsockname()[1]


def server_context() -> ssl.SSLContext:
    from guava_nb.transport.certificate import self_signed_certificate

    return self_signed_certificate().server_context()


def connect(port: int, tls: bool) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not tls:
        return sock
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version, context.check_hostname, context.verify_mode = ssl.TLSVersion.TLSv1_3, False, ssl.CERT_NONE
    return context.wrap_socket(sock)


def bare_pair(rank: int, port: int, tls: bool) -> socket.socket:
    if rank == 0:
        server = socket.create_server(("127.0.0.1", port))
        sock, _ = server.accept()
        server.close()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return server_context().wrap_socket(sock, server_side=True) if tls else sock
    until = time.monotonic() + 30
    while True:
        try:
            return connect(port, tls)
        except ConnectionRefusedError:
            assert time.monotonic() < until


def move_bare(rank: int, sock: socket.socket, view: memoryview) -> None:
    """The tensor four times over one socket; the receiver's one byte ends it."""
    if rank == 0:
        for _ in range(2 * RANKS):
            sock.sendall(view)
        assert sock.recv(1) == b"k"
        return
    for _ in range(2 * RANKS):
        done = 0
        while done < len(view):
            done += sock.recv_into(view[done:])
    sock.sendall(b"k")


def echo(sock: socket.socket) -> None:
    sock.sendall(b"1234")
    assert sock.recv(64)


def work(name: str, rank: int, code: str, bare_port: int, nbytes: int, rounds: int, echo_port: int, pipe: Any) -> None:
    """One worker's process; without an echo's port it times the one group only."""
    import torch
    import torch.distributed as dist

    from guava_nb.backend import end_group, init_group
    from guava_nb.backend.init_group import Dialled
    from guava_nb.protocol.joincode import JoinCode

    small, tls = bool(echo_port), JoinCode.decode(code).scheme == "tls"
    torch.set_num_threads(1)
    dialled = Dialled(JoinCode.decode(code), f"w{rank}")
    init_group(dialled.endpoint, name, rank, RANKS, [f"w{r}" for r in range(RANKS)], 120.0)
    gloo = dist.new_group(backend="gloo") if small else None
    tensor = torch.ones(nbytes // 4)
    tiny = torch.ones(1)
    view = memoryview(bytearray(nbytes))
    sock = bare_pair(rank, bare_port, tls) if small else None

    def timed(action: Callable[[], Any], times: int = 1) -> float:
        dist.barrier()
        started = time.perf_counter()
        for _ in range(times):
            action()
        return (time.perf_counter() - started) / times

    actions: dict[str, Callable[[], Any]] = {"guava": lambda: dist.all_reduce(tensor)}
    if gloo is not None and sock is not None:
        actions["gloo"] = lambda: dist.all_reduce(tensor, group=gloo)
        actions["bare"] = lambda: move_bare(rank, sock, view)
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(WARM_UP * small + rounds):
        tensor.fill_(1.0)
        for name, action in actions.items():
            took = timed(action)
            if turn >= WARM_UP * small:
                seconds[name].append(took)
    result = {name: statistics.median(values) for name, values in seconds.items()}
    if small:
        echoing = connect(echo_port, tls)
        calls: dict[str, Callable[[], Any]] = {
            "guava_small": lambda: dist.all_reduce(tiny),
            "gloo_small": lambda: dist.all_reduce(tiny, group=gloo),
            "guava_barrier": dist.barrier,
            "gloo_barrier": lambda: dist.barrier(group=gloo),
            "echo": lambda: echo(echoing),
        }
        trips: dict[str, list[float]] = {name: [] for name in calls}
        for action in calls.values():
            timed(action, SMALL_WARM_UP)
        for _ in range(SMALL_ROUNDS):
            for name, action in calls.items():
                trips[name].append(timed(action, SMALL_CALLS))
        result.update({name: statistics.median(values) for name, values in trips.items()})
    pipe.send(result)
    end_group()
    dialled.close()


def run(codes: list[str], nbytes: int, rounds: int, echo_port: int = 0) -> dict[str, float]:
    """Two workers, each with its code (its way to the hub); the slower one's seconds."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes, workers, name = [], [], f"bench-{port}"
    for rank, code in enumerate(codes):
        ours, theirs = context.Pipe()
        args = (name, rank, code, port, nbytes, rounds, echo_port, theirs)
        workers.append(context.Process(target=work, args=args, daemon=True))
        workers[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        assert pipe.poll(280), "a worker did not finish"
    results = [pipe.recv() for pipe in pipes]
    for worker in workers:
        worker.join(20)
    return {name: max(result[name] for result in results) for name in results[0]}


def run_links(code_text: str, nbytes: int) -> dict[str, float]:
    """The same over slow links: each worker behind an emulator of its own."""
    from guava_nb.protocol.joincode import JoinCode
    from tests.support.relay import Relay

    code = JoinCode.decode(code_text)
    rate = LINK_MBIT * 1e6 / 8
    with contextlib.ExitStack() as stack:
        links = [Relay(code.port, rate_bytes_s=rate, round_trip_s=LINK_ROUND_TRIP_S) for _ in range(RANKS)]
        codes = [code.with_address("127.0.0.1", stack.enter_context(link).port).encode() for link in links]
        seconds = run(codes, nbytes, rounds=1)["guava"]
    ideal = nbytes / rate
    return {"links_s": round(seconds, 3), "links_ideal_s": round(ideal, 3), "links_ratio": round(seconds / ideal, 3)}


HIVEMIND = """
import sys, threading, time, torch, hivemind
from hivemind.averaging import DecentralizedAverager
numel = int(sys.argv[1])
first = hivemind.DHT(start=True)
second = hivemind.DHT(initial_peers=first.get_visible_maddrs(), start=True)
make = lambda dht: DecentralizedAverager([torch.ones(numel)], dht, prefix="bench", target_group_size=2,
    min_matchmaking_time=0.5, request_timeout=0.3, start=True)
peers = [make(first), make(second)]
seconds = []
for _ in range(4):
    gathered = [peer.step(wait=False, scheduled_time=hivemind.get_dht_time() + 2, require_trigger=True) for peer in peers]
    time.sleep(3)
    started = time.perf_counter()
    for control in gathered:
        control.allow_allreduce()
    for control in gathered:
        control.result(timeout=60)
    seconds.append(time.perf_counter() - started)
print(sorted(seconds)[len(seconds) // 2])
"""


def run_hivemind(python: str, nbytes: int) -> float:
    done = subprocess.run(
        [python, "-c", HIVEMIND, str(nbytes // 4)], capture_output=True, text=True, timeout=200, check=True
    )
    return float(done.stdout.split()[-1])


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures of the checkout that is imported here."""
    nbytes = arguments.megabytes * 1_000_000
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    hub = context.Process(target=serve, args=(theirs,))
    hub.start()
    ways = pipe.recv()
    result: dict[str, Any] = {}
    for name, (code, echo_port) in ways.items():
        found = run([code] * RANKS, nbytes, arguments.rounds, echo_port)
        result |= {
            f"{name}_s": found["guava"],
            f"bare_{name}_s": found["bare"],
            f"{name}_to_bare": found["guava"] / found["bare"],
            f"{name}_to_gloo": found["guava"] / found["gloo"],
            f"{name}_small_us": 1e6 * found["guava_small"],
            f"{name}_barrier_us": 1e6 * found["guava_barrier"],
            f"{name}_echo_us": 1e6 * found["echo"],
            f"{name}_small_to_echo": found["guava_small"] / found["echo"],
            f"{name}_barrier_to_echo": found["guava_barrier"] / found["echo"],
            f"{name}_small_to_gloo": found["guava_small"] / found["gloo_small"],
            f"{name}_barrier_to_gloo": found["guava_barrier"] / found["gloo_barrier"],
        }
    result["tls_to_plain"] = result["tls_s"] / result["plain_s"]
    if arguments.links:
        result.update(run_links(ways["plain"][0], nbytes))
    if arguments.hivemind:
        result["hivemind_s"] = run_hivemind(arguments.hivemind, nbytes)
        result["tls_to_hivemind"] = result["tls_s"] / result["hivemind_s"]
    pipe.send(None)
    hub.join(20)
    return result


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians of this checkout and of the other, measured in turn by processes of their own."""
    found: dict[str, list[dict[str, Any]]] = {"": [], "base_": []}
    command = [sys.executable, __file__, "--megabytes", str(arguments.megabytes), "--rounds", str(arguments.rounds)]
    for _ in range(arguments.repeats):
        for name, tree in (("", ""), ("base_", str(Path(arguments.base).resolve()))):
            environment = {**os.environ, "GUAVA_BENCHMARK_TREE": tree}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            found[name].append(json.loads(done.stdout))
    return {
        name + key: statistics.median(one[key] for one in all_)
        for name, all_ in found.items()
        for key, value in all_[0].items()
        if isinstance(value, float)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--base", metavar="PATH")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--links", action="store_true")
    parser.add_argument("--hivemind", metavar="PYTHON")
    arguments = parser.parse_args()
    result = compare(arguments) if arguments.base else measure(arguments)
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()}
    print(json.dumps({"benchmark": "all_reduce", "megabytes": arguments.megabytes, "cores": os.cpu_count()} | rounded))


if __name__ == "__main__":
    main()
