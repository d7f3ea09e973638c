"""Training through tunnels whose program, server or address goes away in mid-run: a real sshd, and the fake ngrok agent.

The grace is so short that workers would be lost if a tunnel's outage counted like a worker's. Whatever happens, the run
equals plain PyTorch, and nobody connects more often than outages ask for.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from guava_nb.errors import JoinCodeError
from guava_nb.protocol.joincode import JoinCode
from tests.support.ngrok_agent import TOKEN, FakeNgrok
from tests.support.processes import ROOT, PlainTraining, Session, Worker, eventually, loader
from tests.support.sshd import Sshd, running, why_not

pytestmark = pytest.mark.timeout(150)

GATEWAY = "GatewayPorts clientspecified"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    if why_not():
        pytest.skip(why_not())
    with running(tmp_path_factory.mktemp("sshd") / "server", GATEWAY) as made:
        yield made


class CommandLine:
    """`guava worker` with an open standard input; its code stands in no argument."""

    def __init__(self, code: JoinCode, log: Path) -> None:
        environ = {**os.environ, "GUAVA_JOIN_CODE": code.encode()}
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "guava_nb", "worker", "--device", "cpu", "--name", "by-hand"],
                stdin=subprocess.PIPE, stdout=out, stderr=out, text=True, cwd=ROOT, env=environ,
            )  # fmt: skip

    def said(self) -> str:
        return self.log.read_text()

    def has_said(self, pattern: str) -> bool:
        return re.search(pattern, self.said()) is not None

    def paste(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def close(self) -> int:
        assert self.process.stdin is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.process.kill()
        self.process.stdin.close()
        return self.process.wait()


@dataclass
class Pair:
    """A session behind the tunnel, with one worker that a program started and one from a terminal."""

    session: Session
    worker: Worker
    by_hand: CommandLine

    @property
    def listener(self) -> Any:
        return self.session.orch._listener

    def notices(self) -> str:
        return "\n".join(self.session.orch.status().notes)

    def both_are_here(self) -> bool:
        return len(self.session.ready()) == 2


@pytest.fixture(scope="module")
def pair(server: Sshd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("PYTHONPATH", str(ROOT)), ("OMP_NUM_THREADS", "1"), ("PATH", server.path)):
            patch.setenv(name, value)
        session = Session(folder, num_workers=2, tunnel="ssh:relay", heartbeat_s=0.5, silence_s=4.0, grace_s=4.0)
        made = Pair(
            session, Worker(session, "w1", relayed=False), CommandLine(session.orch.join_code, folder / "by-hand.log")
        )
        session.workers.append(made.worker)
        try:
            eventually(made.both_are_here, 90, f"both join: {made.by_hand.said()}")
            yield made
        finally:
            session.close()
            status = made.by_hand.close()
    assert not clients() and status == 0, made.by_hand.said()


def clients() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.name() == "ssh"]


class AtStep:
    """A callback that acts once, between two steps."""

    def __init__(self, step: int, action: Callable[[], Any]) -> None:
        self.step, self.action = step, action

    def on_step(self, run: Any, record: dict[str, Any]) -> None:
        if record["step"] == self.step:
            self.action()


def end_client() -> None:
    (client,) = clients()
    client.kill()


def test_a_tunnel_that_comes_back_at_its_address_needs_nobody(pair: Pair, server: Sshd) -> None:
    """The server is away for longer than the grace, and its program at this end with it."""
    code, orch, before = pair.session.orch.join_code, pair.session.orch, pair.listener.stats.accepted
    assert code.port != pair.listener.port, "not around the tunnel"

    def end_server() -> None:
        server.stop()
        eventually(lambda: "its ssh port does not answer" in orch.status().tunnel, 20, "a start has failed")
        server.start(GATEWAY)

    run = pair.session.train(loader(), callbacks=[AtStep(2, end_server)], detach=True)
    pair.session.assert_undisturbed(run, PlainTraining(pair.session.folder, loader()).epochs(2))
    eventually(pair.both_are_here, 20, "both are back")
    assert orch.join_code == code and orch.status().tunnel == "ssh"
    told = pair.notices().splitlines()
    assert any("same address" in line for line in told)
    # The model counts its calls in Python, which other notices speak of.
    assert [line for line in told if "lost" in line and "self.register_buffer" not in line] == []
    assert pair.listener.stats.accepted - before <= 6, "two a worker, and hardly more"


def test_at_another_address_workers_go_on_by_the_new_code(pair: Pair) -> None:
    orch, old, taken = pair.session.orch, pair.session.orch.join_code, contextlib.ExitStack()

    def take_the_port() -> None:
        end_client()
        eventually(lambda: _hold(taken, old.port), 20, "sshd gives the port back")

    with taken:
        run = pair.session.train(loader(), callbacks=[AtStep(2, take_the_port)], detach=True)
        eventually(lambda: orch.join_code != old, 30, "the new address is known")
        new = orch.join_code
        eventually(lambda: new.address in pair.notices(), 20, "it is told")
        assert new.secret == old.secret
        assert "%guava_worker NEWCODE" in pair.notices() and new.encode() not in pair.notices()
        assert orch.open() == new and orch.status().address == new.address
        eventually(lambda: pair.worker.handle.status().state == "reconnecting", 20, "it waits")
        told = pair.worker.handle.status().detail
        assert "this worker keeps what it holds, and dials again for up to 600 s; a new join code may be needed" in told
        stranger = JoinCode.new("127.0.0.1", new.port, new.fingerprint, b"another 16 bytes").encode()
        for wrong, words in ((stranger, "belongs to another session"), (new.encode()[:-7], "is cut off")):
            with pytest.raises(JoinCodeError, match=words):
                pair.worker.handle.redirect(wrong)
            pair.by_hand.paste(wrong)
            eventually(partial(pair.by_hand.has_said, f"not used: th.* join code {words}"), 20, "it says why")
        pair.worker.handle.redirect(f">>> {new.encode()}  ")
        pair.by_hand.paste(f"  '{new.encode()}'")
        pair.session.assert_undisturbed(run, PlainTraining(pair.session.folder, loader()).epochs(2))
        eventually(pair.both_are_here, 20, "both are back")
    said = pair.by_hand.said()
    assert "paste it here" in said and f"dialling the session at {new.address} now" in said
    assert not any(code in said for code in (old.encode(), new.encode(), stranger))
    assert pair.worker.handle.code == new


def _hold(stack: contextlib.ExitStack, port: int) -> bool:
    """Take a port that somebody else is about to leave."""
    try:
        stack.enter_context(socket.create_server(("127.0.0.1", port)))
    except OSError:
        return False
    return True


@pytest.mark.skipif(sys.platform == "win32", reason="the fake agent is started by its first line")
@pytest.mark.parametrize(("kind", "scheme"), [("ngrok", "tls"), ("ngrok-http", "wss")])
def test_an_agent_that_dies_comes_back_at_another_address(
    kind: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyngrok")
    from tests.integration.test_ngrok_tunnel import certificate

    fake = FakeNgrok(tmp_path / "fake")
    edge, _ = certificate(fake.folder)
    fake.plan(certificate=edge)
    environ = {**fake.environment, "NGROK_AUTHTOKEN": TOKEN, "HOME": str(tmp_path), "SSL_CERT_FILE": edge}
    for name, value in {**environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", None)
    session = Session(tmp_path, num_workers=2, tunnel=kind, heartbeat_s=0.5, silence_s=4.0, grace_s=4.0)
    try:
        workers, old = session.ensure(2), session.orch.join_code
        assert old.scheme == scheme
        end_agent = AtStep(2, lambda: os.kill(fake.only(), signal.SIGKILL))
        run = session.train(loader(), callbacks=[end_agent], detach=True)
        eventually(lambda: session.orch.join_code != old, 60, "the new address is known")
        for worker in workers:
            worker.handle.redirect(session.orch.join_code)
        session.assert_undisturbed(run, PlainTraining(session.folder, loader()).epochs(2))
        eventually(lambda: len(session.ready()) == 2, 20, "both are back")
        assert session.orch._listener is not None and session.orch._listener.stats.accepted <= 10
    finally:
        session.close()
    assert fake.running() == [] and fake.leftovers() == []
