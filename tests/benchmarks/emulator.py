"""The link emulator against its own settings: does it carry the rate it was set to, and take the time it was set to?

    python -m tests.benchmarks.emulator [--seconds 4]

Prints one JSON line: for each setting the carried rate and the round trip of one byte, each as a ratio to what was set.
Reach: rate within 3 %; the round trip of a byte within 3 % or 1 ms, whichever is more (two threads have to wake for it).
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import threading
import time

from tests.support.relay import Relay

SETTINGS = ((200e6 / 8, 0.05), (20e6 / 8, 0.1), (1e9 / 8, 0.01))
WARM_UP_S = 0.5  # until the pipe is full, and past what the queues take at once


def connected(relay: Relay, server: socket.socket) -> tuple[socket.socket, socket.socket]:
    near = socket.create_connection(("127.0.0.1", relay.port))
    far, _ = server.accept()
    for sock in (near, far):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def measured_rate(near: socket.socket, far: socket.socket, seconds: float) -> float:
    """Bytes per second that come out while more is put in than fits."""
    stop = threading.Event()

    def fill() -> None:
        block = bytes(64 << 10)
        while not stop.is_set():
            near.sendall(block)

    filler = threading.Thread(target=fill, daemon=True)
    filler.start()
    began, counted, view = time.monotonic(), 0, memoryview(bytearray(64 << 10))
    since = began
    while (now := time.monotonic()) < began + WARM_UP_S + seconds:
        got = far.recv_into(view)
        if now < began + WARM_UP_S:
            since, counted = time.monotonic(), 0
        else:
            counted += got
    took = time.monotonic() - since
    stop.set()
    while filler.is_alive():  # drain, so that the filler is not left in a full pipe
        far.recv_into(view)
    return counted / took


def measured_round_trip(near: socket.socket, far: socket.socket, times: int = 20) -> float:
    """Seconds from a byte's start to its echo; the median."""
    seconds = []
    for _ in range(times):
        began = time.monotonic()
        near.sendall(b"x")
        far.sendall(far.recv(1))
        near.recv(1)
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    arguments = parser.parse_args()
    results = []
    for rate, round_trip_s in SETTINGS:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with Relay(port, rate_bytes_s=rate, round_trip_s=round_trip_s) as relay:
                near, far = connected(relay, server)
                trip = measured_round_trip(near, far)
                carried = measured_rate(near, far, arguments.seconds)
                near.close()
                far.close()
        results.append(
            {
                "mbit_s": rate * 8 / 1e6,
                "round_trip_s": round_trip_s,
                "rate_ratio": round(carried / rate, 4),
                "round_trip_ratio": round(trip / round_trip_s, 4),
            }
        )
    print(json.dumps({"benchmark": "emulator", "results": results}))


if __name__ == "__main__":
    main()
