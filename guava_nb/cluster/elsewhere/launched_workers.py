"""Workers of a session that a launcher starts on other machines, and ends with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.notices import Notices
from guava_nb.cluster.session_file import SessionFile
from guava_nb.config import DistributedConfig
from guava_nb.config.state_folder import state_folder
from guava_nb.errors import ClusterError, ConfigError, GuavaError
from guava_nb.launchers.launcher import Launcher, Order
from guava_nb.launchers.launches import Launches
from guava_nb.launchers.registry import make_launcher
from guava_nb.link.listener import Listener
from guava_nb.link.tunnel_keeper import TunnelKeeper
from guava_nb.protocol.joincode import JoinCode
from guava_nb.transport.tcp import is_loopback

__all__ = ["LaunchedWorkers", "launch_as_standing"]

#: Starts workers for every session that this process opens: a `guava run --orchestrate` has its other ranks.
_standing: list[tuple[Callable[[], Launcher], str]] = []


def launch_as_standing(make: Callable[[], Launcher], host: str = "") -> None:
    """Have each session that this process opens from now on begin with a launcher that `make` gives.

    Args:
        host: by which its workers reach this machine, where they are on others and the session names no way of its own.
    """
    _standing.append((make, f"direct:{host}" if host else ""))


class LaunchedWorkers:
    """What a session lets its user do with launchers."""

    _open_cluster: Callable[[], Cluster]
    _listener: Listener | None
    _keeper: TunnelKeeper | None
    _file: SessionFile | None
    _notices: Notices
    config: DistributedConfig
    expect_workers: Callable[[int], None]
    _launches: Launches | None = None

    def launch_on(self, on: Launcher | str) -> Launcher:
        """Have workers started by ssh, Slurm, Kubernetes, Ray, Docker or another package's launcher; returns the launcher.

        They join by themselves, in seconds or when a queue lets them; `wait_for_workers` waits. They end with the session.

        Args:
            on: as in `ssh:host1,host2`, `slurm:8,gpus=1`, `k8s:8,image=IMAGE`, `ray:8` or `docker:2`; the README of
                `guava_nb.launchers` has all that may stand there.

        Raises:
            ClusterError: the session is not open, or only dials.
            ConfigError: something that it needs is missing; nothing was started, or it was ended again.
        """
        self._open_cluster()
        if self._listener is None:
            raise ClusterError("this session does not listen: open() makes it listen, then workers can join")
        launcher, text = (make_launcher(on), on) if isinstance(on, str) else (on, "")
        self._have_launches().start(launcher, text, self._order())
        return launcher

    def launched(self, text: str) -> Launcher | None:
        """The launcher that this text started, here or before the kernel was started anew, if it may still bring workers."""
        return self._have_launches().find(text)

    def wait_for_launched(self, count: int, limit_s: float) -> int:
        """Wait until so many workers are here, no launcher can bring another one, or the time is over; returns their number.

        Raises:
            ConfigError: those that were started have ended; it says why.
        """
        cluster, until = self._open_cluster(), time.monotonic() + limit_s
        while (here := len(cluster.roster.ready())) < count and time.monotonic() < until:
            if self._launches is not None and (why := self._launches.failure()):
                raise ConfigError(f"all workers that were started elsewhere have ended before they joined: {why}")
            with suppress(GuavaError):
                cluster.wait_for(count, min(1.0, max(0.0, until - time.monotonic())), None)
        return here

    @staticmethod
    def _standing_way() -> str:
        """The tunnel that standing launchers need; "" for none."""
        return next((way for _, way in _standing if way), "")

    def _first_launchers(self) -> list[tuple[Launcher, str]]:
        """What a new session begins with, each with its text.

        Raises:
            ConfigError: `workers_on` of the configuration cannot be read.
        """
        on = self.config.workers_on
        return [*((make(), "") for make, _ in _standing), *([(make_launcher(on), on)] if on else [])]

    def _launch_first(self, launchers: list[tuple[Launcher, str]]) -> None:
        """Start them, less what goes on of a killed process; so many workers are expected, unless the configuration says."""
        for launcher, text in launchers:
            if not text or self.launched(text) is None:
                self._have_launches().start(launcher, text, self._order())
        count = sum(launcher.count for launcher, _ in launchers)
        if count and self.config.origin("num_workers") == "default":
            self.expect_workers(count)

    def _have_launches(self) -> Launches:
        if self._launches is None:
            path = None if self._file is None else self._file.path.with_suffix(".launched")
            self._launches = Launches(self._tell_launched, path)
        return self._launches

    def _order(self) -> Order:
        listener, keeper = self._listener, self._keeper
        assert listener is not None
        code = listener.join_code() if keeper is None else keeper.code
        folder: Path = state_folder() / "launched"
        return Order(code, not is_loopback(code.host), listener.port, folder, self._tell_launched)

    def _tell_launched(self, sentence: str) -> None:
        self._notices.add(sentence, "launched")

    def _follow_launched(self, code: JoinCode) -> None:
        if self._launches is not None:
            self._launches.follow(code)

    def _end_launched(self) -> None:
        """End what this session started, and what a killed kernel had started for it."""
        if self._launches is not None or self._file is not None:
            self._have_launches().end()
        self._launches = None
