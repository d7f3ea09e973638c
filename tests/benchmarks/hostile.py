"""A million hostile inputs by strangers and by code holders, against one session on this machine while a worker trains.

    python -m tests.benchmarks.hostile [--inputs 1000000] [--seconds 3600] [--seed 0]

Of the inputs, two fifths are connections of strangers (bytes that mean nothing, HTTP, pieces of TLS, proofs with a wrong secret),
two fifths frames by one who holds the code, damaged in one place, each read by a decoder as a session has it, and one fifth
records by one who holds the code: any record with any values, over sessions that say hello and then send until they are ended.
All three come at once, from processes of their own, so that memory here is the orchestrator's. What is not done after
`--seconds` is left out, and the end says how much was done.

Prints a JSON line a minute, and one at the end: the steps of the worker's run meanwhile, the largest difference of its
weights to plain PyTorch (float64), what was lost or doubled, and memory, descriptors and threads before and after.
Reach: the run goes on, exact, memory flat.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, TensorDataset

from guava_nb import DistributedConfig, Orchestrator
from guava_nb.errors import GuavaError
from guava_nb.link.dialler import dial
from guava_nb.link.options import LinkOptions
from guava_nb.link.session_events import Event, MessageArrived, SessionClosed
from guava_nb.protocol.framing import UNSEQUENCED, Decoder, Limits, OutgoingMessage
from guava_nb.protocol.joincode import JoinCode
from guava_nb.protocol.messages import MESSAGE_KINDS, Channel, Hello, Message, channel_of
from tests.benchmarks.soak import PATIENCE_S, Held, until
from tests.support.state_machine.values import Drawn, draw

__all__ = ["besiege", "frames"]

CELL = """
import time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x):
        return self.body(x)

def loss_fn(outputs, targets):
    time.sleep(0.02)
    return nn.functional.cross_entropy(outputs, targets)
"""
#: Messages of one hostile session at most; most are ended by the first.
PER_SESSION = 20
_STRANGERS, _FRAMES = 0.4, 0.4
_HTTP = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"POST /guava HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
    b"GET /guava HTTP/1.1\r\n" + b"A: b\r\n" * 99,
)
#: Of each kind of input at once: most of their time they wait for an answer.
_AT_ONCE = {"strangers": 4, "damaged frames": 1, "records of a code holder": 6}
#: The newest step and the generation of the run, for those who attack; how much each kind has done.
_moment: Any = [0, 0]
_done: Any = [0, 0, 0]
_TLS_BEGINS = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"


# ---------------------------------------------------------------------------------------------------- what is sent


def _stranger(port: int, luck: random.Random) -> None:
    """One connection that says something and leaves."""
    with contextlib.suppress(OSError, GuavaError), socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.sendall(
            luck.choice(
                (luck.randbytes(luck.randrange(1, 200)), luck.choice(_HTTP), _TLS_BEGINS[: luck.randrange(1, 12)])
            )
        )
        if luck.random() < 0.01:  # others leave without a word
            sock.settimeout(1)
            sock.recv(100)


def _guesser(code: JoinCode, luck: random.Random) -> None:
    """One connection whose proof is of another secret, or breaks off."""
    with contextlib.suppress(OSError, GuavaError):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with socket.create_connection((code.host, code.port), timeout=5) as sock, context.wrap_socket(sock) as tls:
            tls.sendall(b"GUAVA5"[: luck.randrange(7)] + luck.randbytes(luck.randrange(100)))
            tls.recv(100)


def _fitting() -> dict[str, tuple[Any, ...]]:
    """Values that fit the run at this moment, so that hostile records come far."""
    step, generation = _moment
    return {
        "run_id": ("run-1",), "generation": (generation,), "step": (step, step + 1, 0), "request_id": (1, 2, 3),
        "shard": (0, 1), "bucket": (0, 1), "numel": (16, 160),
    }  # fmt: skip


class Intruder:
    """Sessions of one who holds the code, one after another."""

    def __init__(self, code: JoinCode, luck: random.Random) -> None:
        self._code, self._luck = code, luck
        self._records = [record for record in MESSAGE_KINDS.values() if record not in UNSEQUENCED]
        self.sessions = 0

    def send(self, count: int) -> int:
        """Join, and send at most so many; returns how many went out before the session was ended."""
        over, seated, sent = threading.Event(), threading.Event(), 0

        def on_event(event: Event) -> None:
            if isinstance(event, MessageArrived):
                seated.set()
                event.done()
            elif isinstance(event, SessionClosed):
                over.set()

        self.sessions += 1
        with contextlib.suppress(GuavaError):
            session = dial(self._code, on_event, LinkOptions(linger_s=0.2))
            try:
                if self._luck.random() < 0.9:
                    self._say(session.send, Drawn(_hello(f"intruder-{self.sessions % 50}")))
                    seated.wait(5)
                fitting = _fitting()
                while sent < count and not over.is_set():
                    self._say(session.send, draw(self._luck.choice(self._records), self._luck, fitting))
                    sent += 1
                    over.wait(0.002)  # time to be judged, so that what is counted was mostly looked at
            finally:  # also where this side refused to send something: one that stands would be looked at as held by the other
                session.close("enough")
        return sent

    def _say(self, send: Callable[..., None], drawn: Drawn) -> None:
        with contextlib.suppress(ValueError):
            send(drawn.message, channel_of(drawn.message), [memoryview(drawn.payload)] if drawn.payload else ())


def _hello(name: str) -> Message:
    return Hello(
        name=name, program="spawned", versions={}, hostname="h", device="cpu", device_name="CPU", device_uuid=""
    )


def frames(count: int, seed: int = 0) -> int:
    """Damage frames in one place each and read them; returns how many were done.

    Raises:
        Exception: the decoder raised, which ends a reader.
    """
    luck = random.Random(seed)
    records = [record for record in MESSAGE_KINDS.values() if record not in UNSEQUENCED]
    limits = Limits(max_record_bytes=1 << 16, max_payload_bytes=1 << 16, compressed=True)
    for _ in range(count):
        drawn = draw(luck.choice(records), luck, {})
        try:
            message = OutgoingMessage(
                drawn.message, Channel.GRADIENT, 1, [memoryview(drawn.payload)] if drawn.payload else []
            )
        except GuavaError:  # this side does not send it; the one below it does
            message = OutgoingMessage(_hello("h"), Channel.GRADIENT, 1)
        stream = bytearray(
            b"".join(bytes(part) for frame in message.frames(luck.choice((7, 64, 1 << 20))) for part in frame)
        )
        for _ in range(luck.randrange(1, 4)):
            stream[luck.randrange(len(stream))] = luck.randrange(256)
        decoder = Decoder(limits)
        decoder.receive(bytes(stream[: luck.choice((len(stream), luck.randrange(len(stream) + 1)))]))
        Decoder(limits).carry(decoder.let_go())  # as after a break
    return count


# ------------------------------------------------------------------------------------------------------- the siege


def _batches() -> DataLoader[Any]:
    x = torch.randn(128, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return DataLoader(TensorDataset(x, torch.arange(128) % 4), 16)


def _plain(steps: int) -> torch.nn.Module:
    namespace: dict[str, Any] = {"__name__": "plain"}
    exec(CELL.replace("time.sleep(0.02)", "pass"), namespace)
    namespace["time"] = SimpleNamespace(sleep=lambda seconds: None)  # no one waits for tens of thousands of steps
    torch.manual_seed(0)
    model = namespace["Net"]().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    batches = list(_batches())  # the same in each epoch
    while steps:
        for x, y in batches:
            if not steps:
                break
            optimizer.zero_grad()
            namespace["loss_fn"](model(x), y).backward()
            optimizer.step()
            steps -= 1
    return model


def _attack(kind: int, code: str, wanted: int, ends_at: float, seed: int) -> None:
    """Send so many inputs of a kind, or until the time (seconds of the epoch)."""
    name, target = list(_AT_ONCE)[kind], JoinCode.decode(code)
    at_once = _AT_ONCE[name]

    def one_after_another(number: int) -> None:
        luck, mine, done = random.Random(f"{seed} {kind} {number}"), wanted // at_once, 0
        one = _ATTACKS[name](target, luck)
        while done < mine and time.time() < ends_at:
            count = one(mine - done)
            done += count
            with _counting:
                _done[kind] += count

    with ThreadPoolExecutor(at_once) as pool:
        for thread in [pool.submit(one_after_another, number) for number in range(at_once)]:
            thread.result()


def _share(moment: Any, done: Any) -> None:
    """In a process that attacks: what it has in common with the one that is attacked."""
    global _moment, _done
    _moment, _done = moment, done


def besiege(
    inputs: int,
    seconds: float = 3600.0,
    seed: int = 0,
    tell: Callable[[dict[str, Any]], None] = lambda part: None,
    apart: bool = False,
) -> dict[str, Any]:
    """Do what the module's text says; `tell` gets a line a minute. Where not `apart`, all comes from this process.

    Returns:
        The line of the end.
    """
    held, context = Held(), multiprocessing.get_context("fork")
    _share(context.Array("q", 2, lock=False), context.Array("q", 3, lock=False))
    pool = ProcessPoolExecutor(3, context, _share, (_moment, _done)) if apart else ThreadPoolExecutor(3)
    pool.submit(int).result()  # all processes are forked here, before this one has threads
    with (
        Orchestrator(DistributedConfig(num_workers=1, threads_per_worker=1, precision="fp64")) as orch,
        pool,
    ):
        orch.launch_workers(1)
        orch.wait_for_workers(1, timeout=PATIENCE_S)
        orch.share(CELL, "net")
        orch.register_model("Net")
        run = orch.start_training(
            _batches(), num_epochs=100_000, criterion="loss_fn", optimizer="AdamW", optimizer_args={"lr": 0.001},
            progress=False, detach=True,
        )  # fmt: skip
        until(lambda: run.history, PATIENCE_S, "the first step")
        held.look()
        began, code = time.time(), orch.join_code.encode()
        attacks = [
            pool.submit(_attack, kind, code, round(inputs * share), began + seconds, seed)
            for kind, share in enumerate((_STRANGERS, _FRAMES, 1 - _STRANGERS - _FRAMES))
        ]
        _until_done(attacks, orch, tell)
        held.look()
        steps = len(run.history)
        until(lambda: len(run.history) > steps or run.done, PATIENCE_S, "steps go on")
        run.stop()
        run.result()
        weights, plain = run.model().state_dict(), _plain(len(run.history)).state_dict()
        gap = max(float((weights[key] - plain[key]).abs().max()) for key in plain)
    return {
        "part": "all", "inputs": sum(_done), "of": dict(zip(_AT_ONCE, _done, strict=True)),
        "seconds": round(time.time() - began, 1), "steps": len(run.history), "difference": gap,
        "lost": run.lost_samples, "doubled": run.duplicated_samples, "held": held.moments,
    }  # fmt: skip


def _until_done(attacks: list[Future[None]], orch: Orchestrator, tell: Callable[[dict[str, Any]], None]) -> None:
    """Tell those who attack where the run stands, and the caller how far they are.

    Raises:
        Exception: of an attack: a decoder raised, which ends a reader.
    """
    run, told = orch.run, time.monotonic()
    assert run is not None
    while not all(attack.done() for attack in attacks):
        _moment[:] = [len(run.history), orch._open_cluster().roster.generation]
        if time.monotonic() > told + 60.0:
            told = time.monotonic()
            rss_mb = round(psutil.Process().memory_info().rss / 1e6, 1)
            tell(
                {
                    "inputs": list(_done),
                    "steps": len(run.history),
                    "rss_mb": rss_mb,
                    "threads": threading.active_count(),
                }
            )
        time.sleep(0.02)
    for attack in attacks:
        attack.result()


def _strangers(code: JoinCode, luck: random.Random) -> Callable[[int], int]:
    def one(most: int) -> int:
        _stranger(code.port, luck) if luck.random() < 0.95 else _guesser(code, luck)
        return 1

    return one


def _framed(code: JoinCode, luck: random.Random) -> Callable[[int], int]:
    return lambda most: frames(min(most, 1000), luck.randrange(1 << 30))


def _records(code: JoinCode, luck: random.Random) -> Callable[[int], int]:
    intruder = Intruder(code, luck)
    return lambda most: intruder.send(min(most, PER_SESSION))


_ATTACKS: dict[str, Callable[[JoinCode, random.Random], Callable[[int], int]]] = dict(
    zip(_AT_ONCE, (_strangers, _framed, _records), strict=True)
)
_counting = threading.Lock()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    told = besiege(
        given.inputs, given.seconds, given.seed, lambda line: print(json.dumps(line), flush=True), apart=True
    )
    print(json.dumps(told))


if __name__ == "__main__":
    main()
