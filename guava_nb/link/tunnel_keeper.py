"""Keeps a listener reachable through a tunnel: starts it, watches it, starts it again, tells when its address changed.

The listener and its secret stay the same all the while, so a worker that has joined keeps session and state and only has to
learn the new code. One thread watches; what it does when is decided by `Upkeep`, which is pure.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from enum import Enum

from guava_nb.config import DistributedConfig
from guava_nb.errors import ConfigError, GuavaError
from guava_nb.link.listener import Listener
from guava_nb.protocol.joincode import JoinCode
from guava_nb.tunnels import LOOPBACK, Address, Tunnel

__all__ = ["Move", "TunnelKeeper", "Upkeep", "asked_here", "bind_for", "code_behind", "fits"]

log = logging.getLogger(__name__)

#: Seconds between two looks.
LOOK_S = 1.0
#: A tunnel that came back by itself meanwhile is not started again; after that the pauses double.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 30.0
#: For the watching thread; a start that is under way ends by its own deadline and then stops what it started.
JOIN_S = 5.0


class Move(Enum):
    """What to do after a look."""

    STANDS = "nothing: it forwards"
    BROKE = "tell that it broke"
    BACK = "tell that it forwards again"
    WAIT = "nothing: it is down, and the next start is not due"
    START = "start it again"
    GIVE_UP = "tell that it is not started any more"


class Upkeep:
    """When a tunnel that is down is started again, and when that ends. Pure.

    Args:
        patience_s: from its break to the end of the trying.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._pause_s = FIRST_PAUSE_S
        self._due = 0.0
        self.down_since: float | None = None
        self.given_up = False

    def look(self, now: float, forwards: bool) -> Move:
        """Say what to do at a monotonic time."""
        if forwards:
            was_down, self.down_since, self.given_up = self.down_since is not None, None, False
            return Move.BACK if was_down else Move.STANDS
        if self.down_since is None:
            self.down_since, self._pause_s, self._due = now, FIRST_PAUSE_S, now + FIRST_PAUSE_S
            return Move.BROKE
        if self.given_up or now < self._due:
            return Move.WAIT
        if now - self.down_since >= self._patience_s:
            self.given_up = True
            return Move.GIVE_UP
        return Move.START

    def failed(self, now: float) -> None:
        """A start failed: the next one comes after a longer pause, the last one at the end of the patience."""
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        last = (self.down_since or now) + self._patience_s
        self._due = min(now + self._pause_s, max(now, last))


class TunnelKeeper:
    """A listener behind a tunnel. Thread-safe.

    Args:
        listener: that listens already, on an address that the tunnels reach.
        on_notice: gets sentences for a person; from any thread, must be quick.
        patience_s: how long a broken tunnel is started again, and how long workers are waited for meanwhile and then.
        on_code: gets the new code when the address changed; from the watching thread.

    Raises:
        GuavaError: from `open` and `use`: the tunnel cannot be started; then what ran before runs on.
    """

    def __init__(
        self,
        listener: Listener,
        on_notice: Callable[[str], None],
        patience_s: float,
        on_code: Callable[[JoinCode], None] = lambda code: None,
    ) -> None:
        self._listener, self._notice, self._patience_s, self._on_code = listener, on_notice, patience_s, on_code
        self._lock = threading.Lock()  # held while the tunnel is started, which may take half a minute
        self._tunnel: Tunnel | None = None
        self._address: Address | None = None
        self._upkeep = Upkeep(patience_s)
        self._problem = self._fault = ""
        self._ended, self._closed = threading.Event(), False
        self._thread: threading.Thread | None = None

    @property
    def tunnel(self) -> Tunnel | None:
        """The one in use."""
        return self._tunnel

    @property
    def code(self) -> JoinCode:
        """The join code that leads through the tunnel as it stands now, or stood last."""
        assert self._address is not None
        return code_behind(self._listener, self._address)

    def state(self) -> str:
        """A few words on how the tunnel stands, for people."""
        if self._tunnel is None:
            return ""
        down_since = self._upkeep.down_since
        if down_since is None:
            return self._tunnel.name
        away = f"{self._tunnel.name}, down for {time.monotonic() - down_since:.0f} s"
        problem = f" ({self._problem})" if self._problem else ""
        return f"{away}, {'given up' if self._upkeep.given_up else 'being started again'}{problem}"

    def note(self) -> str:
        """What has to be done so that workers get through the tunnel; "" for nothing."""
        return "" if self._tunnel is None else self._tunnel.note()

    def use(self, tunnel: Tunnel) -> JoinCode:
        """Lead through this tunnel from now on; the code changes, workers that are here keep seat and state. Returns the code.

        The one in use: starts it now if it is down.

        Raises:
            GuavaError: it cannot be started; what was used before is used on.
        """
        with self._lock:
            if tunnel is self._tunnel:
                self._ensure()
            else:
                self._take(tunnel)
        return self.code

    def _take(self, tunnel: Tunnel) -> None:
        if self._ended.is_set():
            raise ConfigError("the session was closed while its tunnel was started")
        if not fits(tunnel, self._listener.host):
            raise ConfigError(
                f"this session listens on {self._listener.host}, and the tunnel {tunnel.name} needs {tunnel.bind}: close the "
                "session first (%guava_down), then open it with that tunnel"
            )
        first = self._tunnel is None and self._address is None
        try:
            address = usable(tunnel.start(self._listener.port))
        except BaseException:
            tunnel.stop()  # an interrupt may come between any two of its instructions
            raise
        before, self._tunnel = self._tunnel, tunnel
        was_down = self._upkeep.down_since is not None
        self._upkeep, self._problem = Upkeep(self._patience_s), ""
        self._listener.patience.outage_s = self._patience_s
        if first:
            self._address = address
            self._thread = threading.Thread(target=self._watch, name="guava-tunnel", daemon=True)
            self._thread.start()
        elif was_down or address != self._address:
            self._arrive(address)
        if before is not None:
            before.stop()

    def _ensure(self) -> None:
        assert self._tunnel is not None
        if self._look_at() is None:
            self._tunnel.stop()
            address = usable(self._tunnel.start(self._listener.port))
            self._upkeep.look(time.monotonic(), True)
            self._arrive(address)

    def begin_close(self) -> None:
        """First half of `close`: start nothing any more. The tunnel still forwards, for the listener's goodbyes."""
        self._ended.set()

    def close(self) -> None:
        """Stop watching, then the tunnel. Safe to call twice."""
        self.begin_close()
        self._closed = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)
        if self._tunnel is not None:
            self._tunnel.stop()

    # ---------------------------------------------------------------------------------------------- the watching thread

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            with self._lock:
                try:
                    self._look()
                except (
                    Exception
                ) as problem:  # of a callback, or of another package's tunnel: the watching thread must live
                    log.exception("while looking after the tunnel")
                    self._tell_fault(problem)

    def _tell_fault(self, problem: Exception) -> None:
        text = f"{type(problem).__name__}: {problem}"
        if text != self._fault:  # a fault that stays is told once
            self._fault = text
            self._notice(
                f"the part of guava_nb that watches the tunnel failed once: {text}. The tunnel is still watched, and is started "
                "again when it ends; you need to do nothing"
            )

    def _look(self) -> None:
        address, now = self._look_at(), time.monotonic()
        move = self._upkeep.look(now, address is not None)
        if move is Move.BROKE:
            self._break(now)
        elif move is Move.START:
            self._start_again()
        elif move is Move.GIVE_UP:
            self._give_up()
        elif address is not None and (move is Move.BACK or address != self._address):
            self._arrive(address)

    def _look_at(self) -> Address | None:
        """Where it forwards from now; None when it is down. Another package's tunnel may raise anything, or not tell."""
        assert self._tunnel is not None
        try:
            if not self._tunnel.alive():
                return None
            address = self._tunnel.address() or self._address
            return None if address is None else usable(address)
        except Exception as problem:
            self._problem = f"{type(problem).__name__}: {problem}"
            return None

    def _break(self, now: float) -> None:
        assert self._tunnel is not None
        self._listener.patience.went_down(now)
        self._listener.look()
        self._notice(
            f"the tunnel {self._tunnel.name} broke: it is started again for up to {self._patience_s:g} s; workers wait as "
            "long, and keep their seats and state"
        )

    def _start_again(self) -> None:
        assert self._tunnel is not None
        try:
            self._tunnel.stop()
            address = usable(self._tunnel.start(self._listener.port))
        except Exception as problem:
            if not isinstance(problem, GuavaError):
                log.exception("the tunnel %s could not be started", self._tunnel.name)
            self._problem = str(problem)
            self._upkeep.failed(time.monotonic())
            return
        if self._ended.is_set():
            if self._closed:
                self._tunnel.stop()  # again: `close` did not wait for this start
            return
        self._upkeep.look(time.monotonic(), True)
        self._arrive(address)

    def _give_up(self) -> None:
        assert self._tunnel is not None
        self._notice(
            f"the tunnel {self._tunnel.name} could not be started again within {self._patience_s:g} s"
            + (f" ({self._problem})" if self._problem else "")
            + "; %guava_up (in Python: open()) tries anew, %guava_up --tunnel takes another one"
        )

    def _arrive(self, address: Address) -> None:
        """It forwards again, or from somewhere else."""
        assert self._tunnel is not None
        moved, self._address, self._problem = address != self._address, address, ""
        self._listener.patience.came_up(time.monotonic(), moved)
        self._listener.look()
        if not moved:
            self._notice(
                f"the tunnel {self._tunnel.name} is up again at the same address: workers come back by themselves"
            )
            return
        code = self.code
        self._notice(
            f"the tunnel has a new address: {code.address}. Workers that are connected need nothing; one that is away needs "
            f"the new code, which %guava_up --show-code shows: run %guava_worker NEWCODE there, within {self._patience_s:g} s, "
            "and it goes on where it was"
        )
        self._on_code(code)


def usable(address: Address) -> Address:
    """Return a tunnel's address, if a join code can carry it: another package's tunnel may give anything.

    Raises:
        ConfigError: it cannot.
    """
    try:
        checked = Address(*address)
        JoinCode.new(checked.host, checked.port, scheme="tcp").with_address(
            checked.host, checked.port, None if checked.scheme == "tcp" else checked.scheme
        )
    except (TypeError, ValueError, AttributeError) as problem:
        raise ConfigError(f"the tunnel gave {address!r}, which is no address to dial: {problem}") from problem
    return checked


def code_behind(listener: Listener, address: Address) -> JoinCode:
    """Return the code that leads to a listener through a tunnel's address."""
    scheme = None if address.scheme == "tcp" else address.scheme
    return listener.join_code().with_address(address.host, address.port, scheme)


def fits(tunnel: Tunnel, host: str) -> bool:
    """Whether a tunnel reaches who listens on this address."""
    if host in ("", "0.0.0.0", "::"):
        return True
    is_loopback = host in (LOOPBACK, "localhost", "::1")
    return is_loopback if tunnel.bind == LOOPBACK else not is_loopback


def bind_for(tunnel: Tunnel, config: DistributedConfig) -> str:
    """Return the address to listen on for a tunnel: its own, unless the configuration names one that fits.

    Raises:
        ConfigError: the configuration names one that this tunnel cannot reach.
    """
    if config.origin("master_ip") == "default":
        return tunnel.bind
    if not fits(tunnel, config.master_ip):
        raise ConfigError(
            f"master_ip is {config.master_ip} (from {config.origin('master_ip')}), and the tunnel {tunnel.name} leads to "
            f"{'the loopback' if tunnel.bind == LOOPBACK else 'an address that others reach'}: leave master_ip out (--host in "
            f"%guava_up), or set it to {tunnel.bind}"
        )
    return config.master_ip


def asked_here(ask: Callable[[], str] | None) -> Callable[[], str] | None:
    """Ask only in the thread that this is called in; others get its last answer: their question would not be seen."""
    if ask is None:
        return None
    here, answer = threading.get_ident(), ""

    def asked() -> str:
        nonlocal answer
        if threading.get_ident() == here:
            answer = ask()
        return answer

    return asked
