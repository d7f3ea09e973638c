"""pyngrok's whole path against an agent of our own: what passes, what it survives, what is said when it fails.

The agent is a program of the tests (tests/support/fake_ngrok.py) with the real one's lines, local interface and failures;
they were compared with those of a real agent of version 2 without a network.
"""

from __future__ import annotations

import _thread
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from guava_nb.errors import ConfigError
from guava_nb.link.session_events import MessageArrived
from guava_nb.tunnels import NgrokHttpTunnel, NgrokTunnel, agent, make_tunnel
from guava_nb.tunnels.ngrok_errors import CODES, TOKEN_CODES, blaming
from guava_nb.tunnels.tokens import VARIABLE
from guava_nb.tunnels.tunnel import Address
from tests.support.console import Console
from tests.support.links import FOREVER, exchange, nothing_left_behind, world
from tests.support.ngrok_agent import TOKEN, FakeNgrok
from tests.support.processes import PlainTraining, Session, eventually, loader

pytest.importorskip("pyngrok")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the fake agent is started by its first line")

#: What the server says to an agent that wants a session; all others come when it wants an endpoint.
AT_START = (103, 105, 107, 108, 120, 121, 4018, 9040)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNgrok]:
    made = FakeNgrok(tmp_path / "fake")
    for name, value in {**made.environment, VARIABLE: TOKEN, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield made
    left = made.running()
    made.close()
    assert left == [] and made.leftovers() == []


@pytest.fixture
def tunnel(fake: FakeNgrok) -> Iterator[NgrokTunnel]:
    made = NgrokTunnel()
    yield made
    made.stop()


class Echo:
    """Answers each connection with what it sends."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                stream, _ = self._server.accept()
            except OSError:
                return
            with stream:
                while data := stream.recv(1 << 16):
                    stream.sendall(data)

    def __enter__(self) -> Echo:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def answers(at: Address | None, context: ssl.SSLContext | None = None) -> bool:
    """Whether what is sent there comes back."""
    assert at is not None
    with socket.create_connection((at.host, at.port), 10) as plain:
        stream = plain if context is None else context.wrap_socket(plain)
        stream.sendall(b"hello")
        return stream.recv(5) == b"hello"


def refused(tunnel: NgrokTunnel) -> str:
    with pytest.raises(ConfigError) as told:
        tunnel.start(4242)
    assert not tunnel.alive() and tunnel.address() is None
    assert TOKEN not in str(told.value) and "\n" not in str(told.value)
    assert told.value.__cause__ is None, "what pyngrok raised may hold the token"
    return str(told.value)


# ------------------------------------------------------------------------------------------------------------- passing


def test_bytes_pass_and_five_starts_make_one_endpoint(fake: FakeNgrok, tunnel: NgrokTunnel) -> None:
    with nothing_left_behind():
        with Echo() as echo:
            at = tunnel.start(echo.port)
            assert at.scheme == "tcp" and answers(at)
            assert {tunnel.start(echo.port) for _ in range(4)} == {at}
            assert (tunnel.alive(), tunnel.address()) == (True, at)
            told = agent._WITHOUT_PROXY.open(f"http://{fake.notes()[fake.only()]['web']}/api/tunnels").read()
            assert told.count(b"public_url") == 1
        tunnel.stop()
        tunnel.stop()
    assert fake.running() == [] and not tunnel.alive() and tunnel.address() is None


def test_another_port_is_another_tunnel(fake: FakeNgrok, tunnel: NgrokTunnel) -> None:
    with Echo() as one, Echo() as two:
        first = tunnel.start(one.port)
        assert first != tunnel.start(two.port) and answers(tunnel.address())
        fake.only()


def certificate(folder: Path) -> tuple[str, ssl.SSLContext]:
    """Of the operator's edge: the file that its server reads, and what trusts it."""
    from datetime import datetime, timedelta, timezone
    from ipaddress import ip_address

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(timezone.utc)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "edge")])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    pem = made.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = folder / "edge.pem"
    path.write_bytes(pem + secret)
    context = ssl.create_default_context(cadata=pem.decode())
    context.check_hostname = False
    return str(path), context


def test_the_http_kind_ends_its_own_tls_and_passes_the_rest(fake: FakeNgrok) -> None:
    path, context = certificate(fake.folder)
    fake.plan(certificate=path)
    tunnel = make_tunnel("ngrok-http")
    assert isinstance(tunnel, NgrokHttpTunnel)
    with Echo() as echo:
        at = tunnel.start(echo.port)
        assert at.scheme == "wss" and answers(at, context)
        tunnel.stop()


def test_real_addresses_are_read_as_they_are_given() -> None:
    from guava_nb.tunnels.ngrok import _address

    assert _address("tcp://0.tcp.eu.ngrok.io:17234") == ("0.tcp.eu.ngrok.io", 17234, "tcp")
    assert _address("https://team-of-mine.ngrok-free.dev") == ("team-of-mine.ngrok-free.dev", 443, "wss")
    for url in ("tcp://0.tcp.eu.ngrok.io", "", "udp://host:5"):
        with pytest.raises(ConfigError, match="no address"):
            _address(url)


def test_a_session_exchanges_messages_through_it(fake: FakeNgrok, tunnel: NgrokTunnel) -> None:
    with world(FOREVER) as made:
        ours, theirs = made.dial(tunnel.start(made.listener.port).port)
        exchange(made, ours, theirs, 12)
        assert len(made.here.of(MessageArrived)) == 48


def test_two_workers_train_through_it(
    fake: FakeNgrok, tunnel: NgrokTunnel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support import processes

    monkeypatch.setenv("PYTHONPATH", str(processes.ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    session = Session(tmp_path, num_workers=2)
    try:
        at = tunnel.start(session.orch.join_code.port)
        real = processes.launch
        monkeypatch.setattr(processes, "launch", lambda code, *a: real(code.with_address(at.host, at.port), *a))
        session.ensure(2)
        run = session.train(loader(), epochs=25)
        session.assert_undisturbed(run, PlainTraining(tmp_path, loader()).epochs(25))
        told = agent._WITHOUT_PROXY.open(f"http://{fake.notes()[fake.only()]['web']}/api/tunnels").read()
        assert b'"count": 4' in told, "two connections a worker, however many steps"
    finally:
        session.close()


# -------------------------------------------------------------------------------------------------------------- secrets


def test_the_token_is_where_only_this_user_reads(
    fake: FakeNgrok, tunnel: NgrokTunnel, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = tmp_path / ".config" / "ngrok" / "ngrok.yml"
    tunnel.start(4242)
    note = fake.notes()[fake.only()]
    assert note["authtoken"] == TOKEN, "the agent has it"
    for process in psutil.process_iter(["cmdline"]):
        assert not any(TOKEN in word for word in process.info["cmdline"] or ()), process
    (config,) = fake.folder.glob("guava_nb-tunnels-*/ngrok-*/ngrok.yml")
    assert config.stat().st_mode & 0o777 == 0o600 and config.parent.stat().st_mode & 0o777 == 0o700
    assert not own.exists() and TOKEN not in repr(tunnel) and os.environ[VARIABLE] == TOKEN
    tunnel.stop()
    assert not config.exists()
    fake.plan(start=105)
    refused(tunnel)
    printed = capfd.readouterr()
    assert TOKEN not in printed.out + printed.err and "ERR_NGROK" not in printed.err


def test_a_refused_token_is_asked_for_again(fake: FakeNgrok, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyngrok import conf

    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(conf, "_default_pyngrok_config", conf.PyngrokConfig())  # it keeps what the environment had
    asked: list[str] = []

    def ask() -> str:
        asked.append("once")
        return TOKEN

    tunnel = make_tunnel("ngrok", ask)
    fake.plan(start=107)
    for _ in range(2):
        with pytest.raises(ConfigError, match="ERR_NGROK_107"):
            tunnel.start(4242)
    fake.plan()
    tunnel.start(4242)
    os.kill(fake.only(), signal.SIGKILL)
    eventually(lambda: not tunnel.alive(), 10, "its end is seen")
    tunnel.start(4242)
    assert len(asked) == 3, "once for each refusal, and not again once it was good"
    monkeypatch.setattr(tunnel, "_found", None)
    tunnel.stop()
    with ThreadPoolExecutor(1) as pool, pytest.raises(ConfigError, match="none was found"):
        pool.submit(tunnel.start, 4242).result()  # no other thread can ask
    tunnel.stop()


# ------------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("code", CODES)
def test_every_code_comes_out_as_its_sentence(fake: FakeNgrok, tunnel: NgrokTunnel, code: int) -> None:
    fake.plan(**{"start" if code in AT_START else "create": code})
    words = blaming(CODES[code], f"the environment variable {VARIABLE}") if code in TOKEN_CODES else CODES[code]
    assert refused(tunnel) == f"ngrok opened no tunnel: {words} (ERR_NGROK_{code})"
    assert fake.running() == []


def test_an_unknown_code_keeps_its_words(fake: FakeNgrok, tunnel: NgrokTunnel) -> None:
    fake.plan(start=9999, text="The moon is full.\\nYour authtoken: {token}")
    assert refused(tunnel).endswith("The moon is full. Your authtoken: (authtoken) (ERR_NGROK_9999)")
    fake.plan(create=9999, text="The moon is full.\\nYour authtoken: {token}")
    assert refused(tunnel).endswith("The moon is full. Your authtoken: (authtoken) (ERR_NGROK_9999)")


@pytest.mark.parametrize(
    ("plan", "limit_s", "words"),
    [
        ({"silent": True}, 1.5, "said nothing for 1.5 s and was ended"),
        ({"unreachable": True}, 25, "cannot reach ngrok's servers .*no such host.*VPN or firewall"),
        ({"slow_s": 60}, 1.5, "had no session with ngrok's servers after 1.5 s"),
        ({"killed": True}, 25, "ended while it was starting and gave no reason"),
        ({"web_taken": 3}, 25, "found its port for its own page taken, three times"),
        ({"version": "2.3.41"}, 25, "has version 2.3.41, and only 3 and newer work"),
    ],
)
def test_a_start_that_fails_ends_by_our_own_deadline(
    fake: FakeNgrok,
    tunnel: NgrokTunnel,
    monkeypatch: pytest.MonkeyPatch,
    plan: dict[str, Any],
    limit_s: float,
    words: str,
) -> None:
    monkeypatch.setattr(agent, "START_S", limit_s)
    monkeypatch.setattr(agent, "REACH_S", 0.2)
    fake.plan(**plan)
    with nothing_left_behind(), pytest.raises(ConfigError, match=words):
        tunnel.start(4242)
    assert fake.running() == [] and fake.leftovers() == []


def test_a_slow_start_and_a_taken_port_are_no_failures(fake: FakeNgrok, tunnel: NgrokTunnel) -> None:
    fake.plan(slow_s=0.5, web_taken=2)
    with Echo() as echo:
        assert answers(tunnel.start(echo.port))


def test_an_agent_that_does_not_end_when_asked_is_ended(
    fake: FakeNgrok, tunnel: NgrokTunnel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("guava_nb.tunnels.records.GRACE_S", 0.2)
    fake.plan(ignores=["SIGTERM"])
    tunnel.start(4242)
    tunnel.stop()
    assert fake.running() == []


def test_an_interrupt_while_it_starts_leaves_nothing(fake: FakeNgrok, tunnel: NgrokTunnel) -> None:
    fake.plan(silent=True)

    def interrupt() -> None:
        fake.only()
        _thread.interrupt_main()

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        tunnel.start(4242)
    assert fake.running() == [] and fake.leftovers() == [] and os.environ[VARIABLE] == TOKEN


def test_a_stop_breaks_off_a_start_in_another_thread(fake: FakeNgrok, tunnel: NgrokTunnel) -> None:
    fake.plan(silent=True)
    told: list[str] = []

    def start() -> None:
        with pytest.raises(ConfigError) as problem:
            tunnel.start(4242)
        told.append(str(problem.value))

    thread = threading.Thread(target=start)
    thread.start()
    fake.only()
    tunnel.stop()
    thread.join(10)
    assert told == ["the tunnel was stopped while it was starting"] and fake.running() == []
    fake.plan()
    tunnel.start(4242)
    assert tunnel.alive()


def test_a_proxy_in_the_environment_is_not_asked_for_the_loopback(
    fake: FakeNgrok, tunnel: NgrokTunnel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    tunnel.start(4242)
    assert tunnel.alive() and "no_proxy" not in os.environ


@pytest.mark.skipif(not hasattr(os, "ST_NOEXEC"), reason="this system does not tell where programs may not run")
def test_a_folder_that_runs_no_programs_does_too(
    fake: FakeNgrok, tunnel: NgrokTunnel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
    tunnel.start(4242)
    (own,) = fake.folder.glob("guava_nb-tunnels-*/ngrok-*/ngrok")
    assert own.is_symlink(), "a script of ours could not be run there"


def test_what_else_this_process_does_with_pyngrok_is_left_alone(
    fake: FakeNgrok, tunnel: NgrokTunnel, tmp_path: Path
) -> None:
    from pyngrok import conf, ngrok

    own = tmp_path / "own.yml"
    own.write_text("version: '2'\nauthtoken: another\nweb_addr: 127.0.0.1:0\n".replace(":0", f":{agent._free_port()}"))
    settings = conf.PyngrokConfig(ngrok_path=str(fake.program), config_path=str(own), config_version="2")
    with Echo() as echo:
        theirs = ngrok.connect(f"127.0.0.1:{echo.port}", "tcp", pyngrok_config=settings)
        try:
            tunnel.start(echo.port)
            assert len(fake.running()) == 2
            tunnel.stop()
            assert [found.public_url for found in ngrok.get_tunnels(settings)] == [theirs.public_url]
        finally:
            ngrok.kill(settings)


# ----------------------------------------------------------------------------------------------------------- life cycle


def test_death_is_seen_and_a_new_start_works(fake: FakeNgrok, tunnel: NgrokTunnel) -> None:
    with Echo() as echo:
        tunnel.start(echo.port)
        os.kill(fake.only(), signal.SIGKILL)
        eventually(lambda: not tunnel.alive(), 10, "its end is seen")
        assert tunnel.address() is None
        assert answers(tunnel.start(echo.port)) and tunnel.alive()


def test_a_new_address_after_a_reconnection_is_told(fake: FakeNgrok, tunnel: NgrokTunnel) -> None:
    with Echo() as echo:
        before = tunnel.start(echo.port)
        fake.reconnect()
        eventually(lambda: tunnel.address() != before, 10, "another address is told")
        assert tunnel.alive() and answers(tunnel.address())
        assert tunnel.start(echo.port) == tunnel.address(), "that is no reason for a new agent"


def test_an_agent_that_is_silent_for_long_does_not_forward(
    fake: FakeNgrok, tunnel: NgrokTunnel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tunnel.start(4242)
    monkeypatch.setattr(agent, "LOOK_S", 0.0)
    monkeypatch.setattr(agent, "ANSWER_S", 0.1)
    os.kill(fake.only(), signal.SIGSTOP)
    assert tunnel.alive(), "one late answer says nothing"
    monkeypatch.setattr(agent, "SILENT_S", 0.3)
    eventually(lambda: not tunnel.alive(), 10, "its silence is seen")
    os.kill(fake.only(), signal.SIGCONT)
    eventually(tunnel.alive, 10, "it answers again")


KERNEL = """
from guava_nb.tunnels import make_tunnel
tunnel = make_tunnel("ngrok")
answer = tunnel.start({port})
"""


def test_an_interrupted_cell_does_not_end_the_agent(fake: FakeNgrok) -> None:
    with Echo() as echo, Console() as kernel:
        at = Address(*kernel.run(KERNEL.format(port=echo.port)))
        ours = fake.only()
        # One that pyngrok starts as it does by itself: in the kernel's own process group.
        kernel.run(
            "import os, pathlib, pyngrok.conf, pyngrok.ngrok\n"
            "folder = pathlib.Path(os.environ['FAKE_NGROK'])\n"
            "(folder / 'plain.yml').write_text('version: \"2\"\\nauthtoken: none\\nweb_addr: 127.0.0.1:0\\n')\n"
            "plain = pyngrok.conf.PyngrokConfig(ngrok_path=os.environ['NGROK_PATH'], config_path=str(folder / 'plain.yml'))\n"
            "import subprocess\n"
            "words = [plain.ngrok_path, 'start', '--none', '--log', 'stdout', '--config', plain.config_path]\n"
            "other = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)\n"
            "any('tunnel session started' in line for line in other.stdout)\n"
        )
        assert len(fake.running()) == 2
        kernel.start(
            "import time\ntry:\n    print('busy', flush=True); time.sleep(60)\nexcept KeyboardInterrupt: answer = 1"
        )
        kernel.wait_line("^busy$")
        os.killpg(kernel.process.pid, signal.SIGINT)
        assert kernel.finish() == 1, "the cell was interrupted"
        assert kernel.run("answer = other.wait(10)") == 0, "the other one was too"
        assert fake.running() == [ours]
        assert answers(at) and kernel.run("answer = tunnel.alive()") is True
        kernel.run("tunnel.stop()")


def test_a_kernel_that_leaves_takes_its_agent_along(fake: FakeNgrok) -> None:
    with Console() as kernel:
        kernel.run(KERNEL.format(port=4242))
        fake.only()
    eventually(lambda: not fake.running() and not fake.leftovers(), 10, "nothing is left")


def test_after_a_killed_kernel_its_agent_is_ended_and_no_other(fake: FakeNgrok, tunnel: NgrokTunnel) -> None:
    with Console() as living, Console() as killed:
        kept = Address(*living.run(KERNEL.format(port=4242)))
        kept_pid = fake.only()
        killed.run(KERNEL.format(port=4242))
        (orphan,) = set(fake.running()) - {kept_pid}
        killed.process.kill()
        killed.process.wait(10)
        config = fake.folder / "stranger.yml"
        config.write_text("version: '2'\nauthtoken: another\nweb_addr: 127.0.0.1:0\n")
        words = [str(fake.program), "start", "--none", "--log", "stdout", "--config", str(config)]
        stranger = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        try:
            eventually(lambda: stranger.pid in fake.running(), 10, "the stranger runs")
            fake.plan(max_agents=3)  # three run, so that a fourth is refused: the orphan must go first
            tunnel.start(4242)
            assert orphan not in fake.running()
            assert {kept_pid, stranger.pid} < set(fake.running())
            fake.plan(max_agents=1)
            with pytest.raises(ConfigError, match="as many agents as its plan allows"):
                NgrokTunnel().start(4242)
        finally:
            stranger.terminate()
            stranger.wait(10)
        tunnel.stop()
        assert living.run("answer = tunnel.address()") == list(kept)
        living.run("tunnel.stop()")
