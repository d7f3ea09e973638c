"""A real nginx that ends TLS before the listener: WebSocket through an operator's door, with everything it does to us."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from guava_nb.errors import AuthenticationError, LinkBroken
from guava_nb.link.dialler import DialledSession, dial
from guava_nb.link.session import Session as LinkSession
from guava_nb.link.session_events import MessageArrived, SessionResumed, SessionSuspect
from guava_nb.protocol.joincode import JoinCode
from guava_nb.protocol.messages import Channel
from guava_nb.training.run import Run
from tests.support.links import QUICK, World, exchange, nothing_left_behind, numbered, world
from tests.support.nginx import Nginx, why_not
from tests.support.processes import ROOT, PlainTraining, Session, eventually, loader

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
IDLE_S = 1


def through(code: JoinCode, nginx: Nginx) -> JoinCode:
    return code.with_address("localhost", nginx.port, "wss")


def joined(made: World, nginx: Nginx) -> tuple[DialledSession, LinkSession]:
    ours = dial(through(made.listener.join_code(), nginx), made.there, made.options)
    made.dialled.append(ours)
    return ours, next(s for s in made.listener.sessions if s.session_id == ours.session_id)


@pytest.fixture
def trusting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where nginx keeps its things; this process trusts its authority."""
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
    return tmp_path


def test_a_thousand_messages_take_two_sockets(trusting: Path) -> None:
    options = replace(QUICK, silence_s=30.0)
    with nothing_left_behind(), world(options) as made, Nginx(trusting, made.listener.port) as nginx:
        ours, theirs = joined(made, nginx)
        for number in range(1000):
            theirs.send(*numbered(number, Channel.GRADIENT, 2000))
        made.there.wait_for(MessageArrived, 1000)
        exchange_one_each_way(made, ours, theirs)
        assert made.listener.stats.accepted == 2
        assert made.listener.stats.refused == {}
        made.close()
        assert nginx.opened() == ["101 /guava"] * 2


def exchange_one_each_way(made: World, ours: LinkSession, theirs: LinkSession) -> None:
    before = len(made.here.of(MessageArrived))
    ours.send(*numbered(before, Channel.BATCH, 3_000_000))
    made.here.wait_for(MessageArrived, before + 1)


def test_heartbeats_keep_both_idle_connections(trusting: Path) -> None:
    options = replace(QUICK, heartbeat_s=0.3, silence_s=30.0)
    with nothing_left_behind(), world(options) as made, Nginx(trusting, made.listener.port, IDLE_S) as nginx:
        ours, theirs = joined(made, nginx)
        quiet_since = time.monotonic()
        eventually(lambda: time.monotonic() - quiet_since > 2.5 * IDLE_S, 30, "the proxy's patience has passed twice")
        assert made.here.of(SessionSuspect) == made.there.of(SessionSuspect) == []
        assert ours.state == theirs.state == "open"
        assert made.listener.stats.accepted == 2


def test_idle_connections_that_are_cut_come_back_with_everything(trusting: Path) -> None:
    options = replace(QUICK, heartbeat_s=20.0, silence_s=60.0)  # too rare for this proxy
    with nothing_left_behind(), world(options) as made, Nginx(trusting, made.listener.port, IDLE_S) as nginx:
        ours, theirs = joined(made, nginx)
        made.there.wait_for(SessionSuspect)
        made.there.wait_for(SessionResumed)
        exchange(made, ours, theirs, 6)
        assert ours.state == "open"


def test_a_reload_under_load_loses_and_doubles_nothing(trusting: Path) -> None:
    options = replace(QUICK, silence_s=30.0)
    with nothing_left_behind(), world(options) as made, Nginx(trusting, made.listener.port) as nginx:
        ours, theirs = joined(made, nginx)
        cutting = threading.Timer(0.05, nginx.reload)
        cutting.start()
        exchange(made, ours, theirs, 40)
        made.there.wait_for(SessionResumed)
        cutting.join()


def test_what_the_door_itself_says_is_a_sentence(trusting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with world() as made:
        code = made.listener.join_code()
        with Nginx(trusting, upstream=1) as nobody:
            with pytest.raises(LinkBroken, match=r"localhost:\d+ answered 502: the tunnel stands, but nothing listens"):
                dial(through(code, nobody), made.there, made.options)
            with pytest.raises(LinkBroken, match="answered 502"):
                dial(code.with_address("127.0.0.1", nobody.plain_port, "ws"), made.there, made.options)
            with pytest.raises(AuthenticationError, match=r"127\.0\.0\.1 shows a certificate .*SSL_CERT_FILE"):
                dial(code.with_address("127.0.0.1", nobody.port, "wss"), made.there, made.options)
            monkeypatch.delenv("SSL_CERT_FILE")
            with pytest.raises(AuthenticationError, match=r"localhost shows a certificate .* does not trust"):
                dial(through(code, nobody), made.there, made.options)


# --------------------------------------------------------------------------------------------------------- training


@pytest.fixture(scope="module")
def behind_nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Session, Nginx]]:
    folder = tmp_path_factory.mktemp("nginx")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("SSL_CERT_FILE", str(folder / "authority.pem"))
        session = Session(folder, num_workers=2, heartbeat_s=0.3, silence_s=10.0, hash_every_steps=1)
        with Nginx(folder, session.orch.join_code.port, IDLE_S) as nginx:
            session.through = lambda code: through(code, nginx)
            try:
                yield session, nginx
            finally:
                session.close()


class AtSteps:
    """A callback that acts between steps."""

    def __init__(self, actions: dict[int, Any]) -> None:
        self.actions = actions

    def on_step(self, run: Run, record: dict[str, Any]) -> None:
        self.actions.pop(record["step"], lambda: None)()


def test_training_behind_a_door_that_is_cut_and_killed(behind_nginx: tuple[Session, Nginx]) -> None:
    session, nginx = behind_nginx
    session.ensure(2)
    listener = session.orch._listener
    assert listener is not None
    opened_before = listener.stats.accepted

    def killed() -> None:
        nginx.stop()
        eventually(lambda: all(w.state == "suspect" for w in session.orch.status().workers), 10, "it is noticed")
        nginx.start()

    actions = AtSteps({3: nginx.reload, 6: killed})
    run = session.train(loader(), epochs=3, detach=True, callbacks=[actions])
    session.assert_undisturbed(run, PlainTraining(session.folder, loader()).epochs(3))
    assert not actions.actions
    eventually(lambda: sorted(session.ready()) == ["w1", "w2"], 20, "both are back, and are the same two")
    assert opened_before == 4
    assert listener.stats.accepted <= opened_before + 2 * 4  # two cuts, four connections
