"""The ssh tunnel through a real sshd: where it leads, what survives, what each refusal says."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from guava_nb.errors import ConfigError
from guava_nb.tunnels import ssh
from guava_nb.tunnels.ssh import SshTunnel
from tests.support.links import nothing_left_behind
from tests.support.processes import eventually
from tests.support.sshd import Sshd, free_port, running, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running(tmp_path_factory.mktemp("sshd") / "server", "GatewayPorts clientspecified") as made:
        yield made


@pytest.fixture
def here() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.settimeout(20)
        yield sock


@pytest.fixture
def tunnel(server: Sshd) -> Iterator[Callable[..., SshTunnel]]:
    made: list[SshTunnel] = []

    def make(what: str = "relay", *options: str, of: Sshd = server) -> SshTunnel:
        made.append(SshTunnel(what, ("-F", str(of.config), *options)))
        return made[-1]

    with nothing_left_behind():
        yield make
        for one in made:
            one.stop()


def clients() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.name() == "ssh"]


def passes(tunnel: SshTunnel, here: socket.socket) -> bool:
    """Whether bytes come through."""
    at = tunnel.address()
    assert at is not None
    with socket.create_connection((at.host, at.port), 10) as there:
        there.sendall(b"hello")
        while True:  # the tunnel's own try of the address was a connection too
            accepted, _ = here.accept()
            with accepted:
                accepted.settimeout(10)
                if accepted.recv(5) == b"hello":
                    return True


def test_it_forwards_and_comes_back_at_the_same_address(
    tunnel: Callable[..., SshTunnel], here: socket.socket, server: Sshd
) -> None:
    made, port = tunnel(), here.getsockname()[1]
    assert not made.alive() and made.address() is None
    at = made.start(port)
    assert (at.host, at.scheme) == (server.address, "tcp") and made.start(port) == at, "started once"
    assert made.alive() and made.note() == "" and passes(made, here)
    (client,) = clients()
    assert os.getsid(client.pid) == client.pid != os.getsid(0), "an interrupted cell does not reach it"
    client.kill()
    eventually(lambda: not made.alive(), 10, "it notices")
    assert made.address() is None
    assert made.start(port) == at, "the join code stays good"
    assert passes(made, here)
    server.stop()
    eventually(lambda: not made.alive(), 10, "it notices that the server went away")
    with pytest.raises(ConfigError, match="its ssh port does not answer"):
        made.start(port)
    assert not clients()
    server.start("GatewayPorts clientspecified")
    assert made.start(port) == at and passes(made, here)
    made.stop()
    made.stop()
    assert not clients() and not made.alive()


def test_where_the_server_listens_for_itself_only_it_says_what_to_do(
    tunnel: Callable[..., SshTunnel], here: socket.socket, tmp_path: Path
) -> None:
    with running(tmp_path / "server", "GatewayPorts no", address="127.0.0.2") as other:
        made = tunnel(of=other)
        at = made.start(here.getsockname()[1])
        assert at.host == "127.0.0.1", "what an ssh -L on the worker's machine leads to"
        there = f"-p {other.port} {other.user}@127.0.0.2"
        assert f"ssh -N -L {at.port}:127.0.0.1:{at.port} {there} " in made.note(), (
            "the worker's machine has no such alias"
        )
        assert "GatewayPorts clientspecified" in made.note() and "\n" not in made.note()
        assert passes(made, here)
        made.stop()
        assert made.note() == ""


def test_each_refusal_says_why_and_what_to_do(
    tunnel: Callable[..., SshTunnel], server: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(made: SshTunnel) -> str:
        with pytest.raises(ConfigError) as told:
            made.start(4242)
        assert "\n" not in str(told.value) and not made.alive() and not clients()
        return str(told.value)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"does not listen on port {port} for us" in said(tunnel(f"relay:{port}"))
    assert "its ssh port does not answer" in said(tunnel("relay", "-p", str(free_port())))
    assert "ssh-copy-id" in said(tunnel("relay", "-o", f"IdentityFile={server.folder}/stranger", "-o", "User=nobody"))
    assert "finds no machine called no.such.machine.invalid" in said(tunnel("no.such.machine.invalid"))
    (server.folder / "known").unlink()
    unknown = said(tunnel())
    assert "does not know the host key" in unknown and "StrictHostKeyChecking=accept-new relay exit" in unknown
    server.trust()
    monkeypatch.setenv("PATH", "/nowhere")
    assert "there is no ssh on this machine" in said(tunnel())


def test_a_changed_host_key_is_a_warning_and_nothing_is_sent(
    tunnel: Callable[..., SshTunnel], here: socket.socket, tmp_path: Path
) -> None:
    with running(tmp_path / "server", "AllowTcpForwarding no") as other:
        for what in ("relay", f"relay:{free_port()}"):
            with pytest.raises(ConfigError, match="forbids port forwarding"):
                tunnel(what, of=other).start(4242)
        other.stop()
        other.new_key("host")
        other.start()
        with pytest.raises(ConfigError, match=r"WARNING: relay shows another host key.*ssh-keygen .*-R"):
            tunnel(of=other).start(here.getsockname()[1])
        other.trust()
        assert passes_once(tunnel(of=other), here)


def passes_once(made: SshTunnel, here: socket.socket) -> bool:
    made.start(here.getsockname()[1])
    return passes(made, here)


def test_a_server_that_says_nothing_is_left_in_time_and_so_is_what_ssh_started(
    tunnel: Callable[..., SshTunnel], monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = ("-o", "ProxyCommand=sleep 77")
    monkeypatch.setattr(ssh, "START_S", 0.5)
    with pytest.raises(ConfigError, match=r"did not forward a port within 0\.5 s"):
        tunnel("relay", *silent).start(4242)
    monkeypatch.setattr(ssh, "START_S", 30.0)
    made = tunnel("relay", *silent)
    main = threading.main_thread().ident
    threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        made.start(4242)
    stopper = threading.Timer(0.5, made.stop)
    stopper.start()
    with pytest.raises(ConfigError):  # a stop breaks off a start
        made.start(4242)
    stopper.join()
    assert not clients()
    assert not any("77" in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))


def test_what_a_killed_program_left_is_ended_by_the_next_start(
    tunnel: Callable[..., SshTunnel], here: socket.socket, server: Sshd
) -> None:
    code = (
        "import os, signal, sys\nfrom guava_nb.tunnels.ssh import SshTunnel\n"
        f"tunnel = SshTunnel('relay', ('-F', {str(server.config)!r}))\n"
        f"tunnel.start({here.getsockname()[1]})\n"
        "print(tunnel._client._process.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = psutil.Popen([sys.executable, "-c", code], stdout=-1, text=True)
    orphan = psutil.Process(int(done.stdout.readline()))
    done.stdout.close()
    assert done.wait(20) == -signal.SIGKILL and orphan.is_running()
    stranger = tunnel()
    stranger.start(here.getsockname()[1])
    assert orphan in psutil.wait_procs([orphan], 10)[0]  # told to end, it takes its moment
    second = tunnel()
    second.start(here.getsockname()[1])
    assert stranger.alive(), "what a living program has is left alone"


@pytest.mark.parametrize(
    "what", ["", "@", "me@", "-oProxyCommand=touch", "me@-oProxyCommand=touch", "host:port", "host:0"]
)
def test_what_names_no_host_is_refused(what: str) -> None:
    with pytest.raises(ConfigError):
        SshTunnel(what)
