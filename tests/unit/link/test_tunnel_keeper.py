"""The keeper of a tunnel: when it starts one again, what it tells, what it leaves behind. No network."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb import DistributedConfig
from guava_nb.errors import ConfigError
from guava_nb.link import tunnel_keeper as tunnelling
from guava_nb.link.grace_period import GracePeriod
from guava_nb.link.tunnel_keeper import LONGEST_PAUSE_S, Move, TunnelKeeper, Upkeep, bind_for, fits
from guava_nb.protocol.joincode import JoinCode
from guava_nb.tunnels import Address, DirectTunnel, LocalTunnel, Tunnel
from tests.support.links import nothing_left_behind
from tests.support.processes import eventually


class ScriptedTunnel(Tunnel):
    """Does what a test says; counts its starts and stops."""

    name = "scripted"

    def __init__(self, *addresses: Address | Exception) -> None:
        self.coming = list(addresses)
        self.at: Address | None = None
        self.starts = self.stops = 0
        self.advice = ""

    def start(self, port: int) -> Address:
        self.starts += 1
        if self.at is None:
            found = self.coming.pop(0) if len(self.coming) > 1 else self.coming[0]
            if isinstance(found, Exception):
                raise found
            self.at = found
        return self.at

    def stop(self) -> None:
        self.stops += 1
        self.at = None

    def alive(self) -> bool:
        return self.at is not None

    def address(self) -> Address | None:
        return self.at

    def note(self) -> str:
        return self.advice


class ScriptedListener:
    """As much of a listener as the keeper needs."""

    def __init__(self) -> None:
        self.port, self.host = 4242, "127.0.0.1"
        self.patience = GracePeriod(30.0)
        self.secret = bytes(range(16))

    def join_code(self) -> JoinCode:
        return JoinCode.new("127.0.0.1", self.port, b"f" * 16, self.secret)

    def look(self) -> None:
        pass


HERE, THERE, BEHIND = Address("one.example", 1), Address("two.example", 2), Address("web.example", 443, "wss")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tunnelling, "LOOK_S", 0.002)
    monkeypatch.setattr(tunnelling, "FIRST_PAUSE_S", 0.002)
    notices: list[str] = []
    codes: list[JoinCode] = []
    listener: Any = ScriptedListener()
    with nothing_left_behind():
        keeper = TunnelKeeper(listener, notices.append, 60.0, codes.append)
        yield SimpleNamespace(keeper=keeper, listener=listener, notices=notices, codes=codes)
        keeper.close()


def test_the_code_leads_through_the_tunnel_and_keeps_its_secret(world: Any) -> None:
    code = world.keeper.use(ScriptedTunnel(BEHIND))
    assert (code.host, code.port, code.scheme) == ("web.example", 443, "wss")
    assert code.secret == world.listener.secret and code.fingerprint == b"f" * 16
    assert world.listener.patience.outage_s == 60.0 and world.keeper.state() == "scripted"
    assert world.notices == []


def test_a_dead_tunnel_is_started_again_and_the_same_address_needs_nobody(world: Any) -> None:
    tunnel = ScriptedTunnel(HERE, HERE)
    world.keeper.use(tunnel)
    tunnel.at = None
    eventually(lambda: tunnel.starts == 2 and len(world.notices) == 2, 10, "it is started again")
    assert "broke" in world.notices[0] and "keep their seats" in world.notices[0]
    assert "same address" in world.notices[1] and world.codes == []


def test_a_new_address_is_published_with_what_to_do(world: Any) -> None:
    tunnel = ScriptedTunnel(HERE, ConfigError("no luck yet"), THERE)
    old = world.keeper.use(tunnel)
    tunnel.advice = "do this first"
    tunnel.at = None
    eventually(lambda: len(world.notices) == 2, 10, "the new address is told")
    assert "two.example:2" in world.notices[1] and "%guava_worker NEWCODE" in world.notices[1]
    assert "Workers that are connected need nothing" in world.notices[1]
    assert world.keeper.note() == "do this first"
    tunnel.advice = ""
    assert world.keeper.note() == "", "what is mended is not told any more"
    (new,) = world.codes
    assert new == world.keeper.code == old.with_address("two.example", 2) and new.encode() not in str(world.notices)
    assert world.listener.patience.kept_until(0.0) > 0.0


def test_an_address_that_changes_by_itself_is_published_too(world: Any) -> None:
    tunnel = ScriptedTunnel(HERE)
    world.keeper.use(tunnel)
    tunnel.at = THERE
    eventually(lambda: world.codes, 10, "the new address is told")
    assert tunnel.starts == 1 and world.codes[0].address == "two.example:2"


def test_one_that_never_comes_back_is_given_up_and_can_be_tried_anew(world: Any) -> None:
    world.keeper._patience_s = 0.05
    tunnel = ScriptedTunnel(HERE, ConfigError("the account is out of bytes"))
    world.keeper.use(tunnel)
    tunnel.at = None
    eventually(lambda: len(world.notices) == 2, 10, "it is given up")
    assert "the account is out of bytes" in world.notices[1] and "%guava_up" in world.notices[1]
    assert "given up" in world.keeper.state() and "out of bytes" in world.keeper.state()
    with pytest.raises(ConfigError, match="out of bytes"):
        world.keeper.use(tunnel)
    tunnel.coming = [THERE]
    assert world.keeper.use(tunnel).address == "two.example:2"
    assert world.keeper.state() == "scripted"


def test_another_tunnel_takes_the_place_and_one_that_fails_changes_nothing(world: Any) -> None:
    first, failing, second = ScriptedTunnel(HERE), ScriptedTunnel(ConfigError("no token")), ScriptedTunnel(THERE)
    world.keeper.use(first)
    with pytest.raises(ConfigError, match="no token"):
        world.keeper.use(failing)
    assert failing.stops == 1 and first.alive() and world.keeper.code.address == "one.example:1"
    assert world.keeper.use(second).address == "two.example:2"
    assert not first.alive() and world.keeper.tunnel is second
    assert world.keeper.use(second).address == "two.example:2" and second.starts == 1, "safe to run again"
    world.keeper.use(ScriptedTunnel(THERE))
    assert len(world.notices) == 1, "the same address by another tunnel is no news: it was never down"
    world.keeper.close()
    assert not second.alive()
    with pytest.raises(ConfigError, match="closed"):
        world.keeper.use(ScriptedTunnel(HERE))


def test_a_tunnel_of_another_package_that_raises_counts_as_down(world: Any) -> None:
    tunnel = ScriptedTunnel(HERE)
    world.keeper.use(tunnel)
    tunnel.alive = lambda: 1 / 0  # type: ignore[method-assign,assignment]
    eventually(lambda: "broke" in str(world.notices), 10, "it is down")
    del tunnel.alive
    eventually(lambda: "same address" in str(world.notices), 10, "it is up again")


@given(st.lists(st.tuples(st.floats(0.01, 20), st.booleans(), st.booleans()), max_size=200))
def test_starts_come_in_growing_pauses_and_end(looks: list[tuple[float, bool, bool]]) -> None:
    upkeep, now, starts, since = Upkeep(300.0), 0.0, 0, None
    for after_s, forwards, fails in looks:
        now += after_s
        move = upkeep.look(now, forwards)
        if forwards:
            assert move is (Move.STANDS if since is None else Move.BACK)
            since, starts = None, 0
        elif since is None:
            assert move is Move.BROKE
            since = now
        elif move is Move.START:
            assert now - since < 300.0 and not upkeep.given_up
            starts += 1
            assert now - since >= 2.0 * starts, "pauses of at least two seconds"
            if fails:
                upkeep.failed(now)
            else:
                assert upkeep.look(now, True) is Move.BACK
                since, starts = None, 0
        elif move is Move.GIVE_UP:
            assert now - since >= 300.0
        else:
            assert move is Move.WAIT
    assert upkeep.given_up <= (since is not None)


def test_the_pauses_grow_to_half_a_minute() -> None:
    upkeep, starts, now = Upkeep(300.0), [], 0.0
    while not upkeep.given_up:
        if upkeep.look(now, False) is Move.START:
            starts.append(now)
            upkeep.failed(now)
        now += 1.0
    pauses = [b - a for a, b in zip(starts, starts[1:], strict=False)]
    assert pauses == sorted(pauses) and max(pauses) == LONGEST_PAUSE_S and len(starts) < 20
    assert upkeep.look(now + 1000.0, False) is Move.WAIT and upkeep.look(now + 1001.0, True) is Move.BACK


def test_where_to_listen_for_a_tunnel() -> None:
    assert bind_for(ScriptedTunnel(HERE), DistributedConfig()) == "127.0.0.1"
    assert bind_for(DirectTunnel(), DistributedConfig()) == "0.0.0.0"
    assert bind_for(DirectTunnel(), DistributedConfig(master_ip="192.0.2.7")) == "192.0.2.7"
    assert bind_for(LocalTunnel(), DistributedConfig(master_ip="0.0.0.0")) == "0.0.0.0"
    for tunnel, address in ((ScriptedTunnel(HERE), "192.0.2.7"), (DirectTunnel(), "127.0.0.1")):
        assert not fits(tunnel, address)
        with pytest.raises(ConfigError, match=rf"master_ip is {address} \(from argument\).*leave master_ip out"):
            bind_for(tunnel, DistributedConfig().replace(master_ip=address))
