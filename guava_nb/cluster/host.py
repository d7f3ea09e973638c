"""The session that an orchestrator holds open: who listens, who is dialled, which workers are here. Knows no runs."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import secrets
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.diary import Diary
from guava_nb.cluster.elsewhere.dialled_workers import DialledWorkers
from guava_nb.cluster.elsewhere.launched_workers import LaunchedWorkers
from guava_nb.cluster.notices import Notices
from guava_nb.cluster.session_file import SavedSession, SessionFile
from guava_nb.cluster.session_status import StatusWriter
from guava_nb.cluster.user_code.code_on_workers import CodeOnWorkers
from guava_nb.cluster.worker_output import OutputLog
from guava_nb.config import DistributedConfig
from guava_nb.errors import ClusterError, ConfigError
from guava_nb.install.cell import worker_cell
from guava_nb.install.wheel import Wheel, build_wheel
from guava_nb.link.listener import Listener
from guava_nb.link.options import link_options
from guava_nb.link.tunnel_keeper import TunnelKeeper, asked_here, bind_for
from guava_nb.processes.interrupts import interrupts_wait
from guava_nb.processes.local_workers import WorkerHandle, close_all, launch
from guava_nb.processes.nursery import expect_workers
from guava_nb.processes.old_logs import forget_old
from guava_nb.processes.placement import allowed_cores, describe, place, visible_gpus
from guava_nb.protocol.joincode import JoinCode
from guava_nb.status import Status
from guava_nb.tunnels import LOOPBACK, Tunnel, make_tunnel

if TYPE_CHECKING:
    from typing_extensions import Self  # of Python 3.11

__all__ = ["SessionHost"]

#: How this machine itself reaches a listener on all of its addresses; one on "::" takes IPv6 only.
_FROM_HERE = {"": LOOPBACK, "0.0.0.0": LOOPBACK, "::": "::1"}


class SessionHost(LaunchedWorkers, CodeOnWorkers):
    """The life cycle of a session, and its workers. A context manager.

    Args:
        config: settings; `overrides` replace single fields of it.

    Attributes:
        config: of the session.
        log_folder: where everything goes that workers print; made with the first line.
        diary: what happened, in a file beside the session's own; it stays when the session is over.
        goes_on: the session is that of a process that ended without closing it.
        has_moved: it listens on another port than there, so without a tunnel the join code is another one.
        local_before: workers that such processes had started, by name; they ended with them.

    Raises:
        ConfigError: a setting is wrong.
    """

    def __init__(self, config: DistributedConfig | None = None, **overrides: Any) -> None:
        """Check the settings; nothing is started before `open`."""
        self.config = (config or DistributedConfig()).replace(**overrides)
        self.config.validate()
        self._process = os.getpid()  # a copy in a forked process is not the session
        self._local: list[WorkerHandle] = []
        self._dialled = DialledWorkers()
        self._listener: Listener | None = None
        self._file: SessionFile | None = None
        self._shown: StatusWriter | None = None
        self._at_exit: Callable[[], None] = lambda: None
        self.goes_on, self.has_moved, self.local_before = False, False, list[str]()
        self._cluster: Cluster | None = None
        self._keeper: TunnelKeeper | None = None
        self._wheel: Wheel | None = None
        self._way = ""  # the text that the tunnel was made of
        self._on_code: Callable[[JoinCode], None] = lambda code: None
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
        self.log_folder = Path(tempfile.gettempdir()) / f"guava_nb-session-{name}"
        me = weakref.ref(self)  # the log's handler holds the diary, and shall not hold this
        self.diary = Diary(lambda: None if (host := me()) is None else host._diary_path(), name)
        self._notices = Notices(self.diary.add)

    # ---------------------------------------------------------------------------------------------------- life cycle

    def open(
        self,
        tunnel: Tunnel | str | None = None,
        ask: Callable[[], str] | None = None,
        on_code: Callable[[JoinCode], None] | None = None,
    ) -> JoinCode:
        """Start listening, and the tunnel; returns the join code that leads here.

        An open session returns its code again. Its tunnel is started anew if it is down; another `tunnel` takes the place
        of the one in use, and the code changes: the secret stays, so workers keep seat and state and need the new code.

        Args:
            tunnel: `NAME[:WHAT]` as in `guava_nb.tunnels.make_tunnel`, or a tunnel; None takes `tunnel` of the configuration,
                on an open session the one in use.
            ask: asks for the tunnel's authtoken where none is found; None where no person can be asked.
            on_code: gets the new code whenever a tunnel's address changes, from a thread of the session.

        Raises:
            ConfigError: the address cannot be listened on, or contradicts the tunnel; or the tunnel cannot be started. Then
                nothing is left running that did not run before.
        """
        self._on_code = on_code or self._on_code
        text, way = self._way_to(tunnel, ask)
        had_cluster, listened = self._cluster is not None, self._listener is not None
        first = [] if listened else self._first_launchers()
        try:
            if not listened:
                self._listen(self.config.master_ip if way is None else bind_for(way, self.config))
            if way is not None:
                self._lead_through(way)
                self._way = text
        except BaseException:
            if not listened:
                self._stop_listening(had_cluster)
            raise
        if not listened:
            try:
                self._launch_first(first)
            except BaseException:
                if not had_cluster:
                    self._close()
                raise
        return self.join_code

    def _way_to(self, tunnel: Tunnel | str | None, ask: Callable[[], str] | None) -> tuple[str, Tunnel | None]:
        """The text that names the tunnel to use, and the tunnel itself; None for none."""
        present = self.tunnel
        if isinstance(tunnel, Tunnel):
            return (self._way if tunnel is present else ""), tunnel
        if present is not None and tunnel in (None, "", self._way):
            return self._way, present
        text = (self.config.tunnel if tunnel is None else tunnel) or self._standing_way()
        return text, (make_tunnel(text, asked_here(ask)) if text else None)

    def _new_cluster(self) -> Cluster:
        notices, log = self._notices, OutputLog(self.log_folder)
        cluster = Cluster(log, notices.add, lambda sentence: notices.add(sentence, "run"), self.diary.add)
        cluster.least_wait_s, cluster.silence_s = self.config.grace_s, self.config.silence_s
        return cluster

    def _have_cluster(self) -> Cluster:
        if self._cluster is None:
            forget_old(self.log_folder.parent, "guava_nb-session-")
            self._cluster = self._new_cluster()
            self._notices.listen()
        return self._cluster

    def _listen(self, host: str) -> None:
        on_event, config = self._have_cluster().on_event, self.config
        options = link_options(config, self._have_cluster().payload_of)
        saved = self._saved()
        if saved is not None:
            self._have_cluster().session_id = saved.session_id
        listener = _listening(partial(Listener, options, on_event, host), config, saved)
        self._listener, self.goes_on = listener, saved is not None
        self.has_moved = saved is not None and saved.port != listener.port
        if self._file is not None:
            self.local_before = self._file.local()
            shown = listener.certificate
            pem, key = (b"", b"") if shown is None else (shown.pem, shown.key)
            session_id = self._have_cluster().session_id
            self._file.save(SavedSession(listener.secret, pem, key, listener.port, session_id))
            me = weakref.ref(self)  # a session that is dropped must not live on for this
            self._shown = StatusWriter(self._file.path, lambda: None if (host := me()) is None else host.status())
        else:
            self._at_exit = _close_at_exit(self)

    @property
    def run_path(self) -> Path | None:
        """Where the last run of this session may be noted; None where nothing of it outlives this process."""
        return None if self._file is None else self._file.run_path

    def _diary_path(self) -> Path | None:
        """Beside the session's file, or with what workers print; None before the session is open."""
        if self._cluster is None:
            return None
        return self.log_folder / "diary.txt" if self._file is None else self._file.path.with_suffix(".diary.txt")

    def _saved(self) -> SavedSession | None:
        """What a process before this one left of the session, None for nothing; holds the session's file from here on."""
        if self.config.session_file in ("", "off"):
            return None
        self._file = self._file or SessionFile.take(Path(self.config.session_file).expanduser())
        saved = self._file.load()
        if self._file.problem:
            self._notices.add(self._file.problem)
        return saved

    def _stop_listening(self, keep_cluster: bool) -> None:
        if self._listener is not None:
            self._listener.close("its tunnel could not be started")
            self._listener = None
            self._let_file_go(forget=not self.goes_on)
        if not keep_cluster and self._cluster is not None:
            self._cluster.close()
            self._notices.stop()
            self._cluster = None

    def _lead_through(self, way: Tunnel) -> None:
        assert self._listener is not None
        me, notices = weakref.ref(self), self._notices
        keeper = self._keeper or TunnelKeeper(
            self._listener, lambda sentence: notices.replace(sentence, "tunnel"), self.config.rejoin_timeout_s,
            lambda code: None if (host := me()) is None else host._has_new_code(code),
        )  # fmt: skip
        keeper.use(way)
        self._keeper = keeper
        self._follow_launched(keeper.code)

    def _has_new_code(self, code: JoinCode) -> None:
        self._follow_launched(code)
        self._on_code(code)

    @classmethod
    def dialling(cls, *join_codes: JoinCode | str, config: DistributedConfig | None = None, **overrides: Any) -> Self:
        """Make an orchestrator that does not listen and is connected to listening workers; errors as for `connect`.

        Args:
            join_codes, config, overrides: as for `connect` and the constructor.
        """
        made = cls(config, **overrides)
        try:
            made.connect(*join_codes)
        except BaseException:
            made.close()
            raise
        return made

    def connect(self, *join_codes: JoinCode | str) -> list[str]:
        """Dial workers that listen (`guava worker --listen`, `GPUTrainer`); returns their names.

        Opens the session if it is not open; then no worker can dial this side, until `open` is called. A connection that
        breaks is dialled again for `grace_s`, like any worker's. A code that is in use already changes nothing.

        Raises:
            JoinCodeError: a code is damaged; nothing was dialled.
            GuavaError: a worker cannot be reached, does not know the code, or works for another orchestrator. Those before it
                in the list stay connected.
        """
        codes = [code if isinstance(code, JoinCode) else JoinCode.decode(code) for code in join_codes]
        cluster = self._have_cluster()
        return self._dialled.join(codes, cluster, link_options(self.config, cluster.payload_of))

    @property
    def join_code(self) -> JoinCode:
        """The code that workers join with.

        Raises:
            ClusterError: the session is not open, or only dials.
        """
        self._open_cluster()
        if self._listener is None:
            raise ClusterError("this session dialled its workers and does not listen: open() makes it listen too")
        return self._listener.join_code() if self._keeper is None else self._keeper.code

    def worker_cell(self) -> str:
        """Return the cell that makes a notebook elsewhere a worker; it holds the secret, and fetches guava_nb from this session.

        Raises:
            ClusterError: the session is not open, or only dials.
            ConfigError: no wheel can be made of the package here.
        """
        code, listener = self.join_code, self._listener
        assert listener is not None
        self._wheel = self._wheel or build_wheel()
        listener.wheels.offer(self._wheel.content)
        return worker_cell(code, self._wheel)

    @property
    def tunnel(self) -> Tunnel | None:
        """The tunnel that leads here, None without one."""
        return None if self._keeper is None else self._keeper.tunnel

    def _where(self) -> tuple[str, str, str]:
        """Address that the code leads to, how the tunnel stands, what to do for it; all empty where this side does not listen."""
        if self._listener is None:
            return "", "", ""
        keeper = self._keeper
        return self.join_code.address, *(("", "") if keeper is None else (keeper.state(), keeper.note()))

    @property
    def expected_workers(self) -> int:
        """How many workers the configuration speaks of."""
        return self.config.num_workers

    def expect_workers(self, count: int) -> None:
        """Change how many workers are waited for.

        Raises:
            ConfigError: the number is out of range; nothing has changed.
        """
        changed = self.config.replace(num_workers=count)
        changed.validate()
        self.config = changed

    def close(self) -> None:
        """Stop the run, say goodbye to all workers, free the port. Safe to call twice; an interrupt waits for its end.

        In a forked process it does nothing: the session belongs to the process that opened it.
        """
        if self._is_copy:
            return
        with interrupts_wait():
            self._close()

    @property
    def _is_copy(self) -> bool:
        """Whether this process was forked from that of the session: its threads and connections are there only."""
        return os.getpid() != self._process

    def _close(self) -> None:
        self._dialled.close("the orchestrator closed the session")
        if self._keeper is not None:
            self._keeper.begin_close()
        if self._listener is not None:
            self._listener.close("the orchestrator closed the session")
        self._end_launched()
        if self._keeper is not None:
            self._keeper.close()
        if self._cluster is not None:
            self._cluster.close()
        self._notices.stop()
        close_all(self._local)
        self._local.clear()
        self._cluster = self._listener = self._keeper = None
        self._let_file_go(forget=True)
        atexit.unregister(self._at_exit)
        # Python looks for cycles when many objects were made, and a session is few objects with many bytes: models,
        # receive buffers. Those of earlier sessions would stay for long.
        gc.collect()

    def __del__(self) -> None:
        """Close a session to which no reference is left, as a file is; aside, because any thread may come by here."""
        if getattr(self, "_cluster", None) is None or self._is_copy or sys.is_finalizing():
            return
        warnings.warn(f"the session {self.diary.session} was dropped without close()", ResourceWarning, stacklevel=2)
        with contextlib.suppress(RuntimeError):  # the program ends, and takes all with it
            threading.Thread(target=self._close, name="guava-close-dropped").start()

    def status(self) -> Status | None:
        """Return what `guava status` shows of it; None: nothing."""
        return None

    def _let_file_go(self, forget: bool) -> None:
        if self._shown is not None:
            self._shown.close()
            self._shown = None
        if self._file is not None:
            self._file.release(forget)
            self._file = None

    def __enter__(self) -> Self:
        """Open the session, unless it has dialled its workers."""
        if self._cluster is None:
            self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the session."""
        self.close()

    def _open_cluster(self) -> Cluster:
        if self._cluster is None:
            raise ClusterError("the session is not open: call open(), or run %guava_up")
        return self._cluster

    def wait_for_workers(
        self, count: int | None = None, timeout: float | None = None, on_wait: Callable[[int], None] | None = None
    ) -> list[str]:
        """Wait until `count` (default: the configuration's `num_workers`) are there; returns their names.

        Args:
            count: of workers; None takes `num_workers` of the configuration.
            timeout: seconds; None waits until they come or the wait is interrupted.
            on_wait: called a few times a second with the number that is there.

        Raises:
            RendezvousTimeout: too few came in time.
        """
        cluster = self._open_cluster()
        return [cluster.name(rank) for rank in cluster.wait_for(count or self.expected_workers, timeout, on_wait)]

    def own_parts(self) -> set[str]:
        """Return what all connected workers have in their own processes: "model", "criterion", "optimizer", ..."""
        return common_parts(self._open_cluster())

    def launch_workers(self, count: int, device: str = "auto", threads: int | None = None) -> list[WorkerHandle]:
        """Start worker processes on this machine; they join by themselves, and a notice says what each of them takes.

        Args:
            count: how many.
            device: "auto" gives each a GPU of its own while there are GPUs, then the processor; or one for all of them.
            threads: torch's threads in each; None takes the configuration's `threads_per_worker`, else `OMP_NUM_THREADS`
                where it is set, else shares the cores out that this process may use.

        Raises:
            ClusterError: the session is not open, or only dials.
        """
        if self._listener is None:
            raise ClusterError("this session does not listen: open() makes it listen, then workers can join")
        # Not through the tunnel: they are here.
        code = self._listener.join_code(_FROM_HERE.get(self._listener.host))
        gpus = visible_gpus() if device == "auto" else []
        running = [worker.status().device for worker in self._local if worker.alive]
        own = os.environ.get("OMP_NUM_THREADS", "")
        threads = threads or self.config.threads_per_worker or (int(own) if own.isdecimal() else None)
        places = place(count, device, threads, gpus=gpus, cores=allowed_cores(), running=running)
        names = [f"local-{len(self._local) + k + 1}" for k in range(count)]
        if count > 1:
            expect_workers(places[0].threads)
        started = [
            launch(code, one.device, name, one.threads, self.log_folder, self.config)
            for name, one in zip(names, places, strict=True)
        ]
        self._local.extend(started)
        if self._file is not None:
            self._file.note_local(names)
        if started:
            self._open_cluster().notice(describe(names, places))
        return started

    def log(self, worker: str | None = None, n: int = 50) -> list[str]:
        """Return the last lines that a worker printed; of all workers with their names in front.

        Raises:
            ConfigError: no worker of this name.
        """
        cluster = self._open_cluster()
        names = [m.name for m in cluster.members()]
        if worker is not None and worker not in names:
            raise ConfigError(f"no worker is called {worker!r}; there are: {', '.join(names) or 'none yet'}")
        return cluster.output.tail(worker, n)


def _listening(listener: Callable[..., Listener], config: DistributedConfig, saved: SavedSession | None) -> Listener:
    """Start to listen, known again by what a process before left; at another port where another program has the one of then."""
    if saved is None:
        made = listener(config.master_port, tls=config.tls)
        made.start()
        return made
    own = config.tls, saved.secret, saved.pinned()
    made = listener(config.master_port or saved.port, *own)
    try:
        made.start()
    except ConfigError:
        if config.master_port:
            raise
        made = listener(0, *own)
        made.start()
    return made


def _close_at_exit(host: SessionHost) -> Callable[[], None]:
    """Say goodbye at the end of a program that does not close its session: its workers need not wait for it then."""
    there, process = weakref.ref(host), os.getpid()

    def close() -> None:
        if (found := there()) is not None and os.getpid() == process:
            found._close()

    atexit.register(close)
    return close


def common_parts(cluster: Cluster) -> set[str]:
    """Return what every connected worker has in its own process; empty when none is connected."""
    found = [set(cluster.roster.members[rank].hello.own) for rank in cluster.roster.ready()]
    return set.intersection(*found) if found else set()
