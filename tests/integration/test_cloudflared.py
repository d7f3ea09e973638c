"""The quick tunnel of Cloudflare, against a program that says and relays what cloudflared does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from guava_nb.errors import ConfigError, LinkBroken
from guava_nb.link.dialler import dial
from guava_nb.tunnels import cloudflared, cloudflared_program
from guava_nb.tunnels.cloudflared import CloudflaredTunnel
from guava_nb.tunnels.cloudflared_program import find_cloudflared
from guava_nb.tunnels.registry import make_tunnel
from guava_nb.tunnels.tunnel import Address
from tests.support.cloudflared import FakeCloudflared, runs, stand_in
from tests.support.links import exchange, nothing_left_behind, own_port, world
from tests.support.processes import ROOT, eventually

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the stand-in is told things by POSIX signals")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCloudflared]:
    with stand_in(tmp_path, monkeypatch) as made, nothing_left_behind():
        yield made


def test_a_link_through_it_and_the_sentence_when_nothing_listens(fake: FakeCloudflared) -> None:
    with world() as made:
        tunnel = make_tunnel(f"cloudflared:{fake.program}")
        assert (tunnel.alive(), tunnel.address()) == (False, None)
        tunnel.stop()
        at = tunnel.start(made.listener.port)
        try:
            assert at == tunnel.address() == tunnel.start(made.listener.port)
            assert (at.host, at.scheme, tunnel.alive()) == ("localhost", "wss", True)
            assert len(fake.started()) == 1
            code = made.listener.join_code().with_address(at.host, at.port, at.scheme)
            ours = dial(code, made.there, made.options)
            made.dialled.append(ours)
            theirs = next(s for s in made.listener.sessions if s.session_id == ours.session_id)
            exchange(made, ours, theirs, 6)
            made.close()
            with pytest.raises(LinkBroken, match="answered 502: the tunnel stands, but nothing listens behind it"):
                dial(code, made.there, made.options)
        finally:
            tunnel.stop()
            tunnel.stop()
        assert (tunnel.alive(), tunnel.address()) == (False, None)


def test_what_it_is_told_and_what_not(fake: FakeCloudflared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNNEL_TOKEN", "of another tunnel of this user")
    monkeypatch.setenv("TUNNEL_TRANSPORT_PROTOCOL", "http2")
    tunnel = fake.tunnel()
    tunnel.start(9)
    noted = json.loads(next(fake.folder.glob("[0-9]*.json")).read_text())
    arguments = noted["arguments"]
    assert arguments[0] == "tunnel" and "--no-autoupdate" in arguments
    assert arguments[arguments.index("--url") + 1] == "http://127.0.0.1:9"
    assert Path(arguments[arguments.index("--config") + 1]).read_text() == ""
    assert sorted(noted["tunnel_settings"]) == ["TUNNEL_GRACE_PERIOD", "TUNNEL_TRANSPORT_PROTOCOL"]
    tunnel.stop()


@pytest.mark.parametrize(
    ("fail", "why"),
    [
        ("rate", r"no more tunnels for a while \(429\); wait some minutes"),
        ("network", r"api\.trycloudflare\.com is not reached"),
        ("fault", "has a fault of its own"),
        ("proxy", "a proxy on the way opens encrypted traffic"),
        ("flags", "too old: update it from https://developers"),
        ("dies", r"ended by signal 9 \(often by the system, for lack of memory\); start it again"),
        ("mute", "ended with status 3 and said nothing: is it the right program"),
        ("edge", "port 7844 is not reached"),
        ("silent", r"ran for 0\.7 s and said nothing"),
    ],
)
def test_each_way_to_fail_has_its_sentence(
    fake: FakeCloudflared, fail: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.set(fail=fail)
    if fail in ("edge", "silent"):
        monkeypatch.setattr(cloudflared, "START_S", 0.7 if fail == "silent" else 2.0)
    tunnel = fake.tunnel()
    with pytest.raises(ConfigError, match=why) as caught:
        tunnel.start(9)
    assert "\n" not in str(caught.value)
    assert not tunnel.alive()


def test_no_program_is_a_sentence_with_the_place_to_get_it(
    fake: FakeCloudflared, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cloudflared_program, "RELEASES", f"http://127.0.0.1:{own_port()}")
    with pytest.raises(ConfigError, match=r"could not be fetched from .*refused.*: get it from https://developers"):
        CloudflaredTunnel().start(9)
    with pytest.raises(ConfigError, match=r"there is no program /no/such/file: get it"):
        CloudflaredTunnel("/no/such/file").start(9)
    monkeypatch.setenv("PATH", str(fake.folder))
    assert find_cloudflared() == str(fake.program)
    text = tmp_path / "text"
    text.write_text("no program\n")
    text.chmod(0o700)
    with pytest.raises(ConfigError, match="cannot be run: .*downloads/ has others"):
        CloudflaredTunnel(str(text)).start(9)


def test_its_death_is_seen_and_it_can_be_started_again(fake: FakeCloudflared) -> None:
    tunnel = fake.tunnel()
    first = tunnel.start(9)
    (pid,) = fake.started()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not tunnel.alive(), 10, "its death is seen")
    assert tunnel.address() is None
    second = tunnel.start(9)
    assert tunnel.alive() and second.port != first.port
    tunnel.stop()


def test_a_mended_connection_keeps_the_name_and_a_forgotten_tunnel_is_dead(fake: FakeCloudflared) -> None:
    tunnel = fake.tunnel()
    at = tunnel.start(9)
    (pid,) = fake.started()
    os.kill(pid, signal.SIGUSR2)
    agent = tunnel._agent
    assert agent is not None
    eventually(lambda: "fra07" in agent._lines[-1], 10, "it told of it")
    assert (tunnel.alive(), tunnel.address()) == (True, at)
    os.kill(pid, signal.SIGUSR1)
    eventually(lambda: not tunnel.alive(), 10, "the edge does not know it any more")
    tunnel.stop()


def test_stop_ends_a_start_under_way(fake: FakeCloudflared) -> None:
    fake.set(slow_s=60)
    tunnel = fake.tunnel()
    failed: list[str] = []

    def start() -> None:
        try:
            tunnel.start(9)
        except ConfigError as problem:
            failed.append(str(problem))

    thread = threading.Thread(target=start)
    thread.start()
    eventually(lambda: tunnel._agent is not None and tunnel._agent.at, 20, "it has its name")
    tunnel.stop()
    thread.join(10)
    assert failed == ["the cloudflared tunnel was stopped while it was started"]


def test_a_fresh_name_is_not_given_out_at_once(fake: FakeCloudflared) -> None:
    tunnel = fake.tunnel()
    tunnel.settle_s = 0.5
    at = tunnel.start(9)
    agent = tunnel._agent
    assert agent is not None and isinstance(at, Address)
    assert cloudflared.time.monotonic() - agent._named_at >= 0.5
    tunnel.stop()


KERNEL = """
import os, signal, sys
from guava_nb.tunnels.cloudflared import CloudflaredTunnel
tunnel = CloudflaredTunnel(sys.argv[1])
tunnel.settle_s = 0
at = tunnel.start(9)
try:
    print("at", at.port, flush=True)
    sys.stdin.readline()
except KeyboardInterrupt:
    print("interrupted", flush=True)
sys.stdin.readline()
print("alive" if tunnel.alive() else "dead", flush=True)
sys.stdin.readline()
"""


def kernel(fake: FakeCloudflared) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", KERNEL, str(fake.program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True, cwd=ROOT,
    )  # fmt: skip


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_an_interrupted_cell_does_not_end_it_and_a_killed_kernel_leaves_it_to_be_ended(fake: FakeCloudflared) -> None:
    process, tunnel = kernel(fake), fake.tunnel()
    try:
        assert heard(process).startswith("at ")
        os.killpg(process.pid, signal.SIGINT)  # as Jupyter does: the kernel's whole process group
        assert heard(process) == "interrupted"
        tell(process)
        assert heard(process) == "alive"
        process.kill()
        process.wait(10)
        (orphan,) = fake.started()
        assert runs(orphan)
        tunnel.start(9)
        assert not runs(orphan)
    finally:
        tunnel.stop()
        process.kill()
        process.wait(10)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def test_an_orderly_end_of_the_kernel_ends_it(fake: FakeCloudflared) -> None:
    process = kernel(fake)
    assert heard(process).startswith("at ")
    for _ in range(3):
        tell(process)
    assert process.wait(20) == 0
    assert fake.alive() == []
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
