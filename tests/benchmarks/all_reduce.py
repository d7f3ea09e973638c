"""all_reduce between two workers through a hub, against bare sockets, gloo and hivemind in the same minutes.

    python tests/benchmarks/all_reduce.py [--megabytes 100] [--rounds 7] [--links] [--hivemind PYTHON]

Three processes as in a real run: the hub and two workers, over loopback. Every round times, one after the other, the
group `guava`, a `gloo` group of the same two processes, and a bare socket (`sendall` of a memoryview, `recv_into` a
buffer that was there before) between the same two processes that moves as many bytes as the star does: the tensor four
times, two up, two down. Ratios are of medians. `--links` adds a run over emulated links of 200 Mbit/s and 50 ms round
trip between each worker and the hub; its reference is bytes / bandwidth, upload and download at the same time.
`--hivemind` names a Python that has hivemind 1.1.12; two of its peers average the same tensor.

Prints one JSON line. Reach: plain <= 1.1 x bare and <= 2 x gloo; 4 bytes <= 1.5 x gloo; TLS <= 0.5 x hivemind; links
<= 1.15 x bytes / bandwidth.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

RANKS = 2
WARM_UP = 2
SMALL_WARM_UP = 100
SMALL_CALLS = 400
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
    pipe.send({name: hub.code.encode() for name, hub in hubs.items()})
    pipe.recv()
    for hub in hubs.values():
        hub.close()


def bare_pair(rank: int, port: int) -> socket.socket:
    if rank == 0:
        server = socket.create_server(("127.0.0.1", port))
        sock, _ = server.accept()
        server.close()
    else:
        until = time.monotonic() + 30
        while True:
            try:
                sock = socket.create_connection(("127.0.0.1", port))
                break
            except ConnectionRefusedError:
                assert time.monotonic() < until
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


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


def work(name: str, rank: int, code: str, bare_port: int, nbytes: int, rounds: int, small: bool, pipe: Any) -> None:
    """One worker's process."""
    import torch
    import torch.distributed as dist

    from guava_nb.backend import end_group, init_group
    from guava_nb.backend.init_group import Dialled
    from guava_nb.protocol.joincode import JoinCode

    torch.set_num_threads(1)
    dialled = Dialled(JoinCode.decode(code), f"w{rank}")
    init_group(dialled.endpoint, name, rank, RANKS, [f"w{r}" for r in range(RANKS)], 120.0)
    gloo = dist.new_group(backend="gloo") if small else None
    tensor = torch.ones(nbytes // 4)
    tiny = torch.ones(1)
    view = memoryview(bytearray(nbytes))
    sock = bare_pair(rank, bare_port) if small else None

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
        for group in (None, gloo):
            timed(lambda group=group: dist.all_reduce(tiny, group=group), SMALL_WARM_UP)
        trips: dict[str, list[float]] = {"guava": [], "gloo": []}
        for _ in range(5):
            for name, group in (("guava", None), ("gloo", gloo)):
                trips[name].append(timed(lambda group=group: dist.all_reduce(tiny, group=group), SMALL_CALLS))
        result.update({f"{name}_small": statistics.median(values) for name, values in trips.items()})
    pipe.send(result)
    end_group()
    dialled.close()


def run(codes: list[str], nbytes: int, rounds: int, small: bool = True) -> dict[str, float]:
    """Two workers, each with its code (its way to the hub); the slower one's seconds."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes, workers, name = [], [], f"bench-{port}-{small}"
    for rank, code in enumerate(codes):
        ours, theirs = context.Pipe()
        args = (name, rank, code, port, nbytes, rounds, small, theirs)
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
        seconds = run(codes, nbytes, rounds=1, small=False)["guava"]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--links", action="store_true")
    parser.add_argument("--hivemind", metavar="PYTHON")
    arguments = parser.parse_args()
    nbytes = arguments.megabytes * 1_000_000
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    hub = context.Process(target=serve, args=(theirs,))
    hub.start()
    codes = pipe.recv()
    plain = run([codes["plain"]] * RANKS, nbytes, arguments.rounds)
    tls = run([codes["tls"]] * RANKS, nbytes, arguments.rounds)
    result: dict[str, Any] = {
        "benchmark": "all_reduce",
        "megabytes": arguments.megabytes,
        "plain_s": round(plain["guava"], 4),
        "bare_s": round(plain["bare"], 4),
        "gloo_s": round(plain["gloo"], 4),
        "plain_to_bare": round(plain["guava"] / plain["bare"], 3),
        "plain_to_gloo": round(plain["guava"] / plain["gloo"], 3),
        "tls_s": round(tls["guava"], 4),
        "small_us": round(1e6 * plain["guava_small"]),
        "gloo_small_us": round(1e6 * plain["gloo_small"]),
        "small_to_gloo": round(plain["guava_small"] / plain["gloo_small"], 3),
    }
    if arguments.links:
        result.update(run_links(codes["plain"], nbytes))
    if arguments.hivemind:
        result["hivemind_s"] = round(run_hivemind(arguments.hivemind, nbytes), 4)
        result["tls_to_hivemind"] = round(result["tls_s"] / result["hivemind_s"], 3)
    pipe.send(None)
    hub.join(20)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
